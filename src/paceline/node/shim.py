"""A rank in a fresh process: what torchrun, or the launcher where it cannot fork, runs in place of the script."""

from __future__ import annotations

import json
import os
from pathlib import Path

from paceline import contract
from paceline.contract import Order, RunFolder
from paceline.node import processes, rank
from paceline.node.variables import PARENT, STREAMS


def main(_: list[str] | None = None) -> None:
    environ = os.environ
    if PARENT in environ:
        processes.die_with_parent(int(environ[PARENT]))
    run = RunFolder(Path(environ[contract.RUN]))
    order = Order.from_json(run.order.read_text(encoding="utf-8"))
    local_rank = int(environ.get(contract.LOCAL_RANK, "0"))
    under_torchrun = STREAMS in environ
    if under_torchrun:
        _take_streams(json.loads(environ[STREAMS])[str(local_rank)])
    attempt = run.attempt(int(environ[contract.ATTEMPT]))
    # A process that spawns ranks itself is none: it has no slot to beat in.
    is_rank = contract.RANK in environ
    job = rank.job_of(order, attempt=attempt, beat=environ[contract.BEAT])
    # What it has to say of itself stands with the first rank of its node.
    first = int(environ[contract.GROUP_RANK]) * order.nproc
    number = int(environ.get(contract.RANK, first))
    try:
        rank.run(job, rank=number, local_rank=local_rank, is_rank=is_rank)
    except SystemExit as leaving:
        # torchrun would take this code for a failure and end the others; the beat has told the launcher.
        if under_torchrun and leaving.code == contract.STOPPED_EXIT:
            raise SystemExit(0) from None
        raise


def _take_streams(paths: list[str]) -> None:
    """Print into the launcher's own pipes, past a starter that mixes its ranks' output."""
    for number, path in enumerate(paths, start=1):
        descriptor = os.open(path, os.O_WRONLY | os.O_NOCTTY)
        os.dup2(descriptor, number)
        os.close(descriptor)


if __name__ == "__main__":
    main()
