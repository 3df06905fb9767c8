"""What commands with `--on` send to a cluster: code and secrets only if they are needed there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import dispatch
from paceline.errors import UsageError
from paceline.ssh.connection import Connection
from paceline.ssh.request import Request

SETTINGS = '[profiles.alps]\nhost = "alps"\n'


@pytest.fixture(autouse=True)
def project(guard: None, tmp_path: Path) -> Iterator[Path]:
    """A project with a secret, on a machine without Slurm."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "paceline.toml").write_text(SETTINGS)
    (folder / "train.py").write_text("print(1)\n")
    (folder / "sweep.toml").write_text('[sweep]\nscript = "train.py"\n[space]\nx = [1, 2]\n')
    (folder / "requirements.txt").write_text("numpy\n")
    (folder / ".env").write_text("MY_KEY=hush\n")
    (folder / ".env").chmod(0o600)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HOME", str(tmp_path))
        for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "WANDB_API_KEY"):
            patch.delenv(name, raising=False)
        yield folder


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """What is sent to a cluster, which always answers."""
    requests: list[Request] = []

    def forward(connection: Connection, request: Request, *_: Any, **__: Any) -> int:
        requests.append(request)
        return 0

    monkeypatch.setattr(Connection, "require", lambda self: None)
    monkeypatch.setattr(Connection, "is_open", lambda self: True)
    monkeypatch.setattr("paceline.ssh.forwarded_command.forward", forward)
    return requests


CODE, NAMES, VALUES = "code", "names", "values"


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("submit --on alps train.py", {CODE, VALUES}),
        ("submit --on alps --dry-run train.py", {CODE, NAMES}),
        ("submit --on alps --resume last --time 8h", {VALUES}),
        ("submit --on alps --resume last train.py --epochs 20", {CODE, VALUES}),
        ("sweep --on alps sweep.toml", {CODE, VALUES}),
        ("sweep --on alps --dry-run sweep.toml", {CODE, NAMES}),
        ("sweep --on alps --resubmit failed lr", {VALUES}),
        ("sweep show --on alps lr", set()),
        ("sweep --on alps show lr", set()),
        ("sweep --on=alps show --json lr", set()),
        ("sweep --on alps cancel lr", set()),
        ("doctor --on alps", {NAMES}),
        ("doctor --on alps last", set()),
        ("doctor --on alps last --json", set()),
        ("doctor --on alps --fitness 1a2b", set()),
        ("doctor --on alps train.py", {CODE, NAMES}),
        ("doctor --on alps --job --gpus 4 train.py", {CODE, NAMES}),
        ("shell --on alps 1a2b", set()),
        ("shell --on alps --gpus 1", {CODE}),
        ("env build --on alps", {CODE}),
        ("env list --on alps", set()),
        ("env remove --on alps a --yes", set()),
        ("data stage --on alps", set()),
        ("ps --on alps", set()),
        ("logs --on alps last", set()),
        ("cancel --on alps last", set()),
        ("clean --on alps", set()),
        ("sync --on alps", set()),
    ],
)
def test_only_what_a_command_needs_is_sent(
    line: str, what: set[str], sent: list[Request], capsys: pytest.CaptureFixture[str]
) -> None:
    assert dispatch(line.split()) == 0
    (request,) = sent
    assert set(request.code.files) == (
        {"train.py", "sweep.toml", "requirements.txt", "paceline.toml"}
        if CODE in what
        else {"paceline.toml"}
    )
    assert request.secrets == (
        {"MY_KEY": "hush"} if VALUES in what else {"MY_KEY": ""} if NAMES in what else {}
    )
    assert set(request.secret_sources) == set(request.secrets)
    errors = capsys.readouterr().err
    assert ("MY_KEY" in errors) == (VALUES in what)
    assert ("for the first time" in errors) == bool(what - {NAMES})


def test_a_subcommand_after_an_option_runs_as_such(sent: list[Request]) -> None:
    dispatch(["sweep", "--on", "alps", "show", "--sort", "x", "lr"])
    assert sent[0].args == ["sweep", "show", "--sort", "x", "lr"]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("sweep --on alps", "Missing argument"),
        ("sweep --on alps sweep.toml show", "unexpected extra"),
    ],
)
def test_a_line_that_is_wrong_is_not_sent(line: str, text: str, sent: list[Request]) -> None:
    with pytest.raises(UsageError, match=text):
        dispatch(line.split())
    assert not sent


def test_one_line_says_which_secrets_go(
    project: Path, sent: list[Request], capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*more: str) -> list[str]:
        assert dispatch(["submit", "--on", "alps", *more, "train.py"]) == 0
        return [
            line
            for line in capsys.readouterr().err.splitlines()
            if "KEY" in line or "secret" in line
        ]

    assert said() == ["paceline: MY_KEY (.env) goes to alps for the first time"]
    assert said() == ["paceline: MY_KEY (.env) goes to alps"]
    (project / ".env").write_text("MY_KEY=hush\nNEW_KEY=quiet\n")
    assert said() == [
        "paceline: MY_KEY (.env), NEW_KEY (.env) go to alps, NEW_KEY for the first time"
    ]
    assert said() == ["paceline: MY_KEY (.env), NEW_KEY (.env) go to alps"]
    (project / "id_rsa").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\n")
    assert said()[0] == "paceline: secrets left out of the code: id_rsa"
    assert sent[-1].secrets == {"MY_KEY": "hush", "NEW_KEY": "quiet"}


def test_secrets_alone_are_not_taken_for_code(
    sent: list[Request], capsys: pytest.CaptureFixture[str]
) -> None:
    dispatch(["submit", "--on", "alps", "--resume", "last"])
    assert capsys.readouterr().err == "paceline: MY_KEY (.env) goes to alps for the first time\n"
    dispatch(["submit", "--on", "alps", "train.py"])
    assert "4 files" in capsys.readouterr().err
    dispatch(["submit", "--on", "alps", "train.py"])
    assert "first time" not in capsys.readouterr().err
    assert len(sent) == 3
