"""Stopping: one informed rank is enough, all stop at the same boundary, and a resumed run is the same run."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import paceline
from paceline.contract import env
from paceline.contract.checkpoint import checkpoint_step
from paceline.contract.heartbeat_file import (
    FINISHED,
    HEADER,
    IN_SESSION,
    READY,
    RUNNING,
    SAVED_AND_STOPPED,
    SLOT,
    TIMES,
    slot_offset,
)
from tests.forked_ranks import Ranks
from tests.runtime.models import data, net, weights

EPOCHS, STEPS = 6, 48


def request_stop(*numbers: signal.Signals) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


def evaluate_others(run: Any, model: torch.nn.Module, held_out: Any, moment: Any) -> None:
    """Swap in averaged weights, and restore the model's own."""
    own = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
    for _ in run.evaluate(held_out, batch_size=2):
        moment("evaluation of other weights")
        time.sleep(0.03)
    for parameter, saved in zip(model.parameters(), own, strict=True):
        parameter.data.copy_(saved)


def training(
    folder: str, when: str = "", numbers: tuple[signal.Signals, ...] = (), mode: str = "auto"
) -> dict[str, Any]:
    """Train to the end, or until rank 1 gets a stop request at the named moment."""
    x, y = data()
    found: dict[str, Any] = {"after": False}

    def moment(name: str) -> None:
        if name == when and run.rank == 1:
            request_stop(*numbers)

    try:
        with paceline.session(cpu=True, seed=0, report=False, folder=folder) as run:
            model = run.wrap(net(), mode=mode)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            loader = run.loader(TensorDataset(x, y), batch_size=8)
            run.resume(model=model, optimizer=optimizer, schedule=schedule, loader=loader)
            found["began"] = run.step
            moment("before")
            for epoch in run.epochs(EPOCHS):
                for a, b in run.steps(loader):
                    noise = torch.rand(())  # the model's own randomness is part of its state
                    loss = ((model(a + 0.01 * noise) - b) ** 2).mean()
                    run.backward(loss)
                    run.update(optimizer)
                    run.log(loss=loss)
                    moment(f"step {run.step}")
                    if when == "evaluation within step 5" and run.step == 4:
                        with torch.no_grad():
                            for _ in run.evaluate(TensorDataset(x, y), batch_size=2):
                                moment(when)
                                time.sleep(0.03)
                    if when:
                        time.sleep(0.03)  # so that there are steps left when the ranks agree
                schedule.step()  # before the evaluation, so that a stop inside it must undo this
                if when == "evaluation of other weights" and epoch == 1:
                    evaluate_others(run, model, TensorDataset(x, y), moment)
                total = 0.0
                with torch.no_grad():
                    for number, (a, b) in enumerate(
                        run.evaluate(TensorDataset(x, y), batch_size=2)
                    ):
                        total += ((model(a) - b) ** 2).sum().item()
                        moment(f"evaluation {epoch} {number}")
                        if when.startswith(f"evaluation {epoch}"):
                            torch.rand(3)  # the evaluation's generator state is restored, too
                            time.sleep(0.03)
                run.log(error=run.sum(total))
            found |= {"after": True, "weights": weights(model)}
    except SystemExit as leaving:
        found["exit"] = leaving.code
    return {**found, "step": run.step}


def checkpoints(folder: Path) -> list[int]:
    found = [checkpoint_step(each.name) for each in (folder / "checkpoints").glob("step-*")]
    return sorted(step for step in found if step is not None)


