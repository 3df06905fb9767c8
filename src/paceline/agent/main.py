"""An agent process, from its start to its exit code. The slow part, importing torch, starts
first.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from paceline.agent.stop import Requests
from paceline.agent.workers import forked_ranks
from paceline.agent.workers.zygote.start import FORKING_STYLES
from paceline.contract import env
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import RunFolder
from paceline.contract.verdict import INTERRUPTED_EXIT
from paceline.errors import LaunchError, PacelineError


def main() -> int:
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
        return agent.run_to_verdict()
    except PacelineError as problem:
        if requests.interrupt:  # it is the reason, or somebody left because of it
            agent.cancel_start()
            return INTERRUPTED_EXIT
        return agent.fail(problem)
    except OSError as problem:  # this machine has no memory, descriptors or disk space left
        agent.fail(LaunchError(f"The agent cannot continue: {problem}."))
        return 1
    except Exception as problem:  # a defect of ours: the run folder still says why the run ended
        traceback.print_exc()
        agent.fail(LaunchError(f"The agent failed: {type(problem).__name__}: {problem}."))
        return 1
    finally:
        agent.close()
        requests.ignore()


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
    if not forks or why_not:
        forked_ranks.discard_prestarted(os.environ)
        return None, why_not
    return forked_ranks.ForkedRanks.prepare(launch_spec, os.environ), ""
