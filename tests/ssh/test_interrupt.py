"""Ctrl-C while a command runs on a cluster: it is no crash there, and nobody submits twice after it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from paceline.contract.files.sent_code import SentCode
from paceline.errors import ConnectionProblem
from paceline.launch.confirmation import submission as confirmation
from paceline.spec.clusters import Cluster
from paceline.ssh import conversation, forwarded_command, ssh_process
from paceline.ssh.code_push.project_code import Parcel
from paceline.ssh.installation import Installation
from paceline.ssh.remote import entry, start, unpack
from paceline.ssh.request import Request
from paceline.ssh.shell_text import setup_text, shell_command

STUB = """
import pathlib, time
def main():
    pathlib.Path("begun").touch()
    time.sleep(60)
def note_end(code): pass
"""


def interrupt(argv: list[str], cwd: Path) -> tuple[int, str]:
    """Start a program as a terminal does, press Ctrl-C once it has made the file `begun`, and return how it ends."""
    process = subprocess.Popen(
        argv,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    while not (cwd / "begun").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    return process.returncode, output


# A shell may lose a signal that comes between its fork and the program in the child. So the program itself begins.
LONG = "(: >begun; exec sleep 60)"


@pytest.mark.parametrize("setup", [None, LONG])
def test_while_the_shell_there_prepares(tmp_path: Path, setup: str | None) -> None:
    script = f"{setup_text(setup)}{LONG}; echo not reached\n"
    assert interrupt(["bash", "-c", shell_command(script)], tmp_path) == (130, "")


def test_while_python_starts_there(tmp_path: Path) -> None:
    """The shell lets Python start without Ctrl-C, which would print a traceback, so the program listens to it."""
    installed = tmp_path / "installed"
    place = installed / "paceline" / "cluster" / "ssh" / "remote"
    place.mkdir(parents=True)
    for folder in (place, *place.parents[:3]):
        (folder / "__init__.py").touch()
    (place / "entry.py").write_text(STUB)
    shutil.copy(start.__file__, installed / "__main__.py")
    (installed / unpack.COMPLETE).touch()
    (installed / unpack.MODULES).touch()
    made = Installation(sys.executable, str(tmp_path), str(installed))
    assert interrupt(["sh", "-c", made.command("run", "request-1a", "pipes")], tmp_path) == (
        130,
        "",
    )


def test_ssh_is_out_of_reach_of_the_terminal() -> None:
    """Otherwise the stream of a command that watches ends before the command does, and looks like a lost connection."""
    report = [sys.executable, "-c", "import os; print(os.getsid(0))"]
    assert int(ssh_process.run(report, timeout=60).stdout) != os.getsid(0)

    class Link:
        cluster = Cluster("alps", "alps")

        def command(self, script: str) -> list[str]:
            return ["sh", "-c", script]

        def watched(self, *_: object) -> Any:
            return nullcontext()

    with conversation.Conversation(Link(), "ps -o sid= -p $$\n") as talk:  # type: ignore[arg-type]
        assert int(talk.read_line()) != os.getsid(0)


class Login:
    """A connection on which nothing is sent."""

    cluster = Cluster("alps", "alps")

    def command(self, script: str, *, terminal: bool) -> list[str]:
        return ["sleep", "60"]

    def watched(self, process: object) -> Any:
        return nullcontext()

    def is_open(self) -> bool:
        return True


class Submit:
    """`submit --on alps`, whose command there ends as the test says."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._patch, self.notes = folder, monkeypatch, list[str]()

    def __call__(self, code: int, *, has_ended: bool = False, arrives: bool = True) -> int:
        def deliver(*_: object, **__: object) -> tuple[None, str]:
            if not arrives:
                raise KeyboardInterrupt
            return None, "request-1"

        self.notes.clear()
        self._patch.setattr(forwarded_command, "deliver", deliver)
        self._patch.setattr(forwarded_command, "_carry_out", lambda *_: code)
        self._patch.setattr(forwarded_command, "_has_ended", lambda *_: has_ended)
        request = Request(["submit", "train.py"], ".", SentCode("project", {}), submits=True)
        parcel = Parcel(self._folder, request.code)
        return forwarded_command.forward(Login(), request, parcel, note=self.notes.append)  # type: ignore[arg-type]


@pytest.fixture
def submit(guard: None, tmp_path: Path) -> Iterator[Submit]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        yield Submit(tmp_path, patch)


def test_an_interrupted_submission_is_looked_for_by_the_next(submit: Submit) -> None:
    with pytest.raises(KeyboardInterrupt):
        submit(130)
    assert "may be in the queue of alps" in submit.notes[-1]
    with pytest.raises(KeyboardInterrupt):
        submit(0, arrives=False)
    assert "may be in the queue of alps" in submit.notes[-1]
    assert submit(0) == 0
    assert "looks for its job" in submit.notes[0]
    assert submit(0) == 0
    assert submit.notes == []


def test_a_submission_that_is_interrupted_before_it_begins(submit: Submit) -> None:
    with pytest.raises(KeyboardInterrupt):
        submit(0, arrives=False)
    assert submit.notes == ["interrupted; nothing was submitted"]
    assert submit(0) == 0
    assert submit.notes == []


def test_an_interrupt_after_the_job_is_known(submit: Submit) -> None:
    """As with --follow: the same command, typed again, is another job."""
    assert submit(130, has_ended=True) == 130
    assert submit(0) == 0
    assert submit.notes == []


def test_a_submission_without_a_job_has_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "request-1"
    monkeypatch.setattr(entry, "_taken", [(path, True)])
    monkeypatch.setattr(sys, "argv", ["paceline", "submit"])
    monkeypatch.setattr(confirmation, "_descriptor", [7])
    entry.note_end(130)
    assert not (tmp_path / "ended-1").exists()
    confirmation._descriptor.clear()
    entry.note_end(130)
    assert (tmp_path / "ended-1").exists()


def test_an_interrupt_before_ssh_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """ssh would make up an exit code for it."""
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if self not in started:
                started.append(self)
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(forwarded_command.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        forwarded_command._run_in_terminal(Login(), "")  # type: ignore[arg-type]
    assert started[0].poll() == -signal.SIGTERM


def test_a_command_that_was_killed_is_still_named(submit: Submit) -> None:
    with pytest.raises(ConnectionProblem, match="was cut off"):
        submit(255)
