"""Every script equals its golden copy and passes shellcheck."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from paceline.slurm import batch_script
from tests.golden.cases import ENVIRON, HERE, cases, plan

# Files that are known only on a node are not followed. stop_and_requeue.sh is, for a few: it takes a second each time.
ALONE = ["shellcheck", "--exclude=SC1090,SC1091,SC2154"]
WITH_LIBRARY = [
    "shellcheck",
    "--external-sources",
    f"--source-path={Path(batch_script.__file__).parent}",
    "--exclude=SC1090,SC1091,SC2119",
]
AGAIN = "if the change is meant: python -m tests.golden.cases, then read the difference"


@pytest.mark.parametrize("name", cases())
def test_the_script_is_the_golden_one(name: str) -> None:
    golden = HERE / f"{name}.sbatch"
    assert golden.exists(), f"there is no {golden}; {AGAIN}"
    assert plan(cases()[name]).script == golden.read_text(encoding="utf-8"), AGAIN


def test_no_golden_script_is_unused() -> None:
    assert {path.stem for path in HERE.glob("*.sbatch")} == set(cases()), AGAIN


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_passes() -> None:
    few = [
        HERE / f"{name}.sbatch"
        for name in ("fork", "mpirun-apptainer", "sweep-apptainer", "sweep-mpirun")
    ]
    for command in ([*ALONE, *HERE.glob("*.sbatch")], [*WITH_LIBRARY, *few]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("setting", "expected"),
    [(False, (False, False)), (True, (True, False)), ("always", (True, True))],
)
def test_the_agents_know_whether_the_run_may_go_back_into_the_queue(
    setting: bool | str, expected: tuple[bool, bool]
) -> None:
    launch_spec = plan({"resume.requeue": setting}).launch_spec
    assert (launch_spec.requeue, launch_spec.requeue_always) == expected


def test_the_script_does_not_grow_with_the_nodes() -> None:
    few, many = plan({"job.nodes": 2}).script, plan({"job.nodes": 4096}).script
    assert len(few.splitlines()) == len(many.splitlines())


def test_secrets_are_in_environment_sh_only() -> None:
    secret = {
        "environment.secrets": ["WANDB_API_KEY"],
        "environment.variables": {"HF_TOKEN": "whisper", "A": "plain"},
    }
    made = plan(secret)
    assert "export WANDB_API_KEY=hush\n" in made.environment_file
    assert "export HF_TOKEN=whisper\n" in made.environment_file
    for text in (made.script, made.show(), made.launch_spec.to_json(), " ".join(made.sbatch)):
        assert "hush" not in text
        assert "whisper" not in text
    assert made.launch_spec.variables == {"A": "plain"}


def test_wandb_variables_of_the_shell_are_passed() -> None:
    made = plan(
        {"launch.style": "mpirun"}, environ={**ENVIRON, "WANDB_MODE": "offline", "WANDB_TAGS": ""}
    )
    assert "export WANDB_MODE=offline\n" in made.environment_file
    assert "WANDB_TAGS" not in made.environment_file
    assert "WANDB_MODE" in made.script, "mpirun takes it to the other nodes"
