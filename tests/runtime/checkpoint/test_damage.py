"""A checkpoint is complete or absent: damage, death, full disks and bad folders."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.contract.checkpoint import is_complete, list_checkpoints, read_marker
from paceline.errors import CheckpointError
from paceline.runtime.checkpoint import writer
from paceline.runtime.checkpoint.manager import CheckpointManager
from paceline.runtime.checkpoint.retention import RetentionPolicy
from tests.forked_ranks import Ranks
from tests.ports import free_port
from tests.runtime.checkpoint.trainer import Trainer, make
from tests.small_disk import mount_small_disk


def truncate(folder: Path) -> None:
    share = next(folder.glob("*.safetensors"))
    os.truncate(share, share.stat().st_size - 1)


def flip_a_byte(folder: Path) -> None:
    share = next(folder.glob("*.safetensors"))
    with open(share, "r+b") as file:
        file.seek(share.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def lose_a_file(folder: Path) -> None:
    next(folder.glob("state-*.json")).unlink()


def lose_the_marker(folder: Path) -> None:
    (folder / "complete.json").unlink()


def tear_the_marker(folder: Path) -> None:
    os.truncate(folder / "complete.json", 20)


def change_the_marker(folder: Path) -> None:
    text = (folder / "complete.json").read_text()
    (folder / "complete.json").write_text(text.replace('"step": 2', '"step": 3'))


DAMAGES = {
    truncate: "instead of",
    flip_a_byte: "has checksum",
    lose_a_file: "can't be read: No such file",
    lose_the_marker: "was never completed",
    tear_the_marker: "can't be read",
    change_the_marker: "complete.json of step-00000002 is damaged",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_skipped_by_name(tmp_path: Path, damage: Any) -> None:
    make(tmp_path, 1, 2)
    damage(tmp_path / "step-00000002")
    trainer = Trainer(tmp_path, seed=5)
    restored = trainer.checkpoints.restore()
    assert restored is not None
    assert restored.step == 1
    assert len(trainer.warnings) == 1
    assert "skipping checkpoint step-00000002" in trainer.warnings[0]
    assert DAMAGES[damage] in trainer.warnings[0]
    # When the step is reached again, a new checkpoint replaces the damaged one.
    trainer.step(2)
    trainer.checkpoints.save(2, wait=True)
    trainer.close()
    again = Trainer(tmp_path, seed=6)
    restored = again.checkpoints.restore()
    assert restored is not None
    assert (restored.step, again.warnings) == (2, [])
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [
        "step-00000001",
        "step-00000002",
    ]


def resume(folder: Path) -> tuple[int | None, list[str], str]:
    trainer = Trainer(folder, seed=3)
    restored = trainer.checkpoints.restore()
    result = (restored and restored.step, trainer.warnings, trainer.digest())
    trainer.close()
    return result


def save_steps(folder: Path, *steps: int) -> None:
    trainer = Trainer(folder, policy=RetentionPolicy(keep_last=9))
    for number in steps:
        trainer.step(number)
        trainer.checkpoints.save(number, wait=True)
    trainer.close()


def test_all_ranks_load_the_same_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    """Each rank verifies only a part: damage that one of them finds counts for all."""
    ranks(save_steps, 2, tmp_path, 1, 2, 3)
    for share in (tmp_path / "step-00000003").glob("share-00002-*"):
        share.write_bytes(share.read_bytes()[:-1] + b"!")
    (tmp_path / "step-00000002" / "state-00001-of-00002.json").write_text("{}")
    found = ranks(resume, 2, tmp_path)
    assert [step for step, _, _ in found] == [1, 1]
    assert found[0][2] == found[1][2]
    assert [warning.split(":")[0] for warning in found[0][1]] == [
        "skipping checkpoint step-00000003",
        "skipping checkpoint step-00000002",
    ]
    assert found[1][1] == []


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over(tmp_path: Path) -> None:
    make(tmp_path / "run", 1, 2)
    make(tmp_path / "other", 7)
    for step in (1, 2):
        flip_a_byte(tmp_path / "run" / f"step-0000000{step}")
    for start_from in (None, tmp_path / "other"):
        trainer = Trainer(tmp_path / "run")
        with pytest.raises(CheckpointError, match=r"None of the 2 checkpoints in .*") as caught:
            trainer.checkpoints.restore(start_from)
        assert [warning.split(":")[0] for warning in trainer.warnings] == [
            "skipping checkpoint step-00000002",
            "skipping checkpoint step-00000001",
        ]
        assert f"rm -r {tmp_path}/run/step-*" in caught.value.hint
        # Any rank's error may be the one that is shown, so each is complete.
        assert all(f"step-0000000{step}: share-" in caught.value.message for step in (1, 2))
    with pytest.raises(CheckpointError, match="no complete checkpoint at"):
        Trainer(tmp_path / "new").checkpoints.restore(tmp_path / "run")
    for step in (1, 2):  # as the hint suggests
        shutil.rmtree(tmp_path / "run" / f"step-0000000{step}")
    assert Trainer(tmp_path / "run").checkpoints.restore() is None


# -- failing to write ----------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A file system of 9 MB; a checkpoint takes a bit more than 3."""
    with mount_small_disk(tmp_path / "small", "9m") as folder:
        yield folder


