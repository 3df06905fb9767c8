"""Send the offline W&B runs of a run folder with wandb's own command."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import RunFolder
from paceline.errors import ClusterError, EnvironmentProblem

MAX_LINES = 12  # of wandb's output to show if it fails


def unsent_runs(folder: RunFolder) -> list[Path]:
    """Return the folders of offline W&B runs to send, oldest first: parts of one run must be sent
    in order. One that was killed before it wrote a first block has nothing to send.
    """
    files = sorted(folder.trackers.glob("wandb/offline-run-*/run-*.wandb"))
    return [
        file.parent for file in files if file.stat().st_size >= 64 and not _is_sent(file.parent)
    ]


def _is_sent(path: Path) -> bool:
    """Return whether wandb has marked a run as sent."""
    return any(path.glob("run-*.wandb.synced"))


def find_python(folder: RunFolder) -> str:
    """Return a Python that has wandb: this one, or the run's own."""
    if importlib.util.find_spec("wandb") is not None:
        return sys.executable
    with suppress(OSError, ValueError):
        python = LaunchSpec.from_json(folder.launch_spec.read_text(encoding="utf-8")).python
        if subprocess.run([python, "-c", "import wandb"], capture_output=True).returncode == 0:
            return python
    raise EnvironmentProblem(
        "wandb is installed neither here nor in the run's environment.",
        hint="Install it with `pip install wandb`.",
    )


def send(path: Path, *, python: str) -> str:
    """Upload one folder and return the address of the W&B run."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if name not in ("WANDB_MODE", "WANDB_SILENT")
    }
    done = subprocess.run(
        [python, "-m", "wandb", "sync", str(path)],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if not _is_sent(path):
        tail = "\n".join(done.stdout.strip().splitlines()[-MAX_LINES:])
        raise ClusterError(
            f"wandb did not send {path.name}:\n{tail}",
            hint="Fix the problem and run the same command again; all files are still there.",
        )
    found = re.search(r"https?://\S+/runs/\S+", done.stdout)
    return found[0] if found else ""
