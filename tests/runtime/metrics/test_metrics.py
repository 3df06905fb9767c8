"""Logged values are reduced over ranks and written once per step, as valid JSON lines."""

from __future__ import annotations

import enum
import json
import re
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any, cast

import numpy
import pytest
import torch
from torch.utils.data import TensorDataset

from paceline.errors import UsageError
from paceline.runtime.metrics.metrics import Metrics
from paceline.runtime.metrics.progress_bar import ProgressBar
from paceline.runtime.metrics.reduction import PendingScalars
from tests.forked_ranks import Ranks
from tests.runtime.models import data, net
from tests.runtime.training.test_wrap import quiet


def lines_of(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def log_positions(folder: str) -> None:
    """60 samples in batches of 16, so a tail of 12: the mean of y over the whole batch is what must be written."""
    x, y = data(60)
    with quiet(seed=0, folder=folder) as run:
        model = run.wrap(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = run.loader(
            TensorDataset(x, y), batch_size=16, accumulate=2, drop_last=False, shuffle=False
        )
        for epoch in run.epochs(3):
            for a, b in run.steps(loader):
                loss = ((model(a) - b) ** 2).mean()
                run.backward(loss)
                run.update(optimizer)
                run.log(
                    y=b.mean(), loss=loss, rank=run.rank, phase="warm" if epoch == 0 else "train"
                )
            run.log(accuracy=torch.tensor(0.5), epoch_number=epoch)


def test_numbers_are_weighted_means_over_micro_steps_and_ranks(
    ranks: Ranks, tmp_path: Path
) -> None:
    _, y = data(60)
    expected = [y[start : start + 16].mean().item() for start in range(0, 60, 16)]
    losses = []
    for world_size in (1, 2):
        ranks(log_positions, world_size, str(tmp_path / str(world_size)))
        lines = lines_of(tmp_path / str(world_size))
        by_step: dict[int, dict[str, Any]] = {}
        for line in lines:
            by_step.setdefault(line["step"], {}).update(line)
        assert sorted(by_step) == list(range(1, 13))
        for step, line in by_step.items():
            assert line["y"] == pytest.approx(expected[(step - 1) % 4], abs=1e-12)
            assert line["epoch"] == (step - 1) // 4
            assert line["phase"] == ("warm" if step <= 4 else "train")
            # Slices of 4 and 4 samples; in the tail of 12, of 3 and 3: ranks weigh the same.
            assert line["rank"] == pytest.approx((world_size - 1) / 2)
            assert step == 1 or line["samples_per_second"] > 0
        assert [step for step, line in by_step.items() if "accuracy" in line] == [4, 8, 12]
        losses.append([by_step[step]["loss"] for step in sorted(by_step)])
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)


def schedule(folder: str, accumulate: int) -> tuple[int, int, float]:
    """A schedule that is built and logged in the obvious way."""
    x, y = data(20)
    with quiet(seed=0, folder=folder) as run:
        model = run.wrap(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = run.loader(
            TensorDataset(x, y), batch_size=8, accumulate=accumulate, drop_last=False
        )
        sched = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2 * len(loader))
        for _ in run.epochs(2):
            for a, b in run.steps(loader):
                run.backward(((model(a) - b) ** 2).mean())
                if run.update(optimizer):
                    sched.step()
                run.log(
                    **{
                        "lr": sched.get_last_lr()[0],
                        "train/lr": sched.get_last_lr()[0],
                        "lr_psnr": a.mean(),
                    }
                )
        return run.step, loader.steps_per_epoch, sched.get_last_lr()[0]


def test_a_schedule_and_its_learning_rate_at_any_number_of_ranks_and_micro_steps(
    ranks: Ranks, tmp_path: Path
) -> None:
    seen = []
    for number, (world_size, accumulate) in enumerate([(1, 1), (1, 4), (2, 2)]):
        folder = tmp_path / str(number)
        args = str(folder), accumulate
        steps, per_epoch, last = (
            ranks(schedule, world_size, *args)[0] if world_size > 1 else schedule(*args)
        )
        assert (steps, per_epoch) == (6, 3)
        assert last < 1e-5  # the schedule is at its end
        seen.append(
            [
                (line["step"], line["lr"], line["train/lr"], line["lr_psnr"])
                for line in lines_of(folder)
            ]
        )
    assert len(seen[0]) == 6
    for others in seen[1:]:
        assert [line[:3] for line in others] == [line[:3] for line in seen[0]]
        assert [line[3] for line in others] == pytest.approx([line[3] for line in seen[0]])


def log_on_one_rank(folder: str) -> None:
    with quiet(folder=folder) as run:
        for _ in run.steps(range(40)):
            if run.rank == 0:
                run.log(mine=7.0)
            if run.step >= 20:
                run.log(ours=run.rank)


def test_a_log_on_rank_zero_alone_neither_hangs_nor_is_lost(ranks: Ranks, tmp_path: Path) -> None:
    ranks(log_on_one_rank, 2, str(tmp_path))
    lines = lines_of(tmp_path)
    assert sorted({line["step"] for line in lines if line.get("mine") == 7.0}) == list(range(1, 41))


def test_values_are_unchanged_and_nan_is_valid_json(tmp_path: Path) -> None:
    with quiet(folder=tmp_path, on_nonfinite="ignore") as run:
        running = torch.zeros(())
        for step in run.steps(range(5)):
            running += step
            run.log(
                **{
                    "running": running,
                    "odd": float("nan") if step == 2 else 1.0,
                    'a "name"/b': True,
                }
            )
    lines = lines_of(tmp_path)
    assert [line["running"] for line in lines] == [0, 1, 3, 6, 10]
    assert [line["odd"] for line in lines] == [1.0, 1.0, "nan", 1.0, 1.0]
    assert all(line['a "name"/b'] == 1 for line in lines)


class Level(enum.IntEnum):
    HIGH = 3


def test_numbers_of_any_type_are_logged(tmp_path: Path) -> None:
    with quiet(folder=tmp_path) as run:
        for _ in run.steps(range(2)):
            run.log(
                flag=torch.tensor(True),
                array=numpy.ones((1, 1)),
                number=numpy.float32(0.5),
                text=numpy.str_("x"),
            )
            run.log(
                level=Level.HIGH, one=torch.ones(1, 1), yes=numpy.bool_(True), count=numpy.int64(2)
            )
    for line in lines_of(tmp_path):
        assert (line["flag"], line["array"], line["number"], line["text"]) == (1, 1, 0.5, "x")
        assert (line["level"], line["one"], line["yes"], line["count"]) == (3, 1, 1, 2)


REFUSED = [
    (torch.zeros(3), "a Tensor of shape (3,)"),
    (torch.tensor(1j), "a complex"),
    (numpy.zeros((2, 2)), "a ndarray of shape (2, 2)"),
    ([1], "a list"),
    (None, "a NoneType"),
]


def test_odd_values_and_reserved_names_are_refused_by_name(tmp_path: Path) -> None:
    with quiet(folder=tmp_path) as run:
        for value, what in REFUSED:
            with pytest.raises(UsageError, match=re.escape(f"run.log(bad=...) got {what}")):
                run.log(bad=value)
        for name in ("step", "epoch", "time", "seconds", "samples_per_second", "stragglers"):
            with pytest.raises(
                UsageError, match=re.escape(f"run.log({name}=...): Paceline itself writes")
            ):
                run.log(**{name: 1})
        run.log(fine=1)
    assert [line["fine"] for line in lines_of(tmp_path)] == [1]


def log_kinds(folder: str) -> None:
    with quiet(folder=folder) as run:
        for _ in run.steps(range(60)):
            run.log(phase="warm" if run.rank == 1 else 1, loss=float(run.rank))


def test_text_on_one_rank_and_a_number_on_another_is_not_reduced(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks(log_kinds, 2, str(tmp_path), timeout=30)
    assert [(line["phase"], line["loss"]) for line in lines_of(tmp_path)] == [(1, 0)] * 60


class Lines:
    """Collects what is written."""

    def __init__(self) -> None:
        self.text = ""

    def append(self, text: str) -> None:
        self.text += text

    def steps(self) -> list[int]:
        return [json.loads(line)["step"] for line in self.text.splitlines()]


@pytest.mark.parametrize("fails", [False, True])
def test_numbers_that_the_device_still_computes_are_written_later_and_in_order(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PendingScalars, "is_on_its_way", True)
    lines, own = Lines(), Lines()
    metrics = Metrics(cast(Any, lines), group=None, rank=0, own=[own])
    for step in (1, 2):
        metrics.log_copies(step, 0, 1.0, {"loss": torch.tensor(0.5 * step)})
        metrics.offer()
        metrics.advance()
        assert lines.steps() == own.steps() == list(range(1, step))  # the step before
    metrics.log(3, 0, 1.0, {"loss": 0.25})
    if fails:
        metrics.finish_alone()
    else:
        metrics.offer()
        metrics.advance()  # as at a save, and at the end
    assert lines.steps() == own.steps() == [1, 2, 3]
    assert [json.loads(line)["loss"] for line in lines.text.splitlines()] == [0.5, 1.0, 0.25]


def test_logged_values_are_written_after_an_error(tmp_path: Path) -> None:
    def training() -> None:
        with quiet(folder=tmp_path) as run:
            for step in run.steps(range(10)):
                run.log(number=step, inverse=1 / (4 - step))

    with pytest.raises(ZeroDivisionError):
        training()
    assert [line["number"] for line in lines_of(tmp_path)] == [0, 1, 2, 3]


# Rank 1 fails after step 20, which all have logged. Rank 0 computes then.
FAILING = """
import time
import torch.distributed as dist
import paceline
with paceline.session(progress=False, report=False) as run:
    for step in run.steps(range(100)):
        run.log(number=step)
        if run.step == 19:  # done before this one
            dist.barrier()
            if run.rank == 1:
                raise ValueError("the data is empty")
            time.sleep(60)
"""


def test_the_last_steps_are_written_if_another_rank_fails(
    paceline: Callable[..., Any], scratch: Path, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(FAILING)
    done = paceline("run", "--nproc", "3", "--cpu", "--max-restarts", "0", "train.py")
    assert "rank 1 of 3" in done.stderr, f"{done.stdout}\n{done.stderr}"
    [metrics] = scratch.glob("*/*/*/metrics.jsonl")
    lines = lines_of(metrics.parent)
    assert [line["number"] for line in lines] == list(range(20)), done.stderr
    assert lines[-1]["of"] == "rank 0"
    assert all(("seconds" in line) != ("of" in line) for line in lines), (
        "rank 0 knows only its own speed"
    )


def test_the_bar_counts_epochs_as_the_loop_does(monkeypatch: pytest.MonkeyPatch) -> None:
    console = StringIO()
    monkeypatch.setattr(console, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", console)
    bar = ProgressBar(True)
    bar.begin(epoch=0, done=0, total=3)
    bar.close()
    assert "epoch 0" in console.getvalue()
