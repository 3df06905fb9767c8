"""New projects: which templates there are, and how a project is created from one.

`files/` has what every project gets, and the template `blank`. The scripts of all others are those
of `examples/`, which the wheel contains as `files/examples/`.
"""
