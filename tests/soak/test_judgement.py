"""The soak itself: it finds runs that differ from the undisturbed one or are stuck, and a seed gives the same again."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from paceline.contract.files import own_folder_name
from paceline.contract.run_folder import RunFolder
from paceline.slurm.job_states import JobState
from paceline.watch.records import Record
from tests.fault_tolerance.runs import STEPS, Training
from tests.soak.runs import Disk, Shape, SoakRun, _core_seconds


def make_training(home: Path, *, steps: int = STEPS, weight: float = 1.0) -> Training:
    training = Training(home)
    losses = "".join(f"{step} {float(step).hex()}\n" for step in range(1, steps + 1))
    (training.out / "losses-1-0.txt").write_text(losses)
    torch.save({"weight": torch.tensor(weight)}, training.out / "final.pt")
    return training


def compare(tmp_path: Path, **difference: Any) -> str:
    undisturbed = make_training(tmp_path / "undisturbed")
    home = make_training(tmp_path / "ours", **difference).home
    return make_run(home).compare(undisturbed)


def make_run(home: Path) -> SoakRun:
    disk = Disk.__new__(Disk)  # no file system of its own
    return SoakRun(1, Shape(1, 1, "fork", "main", 0.0), home, disk, RunFolder(home))


def test_an_equal_run_is_exact(tmp_path: Path) -> None:
    assert compare(tmp_path) == ""


def test_skipped_steps_are_found(tmp_path: Path) -> None:
    assert compare(tmp_path, steps=STEPS - 1) == "rank 0 skipped steps"


def test_different_weights_are_found(tmp_path: Path) -> None:
    assert compare(tmp_path, weight=1.0 + 2**-23) == "weights differ: weight"


def test_a_seed_gives_the_same_shapes_again() -> None:
    first, again = (
        [Shape.choose(rng) for _ in range(20)]
        for rng in (random.Random("0 shapes"), random.Random("0 shapes"))
    )
    assert first == again
    assert len({(shape.nodes, shape.style) for shape in first}) > 3


def make_record(run: SoakRun, state: str, reason: str) -> Record:
    return Record(run.folder, {}, "", "1", JobState("1", state, reason))


@pytest.mark.parametrize("sign", ["none", "log", "core", "core at times", "nodes", "held"])
def test_a_run_is_stuck_if_nothing_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sign: str
) -> None:
    """Not if it is only slow, or waits for nodes. Agents that wait want a core now and then."""
    run, now, wanted = make_run(tmp_path), 1000.0, 0.0
    log = tmp_path / "log"
    monkeypatch.setattr("tests.soak.runs.time.monotonic", lambda: now)
    monkeypatch.setattr("tests.soak.runs._core_seconds", lambda _: {7: wanted})
    waits = {"nodes": ("PENDING", "Resources"), "held": ("PENDING", "JobHeldAdmin")}
    run.update(make_record(run, *waits.get(sign, ("RUNNING", ""))))
    stuck = False
    for minute in range(20):
        now += 60
        wanted += {"core": 50.0, "core at times": 10.0}.get(sign, 0.0)
        if sign == "log":
            log.touch()
            os.utime(log, ns=(minute, time.time_ns() + minute))
        stuck |= run.is_stuck
    assert stuck == (sign in ("none", "core at times", "held"))


def test_what_a_run_leaves_in_its_temporary_folder_is_found(tmp_path: Path) -> None:
    ours = tmp_path / "tmp" / own_folder_name()
    ours.mkdir(parents=True)
    (tmp_path / "tmp" / "torchinductor_me" / "cache").mkdir(parents=True)
    assert make_run(tmp_path).temporary_files() == []
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(ours / "s"))
    assert make_run(tmp_path).temporary_files() == [f"tmp/{ours.name}/s"]


def test_a_thread_that_works_wants_a_core() -> None:
    me = psutil.Process()
    before = _core_seconds([me])
    deadline = time.thread_time() + 0.05
    while time.thread_time() < deadline:
        pass
    after = _core_seconds([me])
    assert after[threading.get_native_id()] - before[threading.get_native_id()] >= 0.04


def test_a_run_without_a_sign_of_life_is_requeued_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The words are those of `paceline ps`; without them, the soak does nothing."""
    run = make_run(tmp_path)
    run.update(make_record(run, "RUNNING", ""))
    assert run.take_remedy() == []
    monkeypatch.setattr("paceline.watch.records.seconds_lifeless", lambda *_: 400.0)
    assert run.take_remedy() == ["scontrol", "requeue", "1"]
    assert run.requeued_by_hand
    assert run.take_remedy() == [], "a second time would hide that it does not help"


def test_a_run_that_slurm_holds_is_released(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.update(make_record(run, "PENDING", "launch failed requeued held"))
    assert run.take_remedy() == ["scontrol", "release", "1"]
