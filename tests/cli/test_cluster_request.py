"""Files that a command with `--on` names: on the cluster, it finds them in the code that was sent."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import dispatch, on_cluster
from paceline.errors import UsageError
from paceline.ssh import remote_command
from paceline.ssh.connection import Connection
from paceline.ssh.remote_command import RemoteCommand

PROFILE = '[profiles.alps]\nhost = "alps"\n'
SWEEP = '[sweep]\nscript = "train.py"\n[space]\nx = [1, 2]\n'


@pytest.fixture
def sent(guard: None, tmp_path: Path) -> Iterator[list[RemoteCommand]]:
    """Requests that would go to a cluster. There is a project, and a link to its folder."""
    files = {
        "paceline.toml": PROFILE,
        "other.toml": PROFILE,
        "sweep.toml": SWEEP,
        "../elsewhere.toml": SWEEP,
    }
    names = (
        "train.py",
        "-x.py",
        "requirements.txt",
        "pyproject.toml",
        "sub/run.py",
        "other/run.py",
        "../elsewhere.py",
        "../train.py",
    )
    for name in (*names, *files):
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files.get(name, ""))
    for name in ("py", "toml"):
        (tmp_path / "project" / f"out.{name}").symlink_to(f"../elsewhere.{name}")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path / "project", check=True)
    (tmp_path / "link").symlink_to("project")
    requests: list[RemoteCommand] = []

    def record(connection: Connection, request: RemoteCommand, *_: Any, **__: Any) -> int:
        requests.append(request)
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path / "home"))
        patch.setattr(Connection, "require", lambda _: None)
        patch.setattr(on_cluster, "_ask_first", lambda *_, **__: None)
        patch.setattr(remote_command, "carry_out", record)
        patch.setattr(remote_command, "submit", record)
        yield requests


@pytest.mark.parametrize(
    ("cwd", "line", "there"),
    [
        (
            "project",
            "submit {p}/train.py {p}/train.py --config {p}",
            "submit train.py {p}/train.py --config {p}",
        ),
        ("project", "submit --gpus 1 {t}/link/sub/run.py", "submit --gpus-per-node=1 sub/run.py"),
        ("link", "submit {t}/link/train.py", "submit train.py"),
        ("project", "submit -- {p}/-x.py", "submit ./-x.py"),
        ("project", "submit ./train.py a", "submit train.py a"),
        ("project", "submit -m {p}/train.py", "submit --module {p}/train.py"),
        ("project/sub", "submit {p}/sub/../train.py", "submit ../train.py"),
        ("project/sub", "submit {p}/other/run.py", "submit ../other/run.py"),
        ("project/sub", "submit ../train.py", "submit ../train.py"),
        ("link/sub", "submit ../../link/train.py", "submit ../train.py"),
        (
            "project",
            "submit --config={p}/other.toml train.py",
            "submit --config other.toml train.py",
        ),
        (
            ".",
            "submit --config project/other.toml project/train.py",
            "submit --config other.toml train.py",
        ),
        (
            "project/sub",
            "sweep -A {p}/sweep.toml {p}/sweep.toml",
            "sweep --account={p}/sweep.toml ../sweep.toml",
        ),
        ("project", "sweep {p}/sweep.toml --count 1", "sweep --count=1 sweep.toml"),
        ("project", "doctor {p}/train.py --lr {p}/train.py", "doctor train.py --lr {p}/train.py"),
        ("project", "doctor --job {p}/train.py", "doctor --job train.py"),
        ("project/sub", "shell --config {p}/other.toml", "shell --config ../other.toml"),
        ("project/sub", "env build {p}/requirements.txt", "env build ../requirements.txt"),
        (
            "project",
            "env build {t}/link/pyproject.toml[gpu] a.txt",
            "env build pyproject.toml[gpu] a.txt",
        ),
    ],
)
def test_files_of_the_project(
    sent: list[RemoteCommand], tmp_path: Path, cwd: str, line: str, there: str
) -> None:
    names = {"t": str(tmp_path), "p": str(tmp_path / "project")}
    words = line.format(**names).split()
    command, rest = (words[:2], words[2:]) if words[0] == "env" else (words[:1], words[1:])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path / cwd)
        assert dispatch([*command, "--on", "alps", *rest]) == 0
    assert list(sent[0].args) == there.format(**names).split()
    assert sent[0].folder == ("sub" if cwd.endswith("sub") else ".")


@pytest.mark.parametrize(
    "line", ["submit FILE.py", "sweep FILE.toml", "doctor --job FILE.py a", "env build FILE.toml"]
)
@pytest.mark.parametrize("name", ["elsewhere", "project/out"])
def test_files_that_are_not_sent(
    sent: list[RemoteCommand], tmp_path: Path, line: str, name: str
) -> None:
    """Nor would the target of a link: the cluster may have another file there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path / "project")
        with pytest.raises(UsageError, match=rf"/{name}\.\w+ would not be sent"):
            dispatch(line.replace("FILE", f"--on alps {tmp_path}/{name}").split())
    assert not sent
