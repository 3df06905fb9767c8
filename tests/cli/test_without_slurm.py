"""Commands on a machine without Slurm: those that work, and the errors of the others."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Completed = subprocess.CompletedProcess[str]


def test_without_slurm(tmp_path: Path, paceline: Callable[..., Completed]) -> None:
    (tmp_path / "train.py").write_text("print('hello')\n")
    nothing = tmp_path / "bin"
    nothing.mkdir()
    os.symlink("/bin/sh", nothing / "sh")

    def run_paceline(*args: str) -> Completed:
        return paceline(*args, PATH=str(nothing))

    shown = run_paceline(
        "submit", "--nodes", "2", "--gpus", "4", "--time", "1h", "--dry-run", "train.py", "a b"
    )
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("#!/bin/bash\n")
    assert "# submitted by: sbatch --parsable " in shown.stdout
    assert "train.py 'a b'\n" in shown.stdout.partition("# each rank runs: python ")[2]
    assert "requests 1 core per GPU" in shown.stderr
    assert "keep it" not in shown.stdout, "the script of a dry run has no run folder"
    assert (
        "# For one that you can submit by hand, type: paceline submit --script-only job.sbatch"
        in shown.stdout
    )
    assert (
        "# Slurm has not checked the job. To check it, type: paceline doctor --job ..."
        in shown.stdout
    )
    assert not (tmp_path / "scratch").exists()

    refused = run_paceline("submit", "--gpus", "1", "train.py")
    assert refused.returncode == 1
    assert "sbatch was not found" in refused.stderr
    assert "paceline sandbox up" in refused.stderr
    assert not (tmp_path / "scratch").exists()

    for name, text in (
        ("sbatch", ""),
        ("salloc", ""),
        ("scontrol", "fatal: Could not establish a configuration source"),
    ):
        (nothing / name).write_text(f"#!/bin/sh\necho '{text}' >&2; exit 1\n")
        (nothing / name).chmod(0o755)
    refused = run_paceline("shell", "--gpus", "1")
    assert refused.returncode == 1
    assert refused.stderr.startswith(
        "paceline: error: Slurm is installed here, but not configured.\n"
    )
    assert refused.stderr.lower().count("otherwise") <= 1, refused.stderr
    for name in ("sbatch", "salloc", "scontrol"):
        (nothing / name).unlink()

    written = run_paceline("init")
    assert written.returncode == 0, written.stderr
    assert "There is no Slurm here" in (tmp_path / "paceline.toml").read_text()
    assert run_paceline("submit", "--dry-run", "train.py").returncode == 0, (
        "what init writes can be read"
    )

    assert "no sbatch here" in run_paceline("doctor").stdout
    assert "no runs in" in run_paceline("ps").stderr
    missing = run_paceline("logs", "nothing")
    assert missing.returncode == 2
    assert "There is no run 'nothing'" in missing.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("job.sbatch", "--wait"), "--script-only cannot be combined with"),
        (("job.sbatch", "--follow"), "--script-only cannot be combined with"),
    ],
)
def test_a_script_alone_cannot_be_waited_for(
    args: tuple[str, ...], message: str, tmp_path: Path, paceline: Callable[..., Completed]
) -> None:
    (tmp_path / "train.py").touch()
    rejected = paceline("submit", "--time", "1h", "--script-only", *args, "train.py")
    assert rejected.returncode == 2
    assert message in rejected.stderr
    assert {path.name for path in tmp_path.iterdir()} <= {"train.py", "scratch"}


@pytest.mark.parametrize("place", ["/dev/null", "."])
def test_a_script_replaces_no_device_or_folder(
    place: str, tmp_path: Path, paceline: Callable[..., Completed]
) -> None:
    (tmp_path / "train.py").touch()
    rejected = paceline("submit", "--time", "1h", "--script-only", place, "train.py")
    assert rejected.returncode == 2
    assert f"and {place} is none" in rejected.stderr
    assert not Path("/dev/null").is_file()
