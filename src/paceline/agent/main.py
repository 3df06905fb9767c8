"""A node agent, from its start to its exit code. What takes long (importing torch) is set going first."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from paceline.agent.signals import Requests
from paceline.agent.workers import fork
from paceline.agent.workers.zygote.start import FORKING_STYLES
from paceline.contract import env
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import RunFolder
from paceline.contract.verdict import INTERRUPTED_EXIT
from paceline.errors import LaunchError, PacelineError


def main() -> int:
    requests = Requests()  # first: a request that comes this early is kept, and ends nothing by default
    requests.listen()
    try:
        run, launch_spec = _read_launch_spec()
        zygote, why_not = _begin(launch_spec)
    except PacelineError as problem:
        print(f"paceline: {problem}", file=sys.stderr)
        return problem.exit_code

    # Imported only now: the zygote imports torch meanwhile.
    from paceline.agent.agent import Agent
    from paceline.agent.workers import processes

    processes.adopt_orphans()
    agent = Agent(run, launch_spec, environ=dict(os.environ), requests=requests, zygote=zygote)
    if why_not:
        agent.say(f"{why_not}: ranks are started as fresh processes instead of being forked")
    try:
        return agent.carry_out()
    except PacelineError as problem:
        agent.give_up(problem)
        return INTERRUPTED_EXIT if requests.interrupt else problem.exit_code
    except OSError as problem:  # of this machine: no memory, no descriptors, no room for the beat file
        agent.give_up(LaunchError(f"the agent cannot go on: {problem}"))
        return 1
    finally:
        agent.close()


def _read_launch_spec() -> tuple[RunFolder, LaunchSpec]:
    folder = os.environ.get(env.RUN)
    if not folder:
        raise LaunchError(f"{env.RUN} is not set", hint="a agent is started by `paceline run` or by the job")
    run = RunFolder(Path(folder))
    try:
        return run, LaunchSpec.from_json(run.launch_spec.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError) as problem:
        raise LaunchError(
            f"cannot read {run.launch_spec}: {problem}",
            hint="the run folder must be on a path that all nodes see",
        ) from None


def _begin(launch_spec: LaunchSpec) -> tuple[fork.ForkedWorkers | None, str]:
    """Start the zygote where ranks are to be forked; else why not, where that must be said."""
    forks = launch_spec.style in FORKING_STYLES
    why_not = (fork.reason_not_to_fork(launch_spec) or "") if forks else ""
    if not forks or why_not:
        fork.discard_prestarted(os.environ)
        return None, why_not
    return fork.ForkedWorkers.prepare(launch_spec, os.environ), ""
