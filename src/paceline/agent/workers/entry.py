"""A rank in a fresh process: what torchrun, or the agent where it cannot fork, runs in place of the script."""

from __future__ import annotations

import json
import os
from pathlib import Path

from paceline.agent.workers import bootstrap
from paceline.agent.workers.environment import PARENT, STREAMS
from paceline.contract import env, process
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import RunFolder
from paceline.contract.verdict import STOPPED_EXIT


def main(_: list[str] | None = None) -> None:
    environ = os.environ
    if PARENT in environ:
        process.die_with_parent(int(environ[PARENT]))
    run = RunFolder(Path(environ[env.RUN]))
    launch_spec = LaunchSpec.from_json(run.launch_spec.read_text(encoding="utf-8"))
    local_rank = int(environ.get(env.LOCAL_RANK, "0"))
    under_torchrun = STREAMS in environ
    if under_torchrun:
        _take_streams(json.loads(environ[STREAMS])[str(local_rank)])
    attempt = run.attempt(int(environ[env.ATTEMPT]))
    # A process that spawns ranks itself is none: it has no slot to beat in.
    is_rank = env.RANK in environ
    job = bootstrap.job_of(launch_spec, attempt=attempt, beat=environ[env.HEARTBEAT])
    # What it has to say of itself stands with the first rank of its node.
    first = int(environ[env.GROUP_RANK]) * launch_spec.nproc
    number = int(environ.get(env.RANK, first))
    try:
        bootstrap.run(job, rank=number, local_rank=local_rank, is_rank=is_rank)
    except SystemExit as leaving:
        # torchrun would take this code for a failure and end the others; the beat has told the agent.
        if under_torchrun and leaving.code == STOPPED_EXIT:
            raise SystemExit(0) from None
        raise


def _take_streams(paths: list[str]) -> None:
    """Print into the agent's own pipes, past a starter that mixes its ranks' output."""
    for number, path in enumerate(paths, start=1):
        descriptor = os.open(path, os.O_WRONLY | os.O_NOCTTY)
        os.dup2(descriptor, number)
        os.close(descriptor)


if __name__ == "__main__":
    main()
