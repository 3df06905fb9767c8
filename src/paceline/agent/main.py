"""An agent process, from its start to its exit code. The slow part, importing torch, starts
first.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.agent.stop import Requests
from paceline.agent.workers import forked_ranks
from paceline.agent.workers.zygote.start import FORKING_STYLES
from paceline.contract import env
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.process import die_with_parent
from paceline.contract.run_folder import INTERRUPTED_EXIT, RunFolder
from paceline.errors import LaunchError, PacelineError

if TYPE_CHECKING:
    from paceline.agent.agent import Agent


# What an agent imports until its ranks start; most of it only when it is needed, but while an early
# agent imports it, nobody waits for it.
MODULES = ("paceline.agent.agent", "paceline.staging.cleanup", "paceline.agent.workers.bootstrap")


def main(early: Sequence[str] = ()) -> int:
    """Run an agent. One that is started while the command line is parsed is given the descriptor of
    a pipe, which brings the variables of its run, and its parent.
    """
    if early and not _await_run(*map(int, early)):
        return 0  # the command needs no agent
    requests = Requests()  # first: from now on a signal is counted, and does not end the process
    requests.listen()
    try:
        run, launch_spec = _read_launch_spec()
        zygote, why_not_forked = _start_zygote(launch_spec)
    except PacelineError as problem:
        print(f"paceline: error: {problem}", file=sys.stderr)
        return problem.exit_code

    # Imported only now, while the zygote imports torch.
    from paceline.agent.agent import Agent
    from paceline.agent.workers import process_tree

    process_tree.adopt_orphans()
    agent = Agent(run, launch_spec, environ=dict(os.environ), requests=requests, zygote=zygote)
    if why_not_forked:
        agent.say(f"starting ranks as new processes instead of forking them: {why_not_forked}")
    try:
        with agent.cleanup:
            return _run(agent)
    finally:
        requests.ignore()


def _await_run(pipe: int, parent: int) -> bool:
    die_with_parent(parent, signal.SIGTERM)
    for name in MODULES:
        importlib.import_module(name)
    with open(pipe, "rb") as file:
        variables = file.read()
    if variables:
        os.environ.clear()
        os.environ.update(json.loads(variables))
    return bool(variables)


def _run(agent: Agent) -> int:
    try:
        return agent.run_to_verdict()
    except PacelineError as problem:
        if not agent.requests.interrupt:
            return agent.fail(problem)
        agent.cancel_start()  # Ctrl-C is the reason, or somebody left because of it
        return INTERRUPTED_EXIT
    except OSError as problem:  # this machine has no memory, descriptors or disk space left
        return agent.fail(LaunchError(f"The agent cannot continue: {problem}."))
    except Exception as problem:  # a defect of ours: the run folder still says why the run ended
        traceback.print_exc()
        return agent.fail(LaunchError(f"The agent failed: {type(problem).__name__}: {problem}."))


def _read_launch_spec() -> tuple[RunFolder, LaunchSpec]:
    folder = os.environ.get(env.RUN)
    if not folder:
        raise LaunchError(
            f"{env.RUN} is not set.", hint="Start agents with `paceline run` or `paceline submit`."
        )
    run = RunFolder(Path(folder))
    try:
        return run, LaunchSpec.from_json(run.launch_spec.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError) as problem:
        raise LaunchError(
            f"Cannot read {run.launch_spec}: {problem}.",
            hint="Put the run folder on a path that all nodes see.",
        ) from None


def _start_zygote(launch_spec: LaunchSpec) -> tuple[forked_ranks.ForkedRanks | None, str]:
    """Start the zygote for styles that fork ranks. Otherwise return None, and why not if the user
    should know.
    """
    forks = launch_spec.style in FORKING_STYLES
    why_not = (forked_ranks.reason_not_to_fork(launch_spec, os.environ) or "") if forks else ""
    if forks and not why_not:
        return forked_ranks.ForkedRanks.prepare(launch_spec, os.environ), ""
    if env.ZYGOTE in os.environ:
        forked_ranks.ForkedRanks.prepare(launch_spec, os.environ).close()
    return None, why_not
