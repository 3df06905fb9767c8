"""A node launcher, from its start to its exit code. What takes long (importing torch) is set going first."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from paceline import contract
from paceline.contract import INTERRUPTED_EXIT, Order, RunFolder
from paceline.errors import LaunchError, PacelineError
from paceline.node import forking
from paceline.node.opening import FORKING_STYLES
from paceline.node.signals import Requests


def main() -> int:
    requests = Requests()  # first: a request that comes this early is kept, and ends nothing by default
    requests.listen()
    try:
        run, order = _read_order()
        zygote, why_not = _begin(order)
    except PacelineError as problem:
        print(f"paceline: {problem}", file=sys.stderr)
        return problem.exit_code

    # Imported only now: the zygote imports torch meanwhile.
    from paceline.node import processes
    from paceline.node.leading import Launcher

    processes.adopt_orphans()
    launcher = Launcher(run, order, environ=dict(os.environ), requests=requests, zygote=zygote)
    if why_not:
        launcher.say(f"{why_not}: ranks are started as fresh processes instead of being forked")
    try:
        return launcher.carry_out()
    except PacelineError as problem:
        launcher.give_up(problem)
        return INTERRUPTED_EXIT if requests.interrupt else problem.exit_code
    except OSError as problem:  # of this machine: no memory, no descriptors, no room for the beat file
        launcher.give_up(LaunchError(f"the launcher cannot go on: {problem}"))
        return 1
    finally:
        launcher.close()


def _read_order() -> tuple[RunFolder, Order]:
    folder = os.environ.get(contract.RUN)
    if not folder:
        raise LaunchError(
            f"{contract.RUN} is not set", hint="a launcher is started by `paceline run` or by the job"
        )
    run = RunFolder(Path(folder))
    try:
        return run, Order.from_json(run.order.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError) as problem:
        raise LaunchError(
            f"cannot read {run.order}: {problem}", hint="the run folder must be on a path that all nodes see"
        ) from None


def _begin(order: Order) -> tuple[forking.ForkedRanks | None, str]:
    """Start the zygote where ranks are to be forked; else why not, where that must be said."""
    forks = order.style in FORKING_STYLES
    why_not = (forking.can_fork(order) or "") if forks else ""
    if not forks or why_not:
        forking.dismiss(os.environ)
        return None, why_not
    return forking.ForkedRanks.begin(order, os.environ), ""
