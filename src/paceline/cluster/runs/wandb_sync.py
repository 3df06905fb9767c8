"""W&B runs that were kept in a run folder, sent by wandb's own command."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import paceline
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import RunFolder
from paceline.errors import ClusterError, EnvironmentProblem

SHOWN = 12  # lines of what wandb says, where it fails


def kept_runs(folder: RunFolder) -> list[Path]:
    """Folders of W&B runs that were kept, oldest first: parts of one run must be sent in the order they were made."""
    return sorted(path.parent for path in folder.trackers.glob("wandb/offline-run-*/run-*.wandb"))


def is_sent(kept: Path) -> bool:
    """wandb marks what it has sent."""
    return any(kept.glob("run-*.wandb.synced"))


def is_empty(kept: Path) -> bool:
    """Its process was killed before a first block of the file was written."""
    return all(path.stat().st_size < 64 for path in kept.glob("run-*.wandb"))


def python_with_wandb(folder: RunFolder) -> str:
    """This Python, or the run's own."""
    if importlib.util.find_spec("wandb") is not None:
        return sys.executable
    try:
        python = LaunchSpec.from_json(folder.launch_spec.read_text(encoding="utf-8")).python
        if subprocess.run([python, "-c", "import wandb"], capture_output=True).returncode == 0:
            return python
    except (OSError, ValueError, TypeError):
        pass
    raise EnvironmentProblem(
        "wandb is installed neither here nor in the run's environment", hint="pip install wandb"
    )


def complete(folder: RunFolder, *, python: str) -> None:
    """Log what W&B lacks of a run that was killed; without that, what it has is sent all the same."""
    home = str(Path(paceline.__file__).parent.parent)
    path = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH", "")]))
    environ = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_RUN")}
    subprocess.run(
        [python, "-m", "paceline.runtime.trackers.wandb.tracker", str(folder.path)],
        env={**environ, "PYTHONPATH": path, "WANDB_SILENT": "true", "WANDB_MODE": "offline"},
        stdin=subprocess.DEVNULL, capture_output=True,
    )  # fmt: skip


def send(kept: Path, *, python: str) -> str:
    """Upload one folder; returns the address of the run. It is sent when wandb has marked it so."""
    environ = {
        name: value for name, value in os.environ.items() if name not in ("WANDB_MODE", "WANDB_SILENT")
    }
    done = subprocess.run(
        [python, "-m", "wandb", "sync", str(kept)],
        env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if not is_sent(kept):
        tail = "\n".join(done.stdout.strip().splitlines()[-SHOWN:])
        raise ClusterError(
            f"wandb did not send {kept.name}:\n{tail}",
            hint="all files are still there: type the same again when that is mended",
        )
    found = re.search(r"https?://\S+/runs/\S+", done.stdout)
    return found[0] if found else ""
