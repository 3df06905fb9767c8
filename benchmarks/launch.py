"""Measure the time from the command to every rank's first all-reduce: `paceline run` compared with torchrun.

    python benchmarks/launch.py [--ranks 2 4 8] [--repeats 5]

All start the same script, in turn, in one run: `paceline run` cold, then from a warm process (`--warm`), then torchrun.
Memory is that of the whole process tree at that moment, with the warm process (PSS: shared pages count once).
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from machine import describe, show

TARGETS = {2: 2.0, 4: 2.5, 8: 3.0}
WARM_TARGETS = {2: 6.0, 4: 8.0, 8: 10.0}
PACELINE = str(Path(sys.executable).parent / "paceline")

SCRIPT = """
import os, sys, time
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
folder = Path(sys.argv[1])
(folder / f"rank-{dist.get_rank()}.partial").write_text(repr(time.time()))
os.rename(folder / f"rank-{dist.get_rank()}.partial", folder / f"rank-{dist.get_rank()}")
while not (folder / "go").exists():
    time.sleep(0.01)
dist.destroy_process_group()
"""


def memory_of(pid: int) -> float:
    """Return the megabytes of a process and all its descendants."""
    total = 0
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total / 1e6


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of an ordinary shell, where packages are compiled once and not at each start."""
    left_out = ("PYTHONDONTWRITEBYTECODE", "CI", "SLURM_JOB_ID")
    variables = {name: value for name, value in os.environ.items() if name not in left_out}
    return {
        **variables,
        "PACELINE_SCRATCH": str(folder / "runs"),
        "XDG_RUNTIME_DIR": str(folder.parent),
    }


def ask_warm(question: str, folder: Path) -> int:
    """Return the warm process that `paceline clean --processes` lists, and "stop" ends; 0 if there is none."""
    command = [PACELINE, "clean", "--processes", *(["--yes"] if question == "stop" else [])]
    answer = subprocess.run(
        command, env=environment(folder), capture_output=True, text=True, check=True
    ).stdout
    found = re.search(r"process (\d+)", answer)
    return int(found[1]) if found else 0


def once(command: list[str], ranks: int, folder: Path) -> tuple[float, float]:
    """Return the seconds to the first all-reduce of all ranks, and the tree's memory at that moment."""
    folder.mkdir()
    started = time.time()
    with subprocess.Popen(
        [*command, str(folder)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment(folder),
    ) as process:
        marks = [folder / f"rank-{rank}" for rank in range(ranks)]
        while not all(mark.exists() for mark in marks):
            if process.poll() is not None:
                assert process.stderr is not None
                sys.exit(f"{command[0]} ended early:\n{process.stderr.read().decode()[-2000:]}")
            time.sleep(0.02)
        reached = max(float(mark.read_text()) for mark in marks)
        memory = memory_of(process.pid)
        if "--warm" in command:
            memory += memory_of(ask_warm("status", folder))
        (folder / "go").touch()
        process.communicate(timeout=60)
    return reached - started, memory


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    describe("launch to first all-reduce")
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        script = Path(scratch) / "probe.py"
        script.write_text(SCRIPT)
        try:
            for ranks in options.ranks:
                rows += compare(ranks, script, options.repeats)
        finally:
            ask_warm("stop", Path(scratch) / "stop")
    show(["", "", "time", "than torchrun", "target", "memory"], rows)


def compare(ranks: int, script: Path, repeats: int) -> list[list[str]]:
    run = [PACELINE, "run", "--cpu", "--nproc", str(ranks)]
    peers = {
        "paceline": [*run, str(script)],
        "paceline --warm": [*run, "--warm", str(script)],
        "torchrun": [
            str(Path(PACELINE).with_name("torchrun")),
            "--nproc-per-node",
            str(ranks),
            str(script),
        ],
    }
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in peers}
    for repeat in range(repeats + 1):
        for name, command in peers.items():
            result = once(command, ranks, script.with_name(f"{name.split()[-1]}-{ranks}-{repeat}"))
            if repeat:  # the first run of each warms the page cache, and leaves the warm process
                results[name].append(result)
    seconds = {
        name: statistics.median(each[0] for each in measured) for name, measured in results.items()
    }
    memory = {
        name: statistics.median(each[1] for each in measured) for name, measured in results.items()
    }
    targets = {"paceline": TARGETS.get(ranks), "paceline --warm": WARM_TARGETS.get(ranks)}
    return [
        [
            f"{ranks} ranks",
            name,
            f"{seconds[name]:.2f} s",
            f"{seconds['torchrun'] / seconds[name]:.1f}x faster",
            f"{target:.1f}x" if (target := targets.get(name)) else "",
            f"{memory[name]:.0f} MB",
        ]
        for name in peers
    ]


if __name__ == "__main__":
    main()
