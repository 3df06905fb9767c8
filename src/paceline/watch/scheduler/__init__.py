"""What Slurm says about jobs, asked as rarely as possible and shared by all Paceline processes of
a user.
"""
