"""Turns a Job into what will be done: a dry run prints the plan, and nothing else differs.

Nothing here writes a file or starts a process, and almost everything depends on its arguments
alone. A few functions read more: `home_path` the home folder, `typed_command` the cluster that a
command was typed for, and
`interactive_shell` the script of a run.
"""
