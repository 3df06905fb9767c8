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

from paceline.cluster.slurm.confirmation import submission
from paceline.cluster.slurm.confirmation.submission import RunOutcome, begin_submission, note_attempt, note_job
from paceline.contract.run_folder import RunFolder
from tests.sweep.test_lost_answer import Login, login

__all__ = ["login"]
LINE = ["submit", "--no-check", "--cpu", "--nproc", "1", "-t", "5", "train.py"]
# A command that carries out a submission, in which `{failure}` happens at the second call of {call}: the first notes
# that sbatch is about to be called, the second its job.
COMMAND = """
import errno, os, signal, sys
from pathlib import Path
from paceline.cli import main
from paceline.cluster.slurm.confirmation import submission
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
        [sys.executable, "-c", COMMAND.format(call=call, failure=failure), str(login.record), *LINE],
        cwd=login.project, env=dict(os.environ), capture_output=True, text=True, timeout=60,
    )  # fmt: skip


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
        assert f"job 11 is submitted, but Paceline cannot note this in {login.record.parent}: No space" in done.stderr
    (run,) = runs(login)
    assert not (login.bin / "cancelled").exists()
    assert begin_submission(login.record) == RunOutcome(RunFolder(run), "11")


def test_a_line_that_is_cut_off_leaves_the_ones_before(tmp_path: Path) -> None:
    folder, record, real = RunFolder(tmp_path / "run"), tmp_path / "a1", os.write
    record.write_text('{"known": ["1"], "folder": "/of/an/older/version"}')  # in one line that does not end
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
