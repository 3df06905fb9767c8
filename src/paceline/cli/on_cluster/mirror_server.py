"""What commands on a laptop start on the cluster to watch runs there, and to act on them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from paceline.cli import runs
from paceline.errors import PacelineError, UsageError

STREAM, ACT = "stream", "act"
# before a name that is a sweep's, also if a run has the same one; no name has a line end
SWEEP = "sweep\n"


def serve(args: Sequence[str]) -> int:
    """Send what changes in runs, or do something to one: `stream`, or `act VERB RUN`."""
    if args and args[0] == STREAM:
        from paceline.ssh.mirror.reader import serve as serve_changes

        return serve_changes(runs.scratch_here(), _find)
    if len(args) == 3 and args[0] == ACT:
        from paceline.ui.web.run_actions import VERBS, act

        if args[1] not in VERBS:
            raise UsageError(f"Unknown action {args[1]!r}.")
        try:
            answer = {"done": act(runs.own(args[2]), args[1])}
        except PacelineError as problem:
            answer = {"error": problem.message}
        print(json.dumps(answer))
        return 0
    raise UsageError("This is started by commands with --on.")


def _find(name: str) -> Path:
    if name.startswith(SWEEP):
        from paceline.sweep.results import find_sweep

        return find_sweep(name.removeprefix(SWEEP), runs.scratch_here()).path
    with suppress(UsageError):
        return runs.run_or_sweep(name).path
    return runs.named(name).path  # says what is wrong
