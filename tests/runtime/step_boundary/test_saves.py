"""What `run.save` and `best=` save: every call, the state as it is, and the checkpoint that was evaluated."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import RunError, UsageError
from paceline.runtime.distributed import process_group
from paceline.runtime.settings import best_metric
from paceline.runtime.step_boundary.heartbeat import Heartbeat
from tests.forked_ranks import Ranks
from tests.runtime.training.test_wrap import quiet


def weight(folder: Path, step: int) -> float:
    """The weight in a checkpoint."""
    model = nn.Linear(1, 1, bias=False)
    with quiet(
        folder=folder / "copy",
        start_from=str(folder / f"checkpoints/step-{step:08d}"),
        start_continue=True,
    ) as run:
        run.resume(model=model)
    return model.weight.item()


def saved(folder: Path) -> list[int]:
    return sorted(int(path.parent.name[5:]) for path in folder.glob("checkpoints/*/complete.json"))


class Trainable:
    """One weight, and an optimizer that adds 1 to it."""

    def __init__(self) -> None:
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=1.0)

    def step(self) -> None:
        self.model.weight.grad = -torch.ones(1, 1)
        self.opt.step()


def by_hand(folder: Path, rounds: int) -> tuple[int, float]:
    """A loop that nothing counts the steps of."""
    train = Trainable()
    with quiet(folder=folder, keep_last=9) as run:
        run.resume(model=train.model, opt=train.opt)
        began = run.step
        run.save()  # nothing has been trained yet
        for _ in range(rounds):
            train.step()
            run.save()
            run.save()  # nothing has changed
        if rounds == 1:
            train.step()  # the end of the session saves it
    return began, train.model.weight.item()


def test_each_save_of_a_loop_without_steps_counts_as_one(tmp_path: Path) -> None:
    assert by_hand(tmp_path, 3) == (0, 3.0)
    assert saved(tmp_path) == [0, 1, 2, 3]
    assert by_hand(tmp_path, 1) == (3, 5.0)
    assert saved(tmp_path) == [0, 1, 2, 3, 4, 5]
    assert [weight(tmp_path, step) for step in saved(tmp_path)] == [0, 1, 2, 3, 4, 5]


def test_a_loop_with_should_stop_saves_whenever_it_asks(tmp_path: Path) -> None:
    train = Trainable()
    with quiet(folder=tmp_path, keep_last=9) as run:
        run.resume(model=train.model, opt=train.opt)
        for _ in range(3):
            train.step()
            assert not run.should_stop
            run.save()
        train.step()
        run.save()  # of the same step, but another state
    assert saved(tmp_path) == [1, 2, 3]
    assert [weight(tmp_path, step) for step in (1, 2, 3)] == [1, 2, 4]


def save_alone(folder: Path, comes: bool) -> str:
    """Rank 0 saves. Rank 1 waits until that is noticed, and then saves too, or fails."""
    noticed = folder / "noticed"
    process_group.LATE_AFTER = 0.05

    def notice(text: str) -> None:
        noticed.write_text(text)

    process_group.note = notice
    try:
        with quiet(folder=folder, timeout=60 if comes else 1) as run:
            run.resume(model=run.wrap(nn.Linear(1, 1)))
            if run.rank == 1:
                while not (noticed if comes else folder / "failed").exists():
                    time.sleep(0.01)
                if not comes:
                    raise KeyError
            run.save()
    except KeyError:
        return "failed"
    except RunError as error:
        (folder / "failed").touch()
        return error.message
    return noticed.read_text()


def test_a_save_on_one_rank_alone_names_the_others(ranks: Ranks, tmp_path: Path) -> None:
    text = "rank 0 is waiting in run.save() for rank 1: call it on all ranks, not under `if run.rank == 0`"
    for folder in (tmp_path / "late", tmp_path / "never"):
        folder.mkdir()
    assert ranks(save_alone, 2, tmp_path / "late", True) == [text, text]
    assert saved(tmp_path / "late") == [0]
    assert ranks(save_alone, 2, tmp_path / "never", False) == [
        "run.save() was not called on rank 1.",
        "failed",
    ]


# -- after the loop of an epoch --------------------------------------------------------------------------


class Average:
    """Large enough not to be copied: what an epoch's body updates after its loop."""

    def __init__(self) -> None:
        self.values, self.updates = torch.zeros(1 << 18, dtype=torch.float64), 0

    def update(self, model: nn.Module) -> None:
        self.values += next(model.parameters()).item()
        self.updates += 1

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values, self.updates = state["values"].clone(), state["updates"]


