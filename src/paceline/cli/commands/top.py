"""`paceline top`: watch your runs full screen."""

from __future__ import annotations

import sys

from paceline.cli import runs
from paceline.errors import EnvironmentProblem, UsageError


def command() -> int:
    """Watch your runs full screen: loss, ranks, nodes, log, time left.

    It only reads the run folders, and asks Slurm no more often than `paceline ps`. Press ? for the keys. Some
    cancel, stop or requeue a run: it asks first. Colours are those of your terminal; NO_COLOR turns them off.
    """
    try:
        import textual  # noqa: F401
    except ImportError:
        raise EnvironmentProblem(
            "`paceline top` needs Textual, which is not installed here.",
            hint="Install it: pip install 'paceline[ui]'",
        ) from None
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError(
            "`paceline top` needs a terminal.", hint="`paceline ps` prints the runs once."
        )
    from paceline.ui.terminal.app import TopApp

    TopApp(runs.scratch_here()).run()
    return 0
