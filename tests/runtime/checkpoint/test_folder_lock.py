"""Two live runs never share a checkpoint folder, and nobody is kept out by a run that is gone."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from paceline.contract import env
from paceline.contract.checkpoint import list_checkpoints
from paceline.contract.run_folder import RunFolder
from paceline.errors import CheckpointError, TakenOver
from paceline.runtime.checkpoint import CheckpointManager, folder_lock
from paceline.runtime.checkpoint.folder_lock import FILE, SIZE, FolderLock, Holder, check_claim
from tests.forked_ranks import Ranks
from tests.runtime.training.test_wrap import quiet


@pytest.fixture
def other() -> Iterator[tuple[Holder, subprocess.Popen[bytes]]]:
    """Another process on this host, as a holder."""
    process = subprocess.Popen(["sleep", "60"])
    started = folder_lock._start_of(process.pid)
    assert started
    yield (
        dataclasses.replace(
            folder_lock.this_process(1), pid=process.pid, started=started, token="other"
        ),
        process,
    )
    process.kill()
    process.wait()


def hold(folder: Path, holder: Holder, count: int = 0) -> None:
    (folder / FILE).write_text(json.dumps(dataclasses.asdict(holder)).ljust(SIZE) + f"{count:020d}")


def lock(folder: Path, attempt: int = 1, notes: list[str] | None = None) -> FolderLock:
    return FolderLock(
        folder, attempt=attempt, warn=(notes if notes is not None else []).append, interval=0.02
    )


def take(folder: Path, attempt: int = 1, notes: list[str] | None = None) -> None:
    taken = lock(folder, attempt, notes)
    taken.acquire()
    taken.check()
    taken.release()
    assert os.listdir(folder) == []


def test_a_live_process_on_this_host_keeps_the_folder(
    tmp_path: Path, other: tuple[Holder, subprocess.Popen[bytes]]
) -> None:
    holder, process = other
    hold(tmp_path, holder)
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.since))
    with pytest.raises(
        CheckpointError, match=f"process {process.pid} on {holder.host}, since {since}"
    ):
        take(tmp_path)
    hold(tmp_path, dataclasses.replace(holder, started="1"))  # the pid is used again
    take(tmp_path)
    hold(tmp_path, holder)
    process.kill()
    while folder_lock._start_of(process.pid):
        time.sleep(0.01)
    take(tmp_path)  # it has ended, although nobody has waited for it yet


def test_a_process_on_another_host_keeps_the_folder_while_it_counts(
    tmp_path: Path, other: tuple[Holder, subprocess.Popen[bytes]]
) -> None:
    elsewhere = dataclasses.replace(other[0], host="elsewhere", system="another boot")
    ended = threading.Event()
    notes: list[str] = []

    def count() -> None:
        number = 0
        while not ended.wait(0.005):
            number += 1
            with open(tmp_path / FILE, "r+") as file:
                file.seek(SIZE)
                file.write(f"{number:020d}")

    hold(tmp_path, elsewhere)
    thread = threading.Thread(target=count)
    thread.start()
    try:
        with pytest.raises(CheckpointError, match="on elsewhere"):
            take(tmp_path, notes=notes)
    finally:
        ended.set()
        thread.join()
    assert "waiting to see whether it still is" in notes[0]
    take(tmp_path)


def test_the_next_attempt_of_the_same_run_does_not_wait(
    tmp_path: Path, other: tuple[Holder, subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    for owner, variables in (("/runs/a", {env.RUN: "/runs/a"}), ("job 7", {"SLURM_JOB_ID": "7"})):
        hold(
            tmp_path,
            dataclasses.replace(other[0], host="elsewhere", system="", owner=owner, attempt=1),
        )
        with monkeypatch.context() as context:
            for name, value in {**variables, "SLURM_RESTART_COUNT": "2"}.items():
                context.setenv(name, value)
            take(tmp_path, attempt=2, notes=notes)
    assert notes == []
    hold(tmp_path, dataclasses.replace(other[0], owner="/runs/a", attempt=2))
    with monkeypatch.context() as context:
        context.setenv(env.RUN, "/runs/a")
        with pytest.raises(CheckpointError):
            take(tmp_path, attempt=2)


def test_the_holder_counts_for_others_to_see(tmp_path: Path) -> None:
    taken = lock(tmp_path)
    taken.acquire()
    first = (tmp_path / FILE).read_text()
    while (tmp_path / FILE).read_text() == first:
        time.sleep(0.005)
    assert (tmp_path / FILE).read_text()[:SIZE] == first[:SIZE]
    taken.release()


def test_a_run_that_was_taken_for_dead_commits_nothing(
    tmp_path: Path, other: tuple[Holder, subprocess.Popen[bytes]]
) -> None:
    warnings: list[str] = []
    checkpoints = CheckpointManager(tmp_path, warn=warnings.append)
    checkpoints.register(model=nn.Linear(1, 1))
    checkpoints.restore()
    checkpoints.save(1, wait=True)
    hold(tmp_path, other[0])
    with pytest.raises(TakenOver, match=f"Another run has taken over .*: process {other[1].pid}"):
        checkpoints.save(2, wait=True)
    assert [saved.complete for saved in checkpoints.poll()] == [True, False]
    checkpoints.close()
    assert list_checkpoints(tmp_path) == [tmp_path / "step-00000001"]
    assert (tmp_path / FILE).exists(), "this is the file of the other run"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    """A run folder that job start 7-0 has claimed, as its ranks see it."""
    run = RunFolder(tmp_path)
    run.claims.mkdir()
    os.symlink("7-0", run.claims / "1")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PACELINE_RUN", str(run.path))
        environment.setenv("PACELINE_JOB_START", "7-0")
        yield run


def test_a_job_start_that_lost_its_claim_commits_nothing(run: RunFolder) -> None:
    """It was cut off, and Slurm has started the job again: the run folder belongs to the new start."""
    checkpoints = CheckpointManager(run.checkpoints)
    checkpoints.register(model=nn.Linear(1, 1))
    checkpoints.restore()
    checkpoints.save(1, wait=True)
    os.symlink("7-1", run.claims / "2")
    with pytest.raises(
        TakenOver, match=r"Job start 7-0 no longer has run .*: job start 7-1 has taken over"
    ):
        checkpoints.save(2, wait=True)
    assert [saved.complete for saved in checkpoints.poll()] == [True, False]
    checkpoints.close()
    assert list_checkpoints(run.checkpoints) == [run.checkpoints / "step-00000001"]
    # Nor does a new attempt of the old start get the folder.
    with pytest.raises(TakenOver, match="job start 7-1 has taken over"):
        CheckpointManager(run.checkpoints, attempt=2).restore()


@contextlib.contextmanager
def no_free_descriptor() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_moment_without_descriptors_is_no_other_job_start(run: RunFolder) -> None:
    with no_free_descriptor():
        with pytest.raises(OSError, match="Too many open files"):
            os.listdir(run.claims)
        check_claim()
    os.symlink("7-1", run.claims / "2")
    with pytest.raises(TakenOver, match="job start 7-1 has taken over"):
        check_claim()


def resume(folder: Path) -> str:
    try:
        with quiet(folder=folder) as run:
            run.resume(model=run.wrap(nn.Linear(1, 1)))
            run.resume(model=nn.Linear(1, 1))  # it has its own remains
            return "fine"
    except CheckpointError as error:
        return error.message


def test_all_ranks_of_a_second_run_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path / "checkpoints")
    checkpoints.register(model=nn.Linear(1, 1))
    checkpoints.restore()
    for message in ranks(resume, 2, tmp_path):
        assert (
            f"Another run is using {tmp_path / 'checkpoints'}: process {os.getpid()} on" in message
        )
    checkpoints.close()
    assert ranks(resume, 2, tmp_path) == ["fine", "fine"]
    assert not (tmp_path / "checkpoints").exists()
