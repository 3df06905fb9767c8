"""Data-loader workers ignore stop signals and never outlive their rank."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from paceline.runtime.data.item_source import ItemSource
from paceline.runtime.data.loader import MapLoader
from paceline.runtime.distributed.identity import Identity
from tests.runtime.data.datasets import Numbers
from tests.until import until

ROOT = Path(__file__).parents[3]

SCRIPT = """
import sys, time
from paceline.runtime.data.loader import MapLoader
from paceline.runtime.distributed.identity import Identity
from tests.runtime.data.datasets import Endless, Numbers

data = {data}
loader = MapLoader(data, batch_size=2, num_workers=2, identity=Identity())
batches = loader.micro_batches(0)
{do}
"""


def start(data: str, do: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(data=data, do=do)],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_workers_continue_after_every_stop_signal() -> None:
    loader = MapLoader(
        Numbers(40),
        batch_size=2,
        num_workers=2,
        shuffle=False,
        identity=Identity(),
        prefetch_factor=1,
    )
    batches = loader.micro_batches(0)
    got = [next(batches), next(batches)]  # one from each worker: both have started
    assert isinstance(loader.source, ItemSource)
    workers = [psutil.Process(each.pid) for each in loader.source.workers._iterator._workers]
    assert len(workers) == 2
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        for worker in workers:
            worker.send_signal(number)
    got += list(batches)
    assert sum(int(micro.data.sum()) for micro in got) == sum(range(40))
    loader.close()
    until(lambda: all(map(is_gone, workers)), "the workers exit")


def test_workers_die_with_a_rank_that_was_killed() -> None:
    rank = start("Numbers(1000)", "next(batches); print('ready', flush=True); time.sleep(600)")
    assert rank.stdout is not None
    assert rank.stdout.readline() == "ready\n"
    workers = psutil.Process(rank.pid).children()
    assert len(workers) == 2
    rank.kill()
    rank.wait()
    until(lambda: all(map(is_gone, workers)), "the workers exit")
    rank.communicate()


@pytest.mark.parametrize("way", ["pass", "loader.close()"])
def test_exit_does_not_wait_for_a_worker_that_is_stuck(way: str, tmp_path: Path) -> None:
    # Workers ignore the SIGTERM that Python sends to its children at exit, so it would wait forever.
    stuck = f"""
import pathlib, torch
from paceline.runtime.data.sample_order import EpochOrder
loader.source.batches(EpochOrder(torch.arange(8)), loader.plan.slices(), 0)
while len(list(pathlib.Path({str(tmp_path)!r}).iterdir())) < 2:
    time.sleep(0.02)
print("leaving", flush=True)
{way}
"""
    rank = start(f"Endless(8, {str(tmp_path)!r})", stuck)
    stdout, stderr = rank.communicate(timeout=120)
    assert (stdout, stderr, rank.returncode) == ("leaving\n", "", 0)
