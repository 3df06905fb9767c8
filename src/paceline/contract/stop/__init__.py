"""How Paceline asks scripts without the runtime to stop, and how they report that they have
saved.
"""