def averaging(folder: Path, fail_in: int | None, order: str) -> list[Any]:
    """Four epochs of two steps; the body of each then averages, saves, evaluates and schedules, in some order."""
    train, average = Trainable(), Average()
    swa = torch.optim.swa_utils.AveragedModel(train.model)
    schedule = torch.optim.lr_scheduler.StepLR(train.opt, 1, 0.5)
    bodies: list[str] = []
    try:
        with quiet(folder=folder, seed=0, save_every_steps=2) as run:
            run.resume(
                model=train.model, opt=train.opt, swa=swa, average=average, schedule=schedule
            )
            for epoch in run.epochs(4):
                for _ in run.steps(range(2)):
                    train.step()
                for action in order.split():
                    if action == "average":
                        average.update(train.model)
                        swa.update_parameters(train.model)
                    elif action == "schedule":
                        schedule.step()
                    elif action == "save":
                        run.save(wait=True)
                    elif action == "evaluate":
                        bodies.append(f"evaluate {epoch}")
                    elif action == "fail" and epoch == fail_in:
                        raise KeyError(epoch)
    except KeyError:
        pass
    lr = train.opt.param_groups[0]["lr"]
    values = [
        train.model.weight.item(),
        swa.module.weight.item(),
        int(swa.n_averaged),
        average.values[0].item(),
    ]
    return [*values, average.updates, lr, bodies]


@pytest.mark.parametrize(
    ("order", "evaluated"),
    [
        ("average schedule evaluate save fail", [2, 3]),
        # changed after the save: the end of the body saves it
        ("average save schedule evaluate", [2, 3]),
        # not changed before it: what follows the loop runs again
        ("save fail average schedule evaluate", [1, 2, 3]),
        ("average schedule save evaluate fail", [2, 3]),
    ],
)
def test_what_happens_after_the_loop_is_neither_lost_nor_done_twice(
    tmp_path: Path, order: str, evaluated: list[int]
) -> None:
    whole = averaging(tmp_path / "whole", None, order)
    assert whole[2:5:2] == [4, 4]
    if "fail" in order:
        averaging(tmp_path / "run", 1, order)
    else:
        # right after the loop of epoch 2, so after the body of 1
        averaging(tmp_path / "run", 2, f"fail {order}")
        evaluated = [2, 3]
    resumed = averaging(tmp_path / "run", None, order)
    assert resumed[:-1] == whole[:-1]
    assert resumed[-1] == [f"evaluate {epoch}" for epoch in evaluated]


def changing(folder: Path, change: str, fail_in: int | None) -> list[Any]:
    """Two epochs of two steps; the body of each then changes something whose norm tells nothing, and saves."""
    model = nn.Linear(2, 2, bias=False)
    nn.init.zeros_(model.weight)
    model.register_buffer("order", torch.arange(5000))
    opt = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    with suppress(KeyError), quiet(folder=folder, seed=0) as run, torch.no_grad():
        run.resume(model=model, opt=opt)
        for epoch in run.epochs(2):
            for number in run.steps(range(2)):
                model.weight.grad = torch.arange(4.0).reshape(2, 2) + number
                opt.step()
            if change == "weight":
                model.weight.copy_(model.weight.flip(0))
            elif change == "buffer":
                model.order.copy_(model.order.roll(1))
            else:
                opt.state[model.weight]["momentum_buffer"].mul_(0.5)
            run.save(wait=True)
            if epoch == fail_in:
                raise KeyError(epoch)
    return [
        model.weight.tolist(),
        model.order.tolist(),
        opt.state[model.weight]["momentum_buffer"].tolist(),
    ]


@pytest.mark.parametrize("change", ["weight", "momentum", "buffer"])
def test_a_save_after_the_loop_notices_every_change(tmp_path: Path, change: str) -> None:
    whole = changing(tmp_path / "whole", change, None)
    changing(tmp_path / "run", change, 0)
    assert changing(tmp_path / "run", change, None) == whole


def test_the_end_of_a_run_keeps_what_its_last_epoch_did_after_the_loop(tmp_path: Path) -> None:
    whole = averaging(tmp_path, None, "average")
    again = averaging(tmp_path, None, "average")  # nothing left to do
    assert again == whole


def test_a_replaced_checkpoint_survives_a_kill_between_the_two_renames(tmp_path: Path) -> None:
    assert by_hand(tmp_path, 2) == (0, 2.0)
    folder = tmp_path / "checkpoints"
    (folder / "step-00000002").rename(folder / "step-00000002.tmp-1-3")
    assert by_hand(tmp_path, 0) == (2, 2.0)


# -- best ------------------------------------------------------------------------------------------------

SCORES = [0.1, 0.5, 0.9, 0.3, 0.2, 0.4]


