"""What it costs to look at a node: CPU time of one sample, and the share of a core at the usual interval.

    python benchmarks/system_metrics.py [--samples 300] [--ranks 8] [--interval 15]

Beside it psutil, asked for the same numbers. Stand-ins of ranks run meanwhile, each with a worker below it, among
whatever else this machine runs. Wanted: under 1 % of one core.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import psutil

from paceline.agent.health.node_metrics import NodeMetrics
from paceline.agent.health.nvml import Gpus

from machine import describe, show

LIMIT = 1.0  # per cent of a core
RANK = """\
import subprocess, sys
subprocess.run([sys.executable, "-c", "import sys; print('up', flush=True); sys.stdin.read()"])
"""


def start_ranks(count: int) -> list[subprocess.Popen[str]]:
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(count)
    ]
    for each in started:
        assert each.stdout is not None
        assert each.stdout.readline() == "up\n"
    return started


def end_ranks(started: list[subprocess.Popen[str]]) -> None:
    for each in started:
        each.communicate()


def ask_psutil() -> None:
    """The same numbers: CPU, memory, network, disks, and the run's own processes."""
    psutil.cpu_percent()
    psutil.virtual_memory()
    psutil.net_io_counters(pernic=True)
    psutil.disk_io_counters(perdisk=True)
    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        try:
            process.cpu_times()
            process.memory_info()
        except psutil.Error:
            continue


def cost(action: Callable[[], object], samples: int) -> float:
    """Microseconds of CPU time that one call takes: the median, so that first looks and strangers do not decide."""
    taken = []
    for _ in range(samples):
        began = time.thread_time()
        action()
        taken.append(time.thread_time() - began)
    return statistics.median(taken) * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=300)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--interval", type=float, default=15.0)
    options = parser.parse_args()
    describe("system metrics")
    ranks = start_ranks(options.ranks)
    try:
        gpus = Gpus.open(os.environ)
        there = f"{len(psutil.pids())} processes on it, {2 * options.ranks + 1} of them the run's"
        print(f"{there}, {len(gpus.names) if gpus else 0} GPUs (asked by us alone)")
        metrics = NodeMetrics(lambda: {os.getpid()}, gpus=gpus)
        ours, peer = cost(metrics.sample, options.samples), cost(ask_psutil, options.samples)
        metrics.close()
    finally:
        end_ranks(ranks)
    share = {name: value / options.interval / 1e4 for name, value in (("ours", ours), ("psutil", peer))}
    show(
        [
            "who asks",
            "CPU time of a sample",
            f"of a core, every {options.interval:g} s",
            "ours is quicker by",
        ],
        [
            ["paceline", f"{ours:,.0f} µs", f"{share['ours']:.4f} %", ""],
            ["psutil", f"{peer:,.0f} µs", f"{share['psutil']:.4f} %", f"{peer / ours:.1f} x"],
        ],
    )
    return 0 if share["ours"] < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
