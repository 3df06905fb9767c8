"""The command that runs a module of ours in a new Python process. Imports little: start-up time
counts.
"""

from __future__ import annotations

import os

import paceline

# Not `-m`: it would put the current folder, and any module in it, ahead of the standard library.
# `-c` does the same with an empty entry, unless PYTHONSAFEPATH is set: then the first entry is
# needed.
DROP_CWD_FROM_PATH = "import sys; sys.path[:1] = filter(None, sys.path[:1])"
_RUN_MAIN = (
    DROP_CWD_FROM_PATH
    + """
try: import paceline.{module} as it
except ImportError: sys.path.append({root!r}); import paceline.{module} as it
sys.exit(it.main(sys.argv[1:]))"""
)


def python_command(python: str, module: str, *, bare: bool = False) -> list[str]:
    """Return the command that runs `main` of a module below `paceline` in a new interpreter.

    A bare interpreter has no site-packages and starts in half the time.
    """
    root = os.path.dirname(os.path.dirname(os.path.abspath(paceline.__file__)))
    return [python, *(["-S"] if bare else []), "-c", _RUN_MAIN.format(module=module, root=root)]
