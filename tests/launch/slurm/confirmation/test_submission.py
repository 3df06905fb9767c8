"""The file of a submission from another machine: whatever ends the command, the job that it has submitted is found."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from paceline.launch.confirmation import submission
from paceline.launch.confirmation.submission import (
    RunOutcome,
    begin_submission,
    note_attempt,
    note_job,
)

from paceline.contract.files.sent_code import SentCode
from paceline.contract.run_folder import RunFolder
from paceline.ssh.remote import entry
from paceline.ssh.request import UNSETTLED
from tests.launch.slurm.confirmation.test_sweep_outcome import Login, login

__all__ = ["login"]
LINE = ["submit", "--no-check", "--cpu", "--nproc", "1", "-t", "5", "train.py"]
# A command that carries out a submission, in which `{failure}` happens at the second call of {call}: the first notes
# that sbatch is about to be called, the second its job.
COMMAND = """
import errno, os, signal, sys
from pathlib import Path
from paceline.cli import main
from paceline.launch.confirmation import submission
path, calls, real = Path(sys.argv.pop(1)), [], os.{call}
def call(descriptor, *args):
    if submission._descriptor and descriptor == submission._descriptor[0]:
        calls.append(0)
        if len(calls) == 2:
            {failure}
    return real(descriptor, *args)
os.{call} = call
assert submission.begin_submission(path) is None
main()
"""
FULL = "raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))"


@pytest.fixture(autouse=True)
def no_submission() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(submission, "_descriptor", [])
        patch.setattr(submission, "_begun", [])
        yield
        for descriptor in submission._descriptor:
            os.close(descriptor)


def carry_out(login: Login, call: str, failure: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-c",
            COMMAND.format(call=call, failure=failure),
            str(login.record),
            *LINE,
        ],
        cwd=login.project,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=60,
    )


def runs(login: Login) -> list[Path]:
    return [path.parent for path in login.project.parent.glob("scratch/project/default/*/run.json")]


@pytest.mark.parametrize("call", ["write", "pwrite"])
def test_a_command_that_is_killed_while_it_notes_its_job(login: Login, call: str) -> None:
    done = carry_out(login, call, "os.kill(os.getpid(), signal.SIGKILL)")
    assert done.returncode in (-signal.SIGKILL, 0), done.stderr
    (run,) = runs(login)
    assert begin_submission(login.record) == RunOutcome(RunFolder(run), "11")


@pytest.mark.parametrize("call", ["write", "pwrite"])
def test_a_disk_that_is_full_does_not_undo_a_submission(login: Login, call: str) -> None:
    done = carry_out(login, call, FULL)
    assert done.returncode == 0, done.stderr
    assert "as job 11: 1 node" in done.stdout
    if call == "write":
        assert (
            f"job 11 is submitted, but Paceline cannot note this in {login.record.parent}: No space"
            in done.stderr
        )
    (run,) = runs(login)
    assert not (login.bin / "cancelled").exists()
    assert begin_submission(login.record) == RunOutcome(RunFolder(run), "11")


def test_a_line_that_is_cut_off_leaves_the_ones_before(tmp_path: Path) -> None:
    folder, record, real = RunFolder(tmp_path / "run"), tmp_path / "a1", os.write
    # in one line that does not end
    record.write_text('{"known": ["1"], "folder": "/of/an/older/version"}')
    assert begin_submission(record) is None
    note_attempt(folder, known=["1"])
    complete = record.read_bytes()

    def write(descriptor: int, content: bytes) -> int:
        if len(record.read_bytes()) == len(complete):
            return real(descriptor, content[:20])
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", write)
        assert "No space left on device" in note_job(folder, "7")
    assert submission.read_run(record.read_bytes()) == folder.path
    assert len(record.read_bytes()) == len(complete) + 20
    folder.path.mkdir()
    (folder.path / "job").write_text("7\n")
    assert begin_submission(record) == RunOutcome(folder, "7")


def ask(path: Path, code: str) -> int | None:
    """Carry out a submission on the login node, or report what it has led to."""
    return entry._answer_again(path.parent, path.name, is_question=False, code=code)


def test_a_repeat_with_other_code_is_not_what_was_submitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is submitted, and the error says which job has the earlier code."""
    record, request = tmp_path / "a1", tmp_path / "request-0"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_ON_CLUSTER", "alps")
        patch.setattr(entry, "_taken", [(request, True)])
        assert ask(record, "old") is None
        note_attempt(RunFolder(tmp_path / "run"), known=[])
        note_job(RunFolder(tmp_path / "run"), "7")
        assert ask(record, "old") == 0
        assert (
            "submitted run as job 7, when you typed this command earlier" in capsys.readouterr().out
        )
        assert not (tmp_path / "ended-0").exists()
        assert ask(record, "new") == 1
        assert (tmp_path / "ended-0").exists(), (
            "the laptop takes it for an answer: the next one is a new submission"
        )
    output = capsys.readouterr()
    assert not output.out
    assert (
        "run was submitted as job 7 when you typed this command earlier, and your code has changed"
        in output.err
    )
    assert "paceline cancel run --on alps; then repeat the command." in output.err


def test_a_repeat_with_other_code_submits_it_if_there_is_no_job(tmp_path: Path) -> None:
    record = tmp_path / "a1"
    assert ask(record, "old") is None
    os.close(submission._descriptor.pop())  # it was killed
    assert ask(record, "new") is None
    note_job(RunFolder(tmp_path / "run"), "7")
    assert submission.read_code(record.read_bytes()) == "new"


def test_a_submission_whose_file_cannot_be_written_does_not_begin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert ask(tmp_path / "file" / "a1", "code") == UNSETTLED
    assert "Cannot use" in capsys.readouterr().err


def test_code_is_the_same_if_its_files_are() -> None:
    files = {"a.py": ("file", 1, "0f"), "b": ("link", 4, "a.py")}
    code = SentCode("p", files, "1234", "main", True)
    assert code.digest == SentCode("p", dict(reversed(files.items()))).digest
    assert SentCode.from_json(code.to_json()).digest == code.digest
    assert code.digest != SentCode("p", {**files, "a.py": ("file", 1, "1f")}).digest
