"""What `paceline shell RUN` evaluates before the user types, without Slurm."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from paceline.contract import env
from paceline.contract.run_folder import RunFolder
from paceline.errors import UsageError
from paceline.launch.job_steps import PIPED, setup_from_run
from paceline.launch.slurm_job import SlurmPlan, write_files
from paceline.spec.run_path import RunPath
from tests.golden.cases import plan

STRICT = {"environment.setup": ["set -euo pipefail", "export FROM_SETUP=yes"]}


def write_run(tmp_path: Path) -> tuple[RunFolder, SlurmPlan]:
    run_path = RunPath(tmp_path, "p", "e", "id")
    made = plan({**STRICT, "environment.variables": {"GREETING": "hello"}}, run_path=run_path)
    folder = RunFolder(run_path.folder.path)
    folder.path.mkdir(parents=True)
    write_files(made)
    return folder, made


def enter(folder: RunFolder, made: SlurmPlan) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", PIPED],
        text=True,
        capture_output=True,
        timeout=60,
        input='false; echo "$GREETING $FROM_SETUP ${paceline_run-none}"',
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": "/",
            env.SHELL_SETUP: setup_from_run(folder, made.launch_spec),
        },
    )


def test_only_the_environment_section_runs(tmp_path: Path) -> None:
    """There is neither job.sbatch nor stop_and_requeue.sh here; the shell needs none of them."""
    folder, made = write_run(tmp_path)
    folder.script.unlink()
    folder.shell_library.unlink()
    done = enter(folder, made)
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello yes none\n", "")


def test_a_trial_has_the_environment_of_its_submission(tmp_path: Path) -> None:
    folder, made = write_run(tmp_path)
    folder.run_half.touch()
    trial = RunFolder(tmp_path / "trial")
    trial.path.mkdir()
    trial.run_half.symlink_to(folder.run_half)
    done = enter(trial, made)
    assert (done.stdout, done.stderr) == ("hello yes none\n", "")


def test_a_missing_file_is_reported_and_there_is_a_shell(tmp_path: Path) -> None:
    folder, made = write_run(tmp_path)
    folder.environment.unlink()
    done = enter(folder, made)
    assert done.stdout == "hello yes none\n", "plain variables come from the launch spec"
    assert f"paceline: error: Cannot read {folder.environment}." in done.stderr


def test_a_run_without_a_setup_is_refused(tmp_path: Path) -> None:
    folder, made = write_run(tmp_path)
    folder.shell_setup.unlink()
    with pytest.raises(UsageError, match="Cannot read"):
        setup_from_run(folder, made.launch_spec)


def test_a_secret_in_setup_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    for name, mode in (("export GREETING=hello", 0o644), ("export API_TOKEN=hush", 0o600)):
        run_path = RunPath(tmp_path, "p", "e", str(mode))
        run_path.folder.path.mkdir(parents=True)
        write_files(plan({"environment.setup": [name]}, run_path=run_path))
        assert run_path.folder.shell_setup.stat().st_mode & 0o777 == mode
        assert run_path.folder.script.stat().st_mode & 0o777 == mode