def losses(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.fixture(scope="module")
def whole(
    ranks: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[float], dict[int, float]]:
    """A run without interruption."""
    folder = tmp_path_factory.mktemp("whole")
    first, second = ranks(training, 2, str(folder))
    assert first["weights"] == second["weights"]
    return first["weights"], losses(folder)


USR1, TERM = signal.SIGUSR1, signal.SIGTERM
MOMENTS = [
    ("step 5", (USR1,)),
    ("step 5", (TERM, USR1, TERM)),
    ("evaluation 1 3", (USR1,)),
    ("evaluation within step 5", (USR1,)),
    ("evaluation of other weights", (USR1,)),
    ("before", (USR1,)),
]


@pytest.mark.parametrize(("when", "numbers"), MOMENTS)
def test_a_stopped_and_resumed_run_equals_an_undisturbed_one(
    ranks: Ranks,
    whole: tuple[list[float], dict[int, float]],
    tmp_path: Path,
    when: str,
    numbers: tuple[signal.Signals, ...],
) -> None:
    first, second = ranks(training, 2, str(tmp_path), when, numbers)
    assert first == second, "the ranks stopped at different boundaries"
    assert first["exit"] == 0
    assert not first["after"], "code after the loop ran"
    step = first["step"]
    if when == "before":
        assert step == 0
        assert checkpoints(tmp_path) == []
    elif when == "evaluation within step 5":
        assert step == 5, "a step that was begun is brought to its end"
    elif when == "evaluation of other weights":
        assert step == 17, "the first training boundary after that evaluation"
    elif when.startswith("evaluation"):
        assert step == 16, "the last training boundary before that evaluation"
    else:
        assert 5 < step < STEPS
    assert checkpoints(tmp_path) == ([step] if step else [])

    resumed, _ = ranks(training, 2, str(tmp_path))
    assert (resumed["began"], resumed["step"]) == (step, STEPS)
    assert resumed["weights"] == whole[0], "not bit for bit the same"
    assert losses(tmp_path) == whole[1]


@pytest.mark.slow
def test_a_sharded_model_stops_within_an_evaluation_too(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(training, 2, str(tmp_path), "evaluation 1 3", (USR1,), "fsdp")
    assert (first["step"], first["exit"]) == (second["step"], second["exit"]) == (16, 0)
    assert checkpoints(tmp_path) == [16]
    resumed, _ = ranks(training, 2, str(tmp_path), "", (), "fsdp")
    expected, _ = ranks(training, 2, str(tmp_path / "whole"), "", (), "fsdp")
    assert (resumed["began"], resumed["step"]) == (16, STEPS)
    assert resumed["weights"] == expected["weights"]


def saving_often(folder: str, every: dict[str, Any]) -> list[str]:
    x, _ = data()
    with paceline.session(cpu=True, report=False, folder=folder, keep_last=100, **every) as run:
        model = run.wrap(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.resume(model=model, optimizer=optimizer)
        for _ in run.steps(range(20)):
            run.backward(model(x).mean())
            run.update(optimizer)
            time.sleep(0.05)
    return []


def test_checkpoints_are_saved_every_n_steps_or_seconds(ranks: Ranks, tmp_path: Path) -> None:
    ranks(
        saving_often,
        2,
        str(tmp_path / "steps"),
        {"save_every_steps": 6, "save_every_seconds": None},
    )
    assert checkpoints(tmp_path / "steps") == [6, 12, 18, 20]
    ranks(saving_often, 2, str(tmp_path / "seconds"), {"save_every_seconds": 0.3})
    assert len(checkpoints(tmp_path / "seconds")) >= 2
    lines = (tmp_path / "steps" / "events" / "rank-0.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert [event["step"] for event in events if event["event"] == "saving"] == [6, 12, 18, 20]
    assert events[0]["event"] == "training"
    assert all("blocked" in event for event in events if event["event"] == "saving")


def saving_after_the_loop(
    folder: str, *, until: int, epochs: int = 4, plain: bool = False
) -> tuple[int, float]:
    """Save after each epoch; fail after epoch `until`. Return the steps done here and the learning rate."""
    x, y = data()
    began = 0
    try:
        with paceline.session(
            cpu=True, seed=0, report=False, save_every_seconds=None, folder=folder
        ) as run:
            model = run.wrap(net())
            optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            loader = [(x, y)] * 4 if plain else run.loader(TensorDataset(x, y), batch_size=16)
            run.resume(model=model, optimizer=optimizer, schedule=schedule)
            began = run.step
            for epoch in run.epochs(epochs):
                for a, b in run.steps(loader):
                    run.backward(((model(a) - b) ** 2).mean())
                    run.update(optimizer)
                schedule.step()
                run.save(wait=True)
                assert schedule.get_last_lr() == [0.5 ** (epoch + 1)]
                assert optimizer.param_groups[0]["lr"] == 0.5 ** (epoch + 1)
                if epoch == until:
                    raise KeyError("killed")
    except KeyError:
        pass
    return run.step - began, optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("plain", [False, True])
def test_code_after_the_loop_runs_once_even_if_the_script_saves_after_it(
    tmp_path: Path, plain: bool
) -> None:
    assert saving_after_the_loop(str(tmp_path), until=1, plain=plain) == (8, 0.25)
    assert saving_after_the_loop(str(tmp_path), until=9, plain=plain) == (8, 0.5**4)
    # A run that came to its end, and is given more epochs: each of them is trained.
    assert saving_after_the_loop(str(tmp_path), until=9, epochs=6, plain=plain) == (8, 0.5**6)


# -- the heartbeat file -------------------------------------------------------------------------------------


def make_heartbeat_file(tmp_path: Path, *, terminating: int = 0, stop: int = 0) -> Path:
    path = tmp_path / "heartbeat"
    path.write_bytes(bytes(slot_offset(2)))
    with path.open("r+b") as file:
        file.write(HEADER.pack(terminating, 1, stop))
    return path


def slot(path: Path, rank: int) -> tuple[int, int, int]:
    state, step, pid, _, _ = SLOT.unpack_from(path.read_bytes(), slot_offset(rank))
    return state, step, pid


class SlowDataset(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.02)
        return torch.zeros(1)


def test_the_time_that_a_rank_waits_for_data_is_in_its_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_heartbeat_file(tmp_path)
    waited = []
    with monkeypatch.context() as patch:
        patch.setenv(env.HEARTBEAT, str(path))
        with paceline.session(cpu=True, report=False) as run:
            for _ in run.steps(run.loader(SlowDataset(), batch_size=2)):
                waited.append(TIMES.unpack_from(path.read_bytes(), TIMES.offset(0))[0])
    assert waited[0] == 0.0
    assert waited[1] >= 0.04, "one batch of two samples"
    assert TIMES.unpack_from(path.read_bytes(), TIMES.offset(1)) == (0.0, 0.0)


def beating(path: str, ask: bool) -> list[tuple[int, int, int]]:
    os.environ[env.HEARTBEAT] = path
    seen = []
    try:
        with paceline.session(cpu=True, report=False) as run:
            seen.append(slot(Path(path), run.local_rank))
            for step in run.steps(range(100_000 if ask else 3)):
                if step:
                    seen[1:] = [slot(Path(path), run.local_rank)]
                if ask and step == 5 and run.rank == 0:
                    os.kill(os.getpid(), signal.SIGTERM)
    except SystemExit as leaving:
        seen.append((-1, int(leaving.code or 0), seen[0][2]))
    return [*seen, slot(Path(path), run.local_rank)]


def test_heartbeats_have_state_and_step(ranks: Ranks, tmp_path: Path) -> None:
    path = make_heartbeat_file(tmp_path)
    for seen in ranks(beating, 2, str(path), False):
        assert [each[:2] for each in seen] == [(READY, 0), (RUNNING, 2), (FINISHED, 3)]
        assert len({pid for _, _, pid in seen}) == 1
    assert [
        IN_SESSION.unpack_from(path.read_bytes(), IN_SESSION.offset(rank)) for rank in (0, 1)
    ] == [(1,), (1,)]


def test_a_stopped_rank_marks_its_heartbeat_and_exits_with_zero(
    ranks: Ranks, tmp_path: Path
) -> None:
    first, second = ranks(beating, 2, str(make_heartbeat_file(tmp_path)), True)
    assert [state for state, _, _ in first] == [READY, RUNNING, -1, SAVED_AND_STOPPED]
    assert first[2][1] == second[2][1] == 0, "the exit code"
    assert first[3][1] == second[3][1] > 5


def test_a_request_before_the_session_is_seen(ranks: Ranks, tmp_path: Path) -> None:
    path = make_heartbeat_file(tmp_path, stop=1)
    for seen in ranks(beating, 2, str(path), True):
        assert seen[-1][:2] == (SAVED_AND_STOPPED, 0)


def ends_on_sigterm(path: str) -> None:
    os.environ[env.HEARTBEAT] = path
    with paceline.session(cpu=True, report=False) as run:
        for step in run.steps(range(100_000)):
            if step == 3 and run.rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_while_the_agent_ends_its_ranks_is_not_a_request(
    ranks: Ranks, tmp_path: Path
) -> None:
    path = make_heartbeat_file(tmp_path, terminating=1)
    with pytest.raises(AssertionError, match="died without a result"):
        ranks(ends_on_sigterm, 1, str(path))


def by_hand(_: str) -> tuple[int, bool]:
    with paceline.session(cpu=True, report=False) as run:
        for step in range(1_000_000):
            if step == 20 and run.rank == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            if run.should_stop:
                break
        return step, run.should_stop


def test_a_custom_loop_gets_the_same_answer_on_all_ranks(ranks: Ranks) -> None:
    first, second = ranks(by_hand, 2, "")
    assert first == second
    assert first[0] >= 20
    assert first[1] is True


def test_should_stop_after_a_loop_of_steps_counts_nothing(tmp_path: Path) -> None:
    with paceline.session(
        cpu=True, report=False, folder=tmp_path, save_every_steps=3, keep_last=99
    ) as run:
        run.resume(model=run.wrap(net()))
        seen = []
        for _ in run.epochs(3):
            for _ in run.steps(range(2)):
                assert not run.should_stop
            assert not run.should_stop
            seen.append(run.step)
        assert not run.should_stop  # a step by hand
        assert (seen, run.step) == ([2, 4, 6], 7)
    saved = sorted(
        int(path.parent.name[5:]) for path in tmp_path.glob("checkpoints/*/complete.json")
    )
    assert saved == [3, 6, 7]


def by_hand_with_saves(folder: str, settings: dict[str, Any]) -> list[int]:
    """A hand-written loop; returns the steps at which it resumed and ended."""
    with paceline.session(cpu=True, report=False, folder=folder, keep_last=99, **settings) as run:
        model = run.wrap(net())
        run.resume(model=model)
        first = run.step
        while run.step < 100:
            time.sleep(0.01)
            if run.should_stop:
                break
        return [first, run.step]


def test_a_custom_loop_saves_when_a_save_is_due(ranks: Ranks, tmp_path: Path) -> None:
    def saved(folder: str) -> list[int]:
        return sorted(
            int(path.parent.name[5:])
            for path in (tmp_path / folder).glob("checkpoints/*/complete.json")
        )

    by_step = {"save_every_steps": 4, "max_steps": 10}
    assert ranks(by_hand_with_saves, 2, str(tmp_path / "steps"), by_step) == [[0, 10]] * 2
    assert saved("steps") == [4, 8, 10]
    assert by_hand_with_saves(str(tmp_path / "steps"), {"max_steps": 13}) == [10, 13]
    assert (
        ranks(by_hand_with_saves, 2, str(tmp_path / "time"), {"save_every_seconds": 0.3})
        == [[0, 100]] * 2
    )
    assert len(saved("time")) >= 2
    assert saved("time")[-1] == 100
