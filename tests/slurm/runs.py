"""Runs that tests submit: a project folder to submit from, and what became of the run."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.contract.run_folder import RunFolder

Typed = subprocess.CompletedProcess[str]
Type = Callable[..., Typed]

# Says who it is, as JSON, in its rank's log. No torch: as quick to start as Python itself.
PLAIN = """\
import json, os, socket, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
told = {name: os.environ.get(name) for name in names}
told |= {"host": socket.gethostname(), "args": sys.argv[1:], "file": __file__, "cwd": os.getcwd()}
told |= {"environ": dict(os.environ), "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}
print("told " + json.dumps(told), flush=True)
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
    """A folder to submit from."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(script, encoding="utf-8")
    if config:
        (folder / "paceline.toml").write_text(config, encoding="utf-8")
    return folder


def run_of(typed: Typed) -> RunFolder:
    """The run that a `submit` told of."""
    paths = [line.split(None, 1)[1] for line in typed.stdout.splitlines() if line.startswith("  folder  ")]
    assert len(paths) == 1, f"{typed.stdout}\n{typed.stderr}"
    return RunFolder(Path(paths[0]))


def told(folder: RunFolder, *, attempt: int = 1) -> dict[int, dict[str, Any]]:
    """What each rank said of itself."""
    found = {}
    for path in (folder.path / f"attempt-{attempt}").glob("rank-*.log"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("told "):
                answer = json.loads(line.removeprefix("told "))
                assert int(answer["RANK"]) not in found, "a rank ran twice"
                found[int(answer["RANK"])] = answer
    return found


def everything(folder: RunFolder, typed: Typed | None = None) -> str:
    """All that could explain a failure."""
    texts = [f"{typed.stdout}\n{typed.stderr}"] if typed else []
    for path in [folder.slurm_log, *sorted(folder.path.glob("attempt-*/*"))]:
        if path.is_file():
            texts.append(f"--- {path}\n{path.read_text(errors='replace')[-3000:]}")
    return "\n".join(texts)
