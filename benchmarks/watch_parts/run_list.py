"""`paceline ps` of thousands of runs, beside a script that only reads every run.json."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from watch_parts.runs import make_runs

from machine import show

PEER = """
import json, pathlib, sys
rows = [json.loads(path.read_text()) for path in pathlib.Path(sys.argv[1]).glob("*/*/*/run.json")]
for row in sorted(rows, key=lambda row: row["run_id"], reverse=True):
    print(row["run_id"], row["name"], row["nodes"], row["nproc"])
"""


def measure(folder: Path, count: int, active: int, repeats: int) -> None:
    scratch = make_runs(folder, count, active)
    environment = {**os.environ, "PACELINE_SCRATCH": str(scratch)}

    def time_command(*command: str) -> tuple[float, float]:
        """Return the median of the wall time and of the CPU time."""
        times = []
        for _ in range(repeats):
            cpu, wall = _children(), time.perf_counter()
            subprocess.run(
                command, env=environment, cwd=folder, check=True, stdout=subprocess.DEVNULL
            )
            times.append((time.perf_counter() - wall, _children() - cpu))
        return median(wall for wall, _ in times), median(cpu for _, cpu in times)

    paceline = (sys.executable, "-m", "paceline")
    peer = time_command(sys.executable, "-c", PEER, str(scratch))
    rows = [("a script that reads every run.json", f"{peer[0]:.2f}", f"{peer[1]:.2f}", "1.00")]
    for what, command in (
        ("paceline ps --all", (*paceline, "ps", "--all")),
        ("paceline ps --live", (*paceline, "ps", "--live")),
        ("paceline ps", (*paceline, "ps")),
        ("paceline ps --help", (*paceline, "ps", "--help")),
    ):
        wall, cpu = time_command(*command)
        rows.append((what, f"{wall:.2f}", f"{cpu:.2f}", f"{wall / peer[0]:.2f}"))
    show((f"{count:,} runs, {active} active", "seconds", "CPU seconds", "ratio"), rows)


def _children() -> float:
    used = os.times()
    return used.children_user + used.children_system
