"""Run folders by the thousand: copies of a real run, some of them active."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from paceline.contract.claims import describe_processes

SCRIPT = """
import paceline
with paceline.session() as run:
    for _ in run.epochs(3):
        for step in run.steps(range(100)):
            run.log(loss=1.0 / (step + 1))
"""
AGE = 3 * 86400.0  # seconds: as old as most runs are
# files that differ between runs; the others are links to the same ones
OWN = ("run.json", "verdict", "process")


def make_runs(folder: Path, count: int, active: int) -> Path:
    """Make a scratch folder with `count` runs, the oldest of which are active; return it."""
    template = _run_once(folder)
    scratch = folder / "scratch"
    record = json.loads((template / "run.json").read_text())
    now = time.time()
    for number in range(count):
        created = now - AGE - 60 * (count - number)
        run_id = time.strftime("%Y%m%d-%H%M%S", time.localtime(created)) + f"-{number % 65536:04x}"
        path = scratch / "project" / f"experiment-{number % 10}" / run_id
        _copy(template, path)
        written = {**record, "run_id": run_id, "name": f"run-{number}", "created": created}
        (path / "run.json").write_text(json.dumps(written))
        (job_start,) = (path / "job-starts").iterdir()
        if number < active:
            (job_start / "process").write_text(describe_processes([os.getpid()]))
        else:
            (job_start / "verdict").write_text("done\n")
        for each in (job_start, path / "claims", path):
            os.utime(each, (created, created))
    return scratch


def _run_once(folder: Path) -> Path:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "paceline", "run", "--cpu", "--nproc", "2", script.name]
    environment = {**os.environ, "PACELINE_SCRATCH": str(folder / "template")}
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    (made,) = (folder / "template").glob("*/*/*/run.json")
    return made.parent


def _copy(template: Path, path: Path) -> None:
    def copy(source: str, target: str) -> None:
        if os.path.basename(source) not in OWN:
            os.link(source, target)

    shutil.copytree(template, path, symlinks=True, copy_function=copy)
