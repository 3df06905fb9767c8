"""`paceline show --diff`: changes in a project since a run was started."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.cli.commands.show import compare_code

Paceline = Callable[..., "subprocess.CompletedProcess[str]"]


def test_every_kind_of_difference(tmp_path: Path) -> None:
    then, now = tmp_path / "then", tmp_path / "now"
    for folder in (then, now):
        (folder / "sub").mkdir(parents=True)
        (folder / "same.py").write_text("same\n")
        (folder / "sub/train.py").write_text("a = 1\nb = 2\nc = 3\n")
        (folder / "weights.bin").write_bytes(b"\0\1")
        (folder / "latin.txt").write_bytes(b"\xe9")
        (folder / "big.txt").write_text("x\n" * 2**20)
        (folder / "ends.txt").write_text("a\nb\n")
        (folder / "link").symlink_to("same.py")
    (now / "sub/train.py").write_text("a = 1\nb = 20\nc = 3\nd = 4\n")
    (now / "weights.bin").write_bytes(b"\0\1\2")
    (now / "latin.txt").write_bytes(b"\xe8")
    (now / "big.txt").write_text("y\n" * 2**20)
    (now / "ends.txt").write_bytes(b"a\r\nb\r\n")
    (now / "link").unlink()
    (now / "link").symlink_to("sub/train.py")
    (then / "old.py").write_text("")
    (now / "new.py").write_text("")
    (now / ".env").write_text("A=secret\n")
    (now / "data").mkdir()
    (now / "data/x").write_text("")
    (now / "runs").mkdir()
    (now / "notes.md").write_text("")
    found = [*compare_code(then, now, exclude=["*.md"], exclude_paths=[now / "data"])]
    assert [line for line in found if line.startswith(("diff", "---"))] == [
        "diff big.txt: changed (2.1 MB -> 2.1 MB)",
        "--- run/link",
        "diff new.py: added",
        "diff old.py: removed",
        "--- run/sub/train.py",
        "diff weights.bin: changed (2 bytes -> 3 bytes)",
    ]
    assert {"+++ now/sub/train.py", "-b = 2", "+b = 20", "+d = 4"} <= set(found)


@pytest.mark.parametrize("with_git", [False, True])
def test_show_diff(paceline: Paceline, tmp_path: Path, with_git: bool) -> None:
    project = tmp_path / "project"
    project.mkdir()
    if with_git:
        subprocess.run(["git", "init", "-q", str(project)], check=True)
    (project / "train.py").write_text("print('one')\n")
    (project / "gone.py").write_text("")
    # The runs lie in the project, but are not part of its code.
    inside = {"PACELINE_SCRATCH": str(project / "out")}

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        return paceline(*args, cwd=project, **inside)

    assert run("run", "--style", "spawn", "--nproc", "1", "--cpu", "train.py").returncode == 0
    same = run("show", "last", "--diff")
    assert (same.returncode, same.stderr) == (0, "")
    assert same.stdout.startswith(f"{project} has not changed since ")
    (project / "train.py").write_text("print('two')  \x1b[2J\n")
    (project / "gone.py").unlink()
    (project / "new.py").write_text("print('new')\n")
    (project / ".env").write_text("A=secret\n")
    shown = run("show", "last", "--diff")
    assert shown.returncode == 0
    lines = shown.stdout.splitlines()
    assert lines[:2] == ["diff gone.py: removed", "diff new.py: added"]
    assert lines[2:4] == ["--- run/train.py", "+++ now/train.py"]
    assert lines[5:] == ["-print('one')", "+print('two')  \ufffd[2J"]
    unknown = run("show", "--diff", "nothing")
    assert unknown.returncode == 2


def test_runs_without_a_snapshot(paceline: Paceline, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    paceline(
        "run", "--style", "spawn", "--nproc", "1", "--cpu", "--no-snapshot", "train.py", check=True
    )
    done = paceline("show", "last", "--diff")
    assert done.returncode == 1
    assert "has no copy of its code" in done.stderr