def fill_the_disk(folder: Path) -> list[Any]:
    """Save one that fits, two next to ballast that leaves no space, then one without it."""
    trainer = Trainer(folder)
    trainer.checkpoints.restore()
    ended = []
    for number in (1, 2, 3, 4):
        trainer.step(number)
        if number == 2 and trainer.rank == 0:
            (folder.parent / "ballast").write_bytes(bytes(5 << 20))
        if number == 4 and trainer.rank == 0:
            (folder.parent / "ballast").unlink()
        if trainer.world_size > 1:
            torch.distributed.barrier()
        trainer.checkpoints.save(number, wait=True)
        ended += [(saved.step, saved.complete) for saved in trainer.checkpoints.poll()]
        if trainer.world_size > 1:
            torch.distributed.barrier()
        if trainer.rank == 0 and number == 3:
            # what slower ranks wrote of a failed save goes with the next one
            ended.append([path.name for path in list_checkpoints(folder)])
    ended.append(trainer.warnings)
    trainer.close()
    return ended


@pytest.mark.parametrize("trainer", [1, 2])
def test_a_full_disk_costs_the_save_and_nothing_else(
    ranks: Ranks, small_disk: Path, trainer: int
) -> None:
    """Training continues, the last complete one stays, and a later save works again."""
    results = ranks(fill_the_disk, trainer, small_disk / "checkpoints")
    *ended, warnings = results[0]
    assert ended == [(1, True), (2, False), (3, False), ["step-00000001"], (4, True)]
    (warning,) = warnings  # both saves failed for the same reason
    assert "could not write the checkpoint of step 2" in warning
    assert "No space left on device" in warning
    assert "the newest complete checkpoint is step-00000001" in warning
    for result in results[1:]:
        assert result[:-1] == [(1, True), (2, False), (3, False), (4, True)]
        assert result[-1] == []


# -- ranks that die or lag -----------------------------------------------------------------------------


def save_and_die(folder: Path, port: int, rank: int, victim: int, moment: str) -> None:
    """Save step 1, then start to save step 2 and kill the victim at a given moment."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    # as in all ranks: with two threads on busy cores, equal ranks differ in the last bits
    torch.set_num_threads(1)
    trainer = Trainer(folder)
    trainer.step(1)
    trainer.checkpoints.save(1, wait=True)
    if (victim, moment) == (1, "write_image"):
        trainer.checkpoints.timeout = 2  # the only case in which rank 0 has to time out
    if rank == victim:
        inner = getattr(writer, moment)

        def dying(*args: Any, **options: Any) -> Any:
            if moment == "_commit":
                os.kill(os.getpid(), signal.SIGKILL)
            inner(*args, **options)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(writer, moment, dying)
    trainer.step(2)
    trainer.checkpoints.save(2)
    while trainer.checkpoints.is_saving:
        time.sleep(0.01)
    os._exit(0)


@pytest.mark.usefixtures("ranks")  # they start the server that forks, which outlives the test
@pytest.mark.parametrize(
    ("victim", "moment"),
    [
        (0, "write_image"),
        (1, "write_image"),
        (0, "_commit"),
        (1, "_write_report"),
        (0, "_sync_folder"),
    ],
)
def test_a_rank_killed_during_a_save(tmp_path: Path, victim: int, moment: str) -> None:
    """Whenever it happens, the checkpoint is complete or absent, and the next attempt removes the leftovers."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo"])
    port = free_port()
    processes = [
        context.Process(target=save_and_die, args=(tmp_path, port, rank, victim, moment))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert processes[victim].exitcode == -signal.SIGKILL
    trainer = Trainer(tmp_path, seed=4, attempt=2)
    restored = trainer.checkpoints.restore()
    assert restored is not None
    complete = [path for path in list_checkpoints(tmp_path) if is_complete(path)]
    assert restored.step == len(complete)
    assert trainer.warnings == []
    trainer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        path.name for path in complete
    )
    # If the victim was killed after its report, the survivor commits the checkpoint. If rank 0 was killed after it had
    # written the marker, the next attempt does.
    assert restored.step == (
        2 if (victim, moment) in ((1, "_write_report"), (0, "_sync_folder")) else 1
    )


