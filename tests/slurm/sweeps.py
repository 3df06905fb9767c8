"""Sweeps that tests submit, and the results of their trials."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.contract.sweep_folder import SweepFolder
from paceline.tools.sandbox import PLAIN
from tests import until as waiting
from tests.slurm.harness import Cluster
from tests.slurm.runs import Completed

# No torch, and an agent that starts a fresh process: as quick as Python itself.
QUICK = '[launch]\nstyle = "srun"\n[job]\nname = "trial"\n'

SCRIPT = """\
import argparse, os, pathlib, sys
import paceline
parser = argparse.ArgumentParser()
parser.add_argument("--x", type=float)
parser.add_argument("--y", type=float, default=0.0)
args = parser.parse_args()
if args.x == 2 and not pathlib.Path(os.environ["PACELINE_SCRATCH_DIR"], "mended").exists():
    raise ValueError(f"two is too much, with {args.y:g}")
paceline.report((args.x - 0.3) ** 2 + (args.y + 0.5) ** 2)
"""

GRID = """\
[sweep]
metric = "loss"
script = "train.py"
[space]
x = [0, 1, 2, 3]
y = [0, 1, 2]
"""


def sweep_of(completed: Completed) -> SweepFolder:
    paths = [
        line.split(None, 1)[1]
        for line in completed.stdout.splitlines()
        if line.startswith("  folder  ")
    ]
    assert len(paths) == 1, f"{completed.stdout}\n{completed.stderr}"
    return SweepFolder(Path(paths[0]))


def results(sweep: SweepFolder) -> dict[int, dict[str, Any]]:
    found = {}
    for path in sweep.trials.glob("*/result.json"):
        found[int(path.parent.name)] = json.loads(path.read_text(encoding="utf-8"))
    return dict(sorted(found.items()))


def states(sweep: SweepFolder) -> list[str]:
    return [result["state"] for result in results(sweep).values()]


def tasks_of(sweep: SweepFolder) -> list[str]:
    return [f"{line['job']}_{index}" for line in sweep.read_jobs() for index in line["tasks"]]


def wait(cluster: Cluster, sweep: SweepFolder, *, timeout: float = 240) -> int:
    """Wait until every task has ended; return the maximum number that ran at once."""
    tasks = tasks_of(sweep)
    deadline, maximum = time.monotonic() + timeout, 0
    while True:
        queued = cluster.run(["squeue", "-h", "--array", "-o", "%i %T"]).stdout.splitlines()
        maximum = max(maximum, sum(line.endswith(" RUNNING") for line in queued))
        if not {line.split()[0] for line in queued} & set(tasks):
            return maximum
        assert time.monotonic() < deadline, f"{queued}\n{explain(sweep)}"
        time.sleep(0.2)


def explain(sweep: SweepFolder) -> str:
    """Return everything that may explain why trials failed."""
    logs = [*sweep.path.glob("submissions/*/logs/*"), *sweep.path.glob("trials/*/slurm.log")]
    texts = [f"--- {path}\n{path.read_text(errors='replace')[-1500:]}" for path in sorted(logs)]
    return "\n".join([f"results: {results(sweep)}", *texts])


def until(condition: Callable[[], bool], sweep: SweepFolder, *, timeout: float = 120) -> None:
    waiting.until(condition, details=lambda: explain(sweep), within=timeout, pause=0.1)


@contextmanager
def another(**settings: Any) -> Iterator[Cluster]:
    """A second, smaller cluster, with settings of its own."""
    with tempfile.TemporaryDirectory(
        prefix="paceline-slurm-", ignore_cleanup_errors=True
    ) as folder:
        made = Cluster.up(folder, nodes=2, gpus=0, network=PLAIN, owner=os.getpid(), **settings)
        try:
            yield made
        finally:
            made.down()
