"""Guests end as they do in plain Python: no hang, no abort, nothing lost. `make soak-guests` repeats it 200 times."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent.conftest import Launch, launch  # noqa: F401  (a fixture)

SCRIPT = (Path(__file__).parent / "exit_paths.py").read_text(encoding="utf-8")

# Without Paceline, this deadlocks within a few hundred rounds (docs/upstream/gloo-exit-deadlock.md).
MANY_GROUPS = """
import faulthandler, os
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def main():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    model(torch.ones(1, 4)).sum().backward()
    dist.destroy_process_group()

def count(kind):
    return len(os.listdir("/proc/self/" + kind))

for round in range(400):
    faulthandler.dump_traceback_later(60, exit=True)
    main()
    if round == 3:
        before = count("task"), count("fd")
print("threads", count("task") - before[0] < 4, "files", count("fd") - before[1] < 4)
"""

# Rank 1 fails while its own collective waits for rank 0, which does something else for a long time. The variable makes
# Paceline start fresh processes instead of forks.
FAILS_WITH_A_COLLECTIVE_UNDER_WAY = """
import os, time
os.environ["OMP_SCHEDULE"] = "static"
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 0:
    time.sleep(300)
dist.all_reduce(torch.ones(1), async_op=True)
raise ValueError("a bug in the script")
"""


def test_groups_are_freed_without_a_deadlock_and_leave_nothing_behind(launch: Launch) -> None:  # noqa: F811
    started = launch(MANY_GROUPS, light=False, nproc=1)
    assert started.wait() == 0, started.err()
    assert started.log(0).split() == ["threads", "True", "files", "True"]


def test_a_failed_rank_does_not_wait_for_its_peers(launch: Launch) -> None:  # noqa: F811
    started = launch(FAILS_WITH_A_COLLECTIVE_UNDER_WAY, light=False)
    assert started.wait() == 1
    assert started.failure()["rank"] == 1
    assert "a bug in the script" in started.err()


@pytest.mark.parametrize(
    "path",
    [
        "pending",
        pytest.param("no_destroy_global", marks=pytest.mark.slow),
        pytest.param("new_group", marks=pytest.mark.slow),
        pytest.param("fsdp", marks=pytest.mark.slow),
        pytest.param("exception", marks=pytest.mark.slow),
    ],
)
def test_ranks_end_as_in_plain_python(launch: Launch, path: str) -> None:  # noqa: F811
    started = launch(SCRIPT, light=False, nproc=3, args=[path])
    assert started.wait() == (1 if path == "exception" else 0), started.err()
    for rank in range(3):
        # The agent ends the other ranks after the first failure, so they may not get that far.
        if path != "exception" or rank == started.failure()["rank"]:
            assert "atexit" in started.log(rank)
            assert (started.run.path / f"output-{rank}").read_text() == "complete"