def hurry(folder: Path) -> list[tuple[int, bool]]:
    """Rank 0's thread starts its first save only when rank 1 is in its second."""
    trainer = Trainer(folder)
    trainer.checkpoints.restore()
    # Without plain state there is nothing to compare, and ranks do not meet in a save.
    trainer.checkpoints._find_differing = lambda states: set()
    if trainer.rank == 0:
        inner = writer._wait_for_copies

        def late(task: writer.SaveTask) -> None:
            deadline = time.monotonic() + 60
            while (
                task.number == 1
                and not (folder / "step-00000002.tmp-1-2" / "report-1.json").exists()
            ):
                assert time.monotonic() < deadline, "rank 1 has not come to its second save"
                time.sleep(0.01)
            inner(task)

        writer._wait_for_copies = late
    ended = []
    for number in (1, 2, 3):
        trainer.checkpoints.save(number, wait=number == 3)
        ended += trainer.checkpoints.poll()
    trainer.close()
    return [(saved.step, saved.complete) for saved in ended]


def test_a_rank_that_is_one_save_ahead(ranks: Ranks, tmp_path: Path) -> None:
    """Its files are not removed with the leftovers of earlier saves."""
    assert ranks(hurry, 2, tmp_path) == [[(1, True), (2, True), (3, True)]] * 2
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000003", "step-00000002"]


def test_a_new_session_waits_for_the_save_of_one_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = writer._commit

    def slow(*args: Any) -> None:
        time.sleep(0.3)
        commit(*args)

    monkeypatch.setattr(writer, "_commit", slow)
    first = Trainer(tmp_path)
    first.checkpoints.restore()
    first.step(1)
    first.checkpoints.save(1)
    first.checkpoints.close(wait=False)
    second = Trainer(tmp_path, seed=2)
    restored = second.checkpoints.restore()
    assert restored is not None
    assert restored.step == 1
    second.close()


def disagree(folder: Path) -> list[tuple[bool, str | None]]:
    trainer = Trainer(folder)
    if trainer.rank == 1:
        trainer.model.register_buffer("extra", torch.zeros(3))
    trainer.checkpoints.save(1, wait=True)
    ended = [(saved.complete, saved.error) for saved in trainer.checkpoints.poll()]
    trainer.close()
    return ended


def test_ranks_with_different_tensors(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(disagree, 2, tmp_path)
    assert first[0][0] is second[0][0] is False
    assert "rank 1 has different tensors than rank 0" in str(first[0][1])
    assert list_checkpoints(tmp_path) == []


# -- retention -----------------------------------------------------------------------------------------


def save_all(folder: Path, policy: RetentionPolicy, losses: list[float]) -> list[int]:
    model = nn.Linear(2, 2)
    checkpoints = CheckpointManager(folder, policy=policy)
    checkpoints.register(model=model)
    for step, loss in enumerate(losses, 1):
        checkpoints.attach(step, loss)
        checkpoints.save(step, wait=True)
    checkpoints.close()
    assert all("step-" in path.name and "." not in path.name for path in folder.iterdir())
    return sorted(read_marker(path).step for path in list_checkpoints(folder))


def test_retention(tmp_path: Path) -> None:
    losses = [5.0, 1.0, 3.0, 4.0, 1.0, 6.0, 7.0, float("nan"), 9.0]
    cases = [
        (RetentionPolicy(keep_last=1), [9]),
        (RetentionPolicy(keep_last=2), [8, 9]),
        (RetentionPolicy(keep_last=1, keep_every=4), [4, 8, 9]),
        (RetentionPolicy(keep_last=1, best="loss"), [5, 9]),
        (RetentionPolicy(keep_last=1, best="loss", best_mode="max"), [9]),
        (RetentionPolicy(keep_last=2, keep_every=3, best="loss"), [3, 5, 6, 8, 9]),
    ]
    for number, (policy, remaining) in enumerate(cases):
        assert save_all(tmp_path / str(number), policy, losses) == remaining, policy


def test_the_only_intact_checkpoint_is_never_removed(tmp_path: Path) -> None:
    """Damaged ones don't count: with keep_last=1 the intact older one stays until a new one is committed."""
    make(tmp_path, 1, 2, 3)
    flip_a_byte(tmp_path / "step-00000003")
    shutil.rmtree(tmp_path / "step-00000002")
    trainer = Trainer(tmp_path, policy=RetentionPolicy(keep_last=1))
    trainer.checkpoints.restore()
    assert (tmp_path / "step-00000001").exists()
    trainer.checkpoints.save(2, wait=True)
    trainer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002"]
