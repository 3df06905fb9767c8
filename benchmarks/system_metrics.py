"""The cost of sampling a node: CPU time per sample, and the share of a core at the default interval.

    python benchmarks/system_metrics.py [--samples 300] [--ranks 8] [--interval 15]

Compared with psutil, which reads the same numbers. Meanwhile dummy ranks run, each with one worker process.
Target: under 1 % of one core.
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


def sample_psutil() -> None:
    """Read the same numbers: CPU, memory, and the run's own processes."""
    psutil.cpu_percent()
    psutil.virtual_memory()
    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        try:
            process.cpu_times()
            process.memory_info()
        except psutil.Error:
            continue


def cost(action: Callable[[], object], samples: int) -> float:
    """Return the median CPU time of one call in microseconds; the median ignores slow first calls and interference."""
    times = []
    for _ in range(samples):
        began = time.thread_time()
        action()
        times.append(time.thread_time() - began)
    return statistics.median(times) * 1e6


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
        processes = f"{len(psutil.pids())} processes, {2 * options.ranks + 1} of them the run's"
        print(f"{processes}, {len(gpus.models) if gpus else 0} GPUs (sampled by paceline only)")
        metrics = NodeMetrics(lambda: {os.getpid()}, gpus=gpus)
        ours, peer = cost(metrics.sample, options.samples), cost(sample_psutil, options.samples)
        metrics.close()
    finally:
        end_ranks(ranks)
    share = {
        name: value / options.interval / 1e4 for name, value in (("ours", ours), ("psutil", peer))
    }
    show(
        [
            "sampler",
            "CPU time per sample",
            f"of a core, every {options.interval:g} s",
            "paceline is faster by",
        ],
        [
            ["paceline", f"{ours:,.0f} µs", f"{share['ours']:.4f} %", ""],
            ["psutil", f"{peer:,.0f} µs", f"{share['psutil']:.4f} %", f"{peer / ours:.1f} x"],
        ],
    )
    return 0 if share["ours"] < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
