"""Two live runs never share a checkpoint folder, and nobody is kept out by a run that is gone."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from paceline.contract.checkpoint import list_checkpoints
from paceline.contract.claims import describe_processes
from paceline.contract.process import process_start
from paceline.contract.run_folder import RunFolder
from paceline.errors import CheckpointError, TakenOver
from paceline.runtime.checkpoint.folder_owner import FILE, FolderOwner
from paceline.runtime.checkpoint.manager import CheckpointManager
from tests.forked_ranks import Ranks
from tests.runtime.training.test_wrap import quiet


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """Another process on this host."""
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def hold(folder: Path, pid: int, **changed: str) -> None:
    owner = json.loads(describe_processes([pid]))
    (folder / FILE).write_text(json.dumps({**owner, **changed}))


def take(folder: Path) -> None:
    owner = FolderOwner(folder)
    owner.acquire()
    owner.check()
    owner.release()
    assert os.listdir(folder) == []


def test_a_live_process_on_this_host_keeps_the_folder(
    tmp_path: Path, other: subprocess.Popen[bytes]
) -> None:
    hold(tmp_path, other.pid)
    with pytest.raises(CheckpointError, match=f"Another run is using .*: process {other.pid} on"):
        take(tmp_path)
    other.kill()
    while process_start(other.pid):
        time.sleep(0.01)
    take(tmp_path)  # it has ended, although nobody has waited for it yet
    hold(tmp_path, os.getpid())  # an earlier session of this process
    take(tmp_path)
    (tmp_path / FILE).write_text("half a file")
    take(tmp_path)


def test_a_process_on_another_host_loses_the_folder(
    tmp_path: Path, other: subprocess.Popen[bytes]
) -> None:
    """Nobody here knows whether it still runs: if it does, it notices before its next commit."""
    hold(tmp_path, other.pid, host="elsewhere", boot="another", namespace="another")
    take(tmp_path)


def test_a_run_that_was_taken_for_dead_commits_nothing(
    tmp_path: Path, other: subprocess.Popen[bytes]
) -> None:
    warnings: list[str] = []
    checkpoints = CheckpointManager(tmp_path, warn=warnings.append)
    checkpoints.register(model=nn.Linear(1, 1))
    checkpoints.restore()
    checkpoints.save(1, wait=True)
    hold(tmp_path, other.pid, host="elsewhere")
    with pytest.raises(TakenOver, match=r"Another run has taken over .*, on elsewhere"):
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
        environment.setenv("PACELINE_ATTEMPT", "2")
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


def test_two_processes_of_one_attempt_never_share_its_folder(
    run: RunFolder, other: subprocess.Popen[bytes]
) -> None:
    """A program may start several scripts. A rank of an earlier attempt is about to end."""
    run.checkpoints.mkdir()
    this_run = {"PACELINE_RUN": str(run.path), "PACELINE_JOB_START": "7-0"}
    hold(run.checkpoints, other.pid, **this_run, PACELINE_ATTEMPT="2")
    with pytest.raises(CheckpointError, match="Another run is using"):
        take(run.checkpoints)
    hold(run.checkpoints, other.pid, **this_run, PACELINE_ATTEMPT="1")
    take(run.checkpoints)
    hold(run.checkpoints, other.pid, **{**this_run, "PACELINE_RUN": "/another"})
    with pytest.raises(CheckpointError, match="Another run is using"):
        take(run.checkpoints)


def resume(folder: Path) -> str:
    try:
        with quiet(folder=folder) as run:
            run.resume(model=run.wrap(nn.Linear(1, 1)))
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
    assert os.listdir(tmp_path / "checkpoints") == []
