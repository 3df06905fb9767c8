"""Each module makes one kind of change to a script, or finds one kind of thing that a person must
look at.
"""
