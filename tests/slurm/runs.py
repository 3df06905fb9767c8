"""Runs that tests submit: create a project folder, find the run and read what its ranks reported."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.contract.run_folder import RunFolder

Completed = subprocess.CompletedProcess[str]
Paceline = Callable[..., Completed]

# Prints its rank and environment as JSON. Without torch, it starts quickly.
PLAIN = """\
import json, os, socket, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
report = {name: os.environ.get(name) for name in names}
report |= {"host": socket.gethostname(), "args": sys.argv[1:], "file": __file__, "cwd": os.getcwd()}
report |= {"environ": {}, "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}
# Ranks may share a pipe, which keeps only lines of up to 4096 bytes in one piece.
for item in sorted(os.environ.items()):
    print("variable " + json.dumps([report["RANK"], *item]), flush=True)
print("report " + json.dumps(report), flush=True)
"""

SPAWNING = """\
import runpy
import paceline

def work():
    runpy.run_path({path!r})

if __name__ == "__main__":
    paceline.spawn(work)
"""


def project(folder: Path, script: str = PLAIN, *, name: str = "train.py", config: str = "") -> Path:
    """Create a project folder to submit from."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(script, encoding="utf-8")
    if config:
        (folder / "paceline.toml").write_text(config, encoding="utf-8")
    return folder


def run_of(completed: Completed) -> RunFolder:
    """Return the run that `paceline submit` printed."""
    paths = [
        line.split(None, 1)[1]
        for line in completed.stdout.splitlines()
        if line.startswith("  folder  ")
    ]
    assert len(paths) == 1, f"{completed.stdout}\n{completed.stderr}"
    return RunFolder(Path(paths[0]))


def rank_reports(folder: RunFolder, *, attempt: int = 1) -> dict[int, dict[str, Any]]:
    """Return what each rank of an attempt reported."""
    found: dict[int, dict[str, Any]] = {}
    variables: dict[int, dict[str, str]] = {}
    for path in (folder.path / f"attempt-{attempt}").glob("rank-*.log"):
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            kind, _, text = line.partition(" ")
            if not line.endswith("\n"):  # a rank may still be writing it
                continue
            if kind == "variable":
                rank, name, value = json.loads(text)
                variables.setdefault(int(rank), {})[name] = value
            elif kind == "report":
                report = json.loads(text)
                assert int(report["RANK"]) not in found, "a rank ran twice"
                found[int(report["RANK"])] = report
    for rank, values in variables.items():
        if rank in found:
            found[rank]["environ"] = values
    return found


def diagnostics(folder: RunFolder, completed: Completed | None = None) -> str:
    """Return all logs that may explain a failure."""
    texts = [f"{completed.stdout}\n{completed.stderr}"] if completed else []
    for path in [folder.slurm_log, *sorted(folder.path.glob("attempt-*/*"))]:
        if path.is_file():
            texts.append(f"--- {path}\n{path.read_text(errors='replace')[-3000:]}")
    return "\n".join(texts)