def evaluating(folder: Path, style: str, **settings: Any) -> list[int]:
    train = Trainable()
    options: dict[str, Any] = {
        "keep_last": 1,
        "save_every_seconds": None,
        "best": "acc:max",
        **settings,
    }
    with quiet(folder=folder, **options) as run:
        run.resume(model=train.model, opt=train.opt)
        if style == "epochs":
            for _ in run.epochs(6):
                for _ in run.steps(range(2)):
                    train.step()
                run.log(acc=SCORES[run.epoch])
        elif style == "steps":
            for number in run.steps(range(6)):
                train.step()
                for _ in run.evaluate([0], batch_size=1):
                    pass
                run.log(acc=SCORES[number])
        else:
            for score in SCORES:
                if style == "by hand, before the step":
                    run.log(acc=score)
                train.step()
                if style == "by hand, after the step":
                    run.log(acc=score)
                assert not run.should_stop
    return [int(weight(folder, step)) for step in saved(folder)]


@pytest.mark.parametrize(
    ("style", "settings", "kept"),
    [
        ("epochs", {"save_every_steps": 2}, [6, 12]),  # saves and evaluations fall together
        ("epochs", {"save_every_steps": 1}, [6, 12]),
        ("epochs", {}, [6, 12]),  # nothing else saves, so the evaluation does
        ("steps", {}, [3, 6]),
        ("by hand, after the step", {"save_every_steps": 1}, [3, 6]),
        ("by hand, before the step", {"save_every_steps": 1}, [2, 6]),
    ],
)
def test_the_best_checkpoint_is_the_one_evaluated(
    tmp_path: Path, style: str, settings: dict[str, Any], kept: list[int]
) -> None:
    assert evaluating(tmp_path, style, **settings) == kept


def test_the_best_checkpoint_of_two_ranks_and_a_resumed_run(ranks: Ranks, tmp_path: Path) -> None:
    ranks(evaluating_on_rank_0, 2, tmp_path, 4)
    assert saved(tmp_path) == [6, 8]
    ranks(evaluating_on_rank_0, 2, tmp_path, 6)
    assert saved(tmp_path) == [6, 12]
    marker = json.loads((tmp_path / "checkpoints/step-00000006/complete.json").read_text())
    assert marker["meta"]["best"] == {"metric": "acc", "mode": "max", "value": 0.9}


@pytest.mark.parametrize(
    ("best", "names", "said"),
    [
        (
            "val_loss",
            ["loss", "valid_loss", "acc"],
            "logged as 'val_loss' in this session; the nearest name is 'valid_loss'",
        ),
        ("val_loss", [], "logged as 'val_loss' in this session; nor was any other number"),
        ("loss:min", ["loss", "valid_loss"], None),
    ],
)
def test_a_metric_that_is_never_logged_is_noted(
    best: str, names: list[str], said: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    with quiet(best=best) as run:
        for _ in run.steps(range(2)):
            run.log(**dict.fromkeys(names, 1.0))
    printed = capfd.readouterr().err
    assert ("nothing was logged" not in printed) if said is None else said in printed


def evaluating_on_rank_0(folder: Path, epochs: int) -> None:
    """Only rank 0 logs the metric."""
    train = Trainable()
    with quiet(folder=folder, keep_last=1, save_every_seconds=None, best="acc") as run:
        run.resume(model=train.model, opt=train.opt)
        for epoch in run.epochs(epochs):
            for _ in run.steps(range(2)):
                train.step()
            if run.rank == 0:
                run.log(acc=SCORES[epoch])


def test_the_direction_is_stated_or_known() -> None:
    assert best_metric("loss:max") == ("loss", "max")
    assert best_metric("a:b:min") == ("a:b", "min")
    for name in ("loss", "val_loss", "eval/WER", "perplexity", "test-rmse", "ppl"):
        assert best_metric(name) == (name, "min")
    for name in ("accuracy", "val_acc", "F1", "mAP", "val/top1", "reward"):
        assert best_metric(name) == (name, "max")
    for unknown in ("quality", "loss_accuracy", "min:loss", "loss:", ":min", ""):
        with pytest.raises(UsageError, match="lower or a higher"):
            quiet(best=unknown)


def test_a_last_state_that_cannot_be_saved_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the agent, without a disk; and as an event."""
    marked: list[int] = []
    monkeypatch.setattr(Heartbeat, "mark_unsaved", lambda _, step: marked.append(step))
    for saves in (True, False):
        folder = tmp_path / str(saves)
        folder.mkdir()
        if not saves:  # root can write everywhere, so a file blocks the folder
            (folder / "checkpoints").write_text("in the way")
        with quiet(folder=folder) as run:
            model = run.wrap(torch.nn.Linear(1, 1))
            run.resume(model=model)
            for _ in run.steps([1, 2, 3]):
                pass
        events = "".join(path.read_text() for path in (folder / "events").iterdir())
        assert marked == ([] if saves else [3])
        assert ("save_failed" in events) is not saves
