"""What `paceline shell RUN` evaluates before the user types, without Slurm."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from paceline.contract import env
from paceline.contract.run_folder import RunFolder
from paceline.errors import UsageError
from paceline.plan.run_path import RunPath
from paceline.plan.slurm.batch_script import ENVIRONMENT, LAUNCH
from paceline.plan.slurm.interactive_shell import PIPED, setup_from_script
from paceline.plan.slurm.plan import SlurmPlan
from tests.golden.cases import plan

STRICT = {"environment.setup": ["set -euo pipefail", "export FROM_SETUP=yes"]}


def write_run(tmp_path: Path) -> tuple[RunFolder, SlurmPlan]:
    run_path = RunPath(tmp_path, "p", "e", "id")
    made = plan({**STRICT, "environment.variables": {"GREETING": "hello"}}, run_path=run_path)
    folder = RunFolder(run_path.folder.path)
    folder.path.mkdir(parents=True)
    folder.environment.write_text(made.environment_file)
    folder.script.write_text(made.script)
    return folder, made


def enter(folder: RunFolder, made: SlurmPlan) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", PIPED], text=True, capture_output=True, timeout=60,
        input='false; echo "$GREETING $FROM_SETUP ${paceline_run-none}"',
        env={"PATH": "/usr/bin:/bin", "HOME": "/", env.SHELL_SETUP: setup_from_script(folder.script, made.launch_spec)},
    )  # fmt: skip


def test_only_the_environment_section_runs(tmp_path: Path) -> None:
    """There is no job.sh here; the shell does not need it."""
    folder, made = write_run(tmp_path)
    added = f"touch {tmp_path}/launched\n"
    text = folder.script.read_text().replace(ENVIRONMENT, added + ENVIRONMENT).replace(LAUNCH, f"{LAUNCH}\n{added}")
    folder.script.write_text(text + added)
    done = enter(folder, made)
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello yes none\n", "")
    assert not (tmp_path / "launched").exists()


def test_a_missing_file_is_reported_and_there_is_a_shell(tmp_path: Path) -> None:
    folder, made = write_run(tmp_path)
    folder.environment.unlink()
    done = enter(folder, made)
    assert done.stdout == "hello yes none\n", "plain variables come from the launch spec"
    assert f"paceline: error: Cannot read {folder.environment}." in done.stderr


@pytest.mark.parametrize("marker", [ENVIRONMENT, LAUNCH])
def test_a_script_without_sections_is_refused(tmp_path: Path, marker: str) -> None:
    folder, made = write_run(tmp_path)
    folder.script.write_text(folder.script.read_text().replace(marker, "#"))
    with pytest.raises(UsageError, match="Cannot tell which lines"):
        setup_from_script(folder.script, made.launch_spec)
    folder.script.unlink()
    with pytest.raises(UsageError, match="Cannot read"):
        setup_from_script(folder.script, made.launch_spec)
