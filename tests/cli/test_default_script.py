"""`[project] script`: what commands start if no script is typed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Paceline = Callable[..., "subprocess.CompletedProcess[str]"]
pytestmark = pytest.mark.usefixtures("without_torch")
SCRIPT = "import sys\nprint('ran', __file__ if __spec__ is None else __spec__.name, sys.argv[1:])\n"


def project(folder: Path, script: str) -> Path:
    (folder / "src").mkdir(parents=True)
    (folder / ".git").mkdir()
    for path in ("train.py", "src/train.py"):
        (folder / path).write_text(SCRIPT)
    (folder / "paceline.toml").write_text(f"[project]\nscript = {script}\n")
    return folder


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ('"train.py"', "train.py []"),
        ('["src/train.py", "--lr", "a b"]', "src/train.py ['--lr', 'a b']"),
        ('["-m", "src.train", "-m"]', "ran src.train ['-m']"),
    ],
)
def test_run_starts_it(script: str, expected: str, tmp_path: Path, paceline: Paceline) -> None:
    folder = project(tmp_path / "project", script)
    done = paceline("run", "--nproc", "1", cwd=folder, check=True)
    assert expected in done.stdout
    if "-m" not in script:  # a module is found from the current folder
        done = paceline("run", "--nproc", "1", cwd=folder / "src", check=True)
        assert expected in done.stdout


def test_pytest_and_git_do_not_see_the_runs(tmp_path: Path, paceline: Paceline) -> None:
    folder = tmp_path / "project"
    (folder / "tests").mkdir(parents=True)
    (folder / "train.py").write_text(SCRIPT)
    (folder / "tests" / "test_train.py").write_text("def test_it():\n    pass\n")
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    paceline("run", "--nproc", "1", "train.py", cwd=folder, check=True, PACELINE_SCRATCH="")
    assert len(list(folder.glob("runs/*/*/*/code/tests/test_train.py"))) == 1
    status = subprocess.run(
        ["git", "status", "--porcelain"], cwd=folder, check=True, text=True, capture_output=True
    ).stdout
    assert status.split() == ["??", "tests/", "??", "train.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=folder,
        text=True,
        capture_output=True,
    )
    assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout
    listed = paceline("ps", cwd=folder, check=True, PACELINE_SCRATCH="").stdout
    assert len(listed.splitlines()) == 2  # the heading and the run


def test_a_typed_script_comes_first_and_other_commands_know_it_too(
    tmp_path: Path, paceline: Paceline
) -> None:
    folder = project(tmp_path / "project", '"train.py"')
    assert (
        "src/train.py ['--lr']"
        in paceline("run", "--nproc", "1", "src/train.py", "--lr", cwd=folder).stdout
    )
    shown = paceline("submit", "--dry-run", "--cpu", cwd=folder, check=True)
    assert "train.py" in shown.stdout


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ('"missing.py"', "There is no script 'missing.py' in "),
        ('"src"', "There is no script 'src' in "),
        ("3", "Invalid script = 3 in [project]"),
        ('""', "There is no script to run."),
        ("[]", "There is no script to run."),
        ('["-m"]', "There is no script to run."),
    ],
)
def test_mistakes(script: str, message: str, tmp_path: Path, paceline: Paceline) -> None:
    done = paceline("run", cwd=project(tmp_path / "project", script))
    assert done.returncode == 2
    assert message in done.stderr
