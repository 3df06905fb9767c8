"""`run.scale_lr`: factors by batch or by ranks, warm-up, schedulers and resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

from paceline.errors import UsageError
from tests.forked_ranks import Ranks
from tests.runtime.models import data, net, weights
from tests.runtime.training.test_wrap import quiet


def train(
    *,
    steps: int = 6,
    schedule: str = "",
    folder: Path | None = None,
    by_loader: bool = False,
    **scale: Any,
) -> tuple[list[float], list[float], list[float]]:
    """Return the rates that were used, those that the group has after each step, and the final weights."""
    x, y = data(64)
    used, left = [], []
    with quiet(seed=0, folder=folder, max_steps=steps) as run:
        model = run.wrap(net())
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        make = {
            "": lambda: lr_scheduler.ConstantLR(opt, 1.0, 1),
            "step": lambda: lr_scheduler.StepLR(opt, 2, gamma=0.5),
            "cosine": lambda: lr_scheduler.CosineAnnealingLR(opt, 10),
            "cycle": lambda: lr_scheduler.OneCycleLR(opt, 0.02, total_steps=10),
        }
        sched = make[schedule]()
        loader = run.loader(TensorDataset(x, y), batch_size=16)
        if scale:
            run.scale_lr(opt, **{**scale, **({"batch": loader} if by_loader else {})})
        opt.register_step_pre_hook(lambda opt, *_: used.append(opt.param_groups[0]["lr"]))
        run.resume(model=model, opt=opt, sched=sched)
        for _ in run.epochs(100):
            for a, b in run.steps(loader):
                run.backward(((model(a) - b) ** 2).mean())
                run.update(opt)
                sched.step()
                left.append(opt.param_groups[0]["lr"])
        return used, left, weights(model)


def test_the_factor_grows_from_the_unscaled_rate() -> None:
    used, left, _ = train(batch=64, reference=16, warmup=4)
    assert used == pytest.approx([0.01, 0.0175, 0.025, 0.0325, 0.04, 0.04])
    assert left == [0.01] * 6, "between steps, the rate is what the script knows"


def test_the_factor_may_come_from_a_loader_and_grow_as_a_square_root() -> None:
    assert train(by_loader=True, reference=4)[0] == pytest.approx([0.04] * 6)
    assert train(batch=64, reference=16, rule="sqrt")[0] == pytest.approx([0.02] * 6)
    assert train(batch=8, reference=16, warmup=3)[0] == pytest.approx([0.005] * 6), (
        "a smaller one needs no warm-up"
    )


@pytest.mark.parametrize("schedule", ["step", "cosine", "cycle"])
def test_schedulers_do_not_see_the_factor(schedule: str) -> None:
    plain, left, _ = train(schedule=schedule)
    used, same, _ = train(schedule=schedule, batch=32, reference=16, warmup=2)
    assert used == pytest.approx(
        [rate * factor for rate, factor in zip(plain, (1, 1.5, 2, 2, 2, 2), strict=True)]
    )
    assert same == left


def test_a_resume_goes_on_in_the_middle_of_the_warm_up(tmp_path: Path) -> None:
    scale = {"batch": 64, "reference": 16, "warmup": 5, "schedule": "cosine"}
    used, _, final = train(**scale)
    first, _, _ = train(steps=3, folder=tmp_path, **scale)
    rest, _, resumed = train(folder=tmp_path, **scale)
    assert (first + rest, resumed) == (used, final)


def by_ranks() -> list[float]:
    return train(steps=2, rule="linear")[0]


def test_without_a_reference_the_factor_is_the_number_of_ranks(ranks: Ranks) -> None:
    assert ranks(by_ranks, 2) == [[0.02, 0.02]] * 2


def test_the_object_says_which_rates_apply() -> None:
    with quiet() as run:
        opt = torch.optim.SGD(run.wrap(net()).parameters(), lr=0.1)
        scale = run.scale_lr(opt, batch=64, reference=32, warmup=10)
        assert (scale.factor, scale.now, scale.rates) == (2.0, 1.0, [0.1])


def test_an_error_in_a_step_leaves_no_factor_behind() -> None:
    with quiet() as run:
        model = run.wrap(net())
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        run.scale_lr(opt, batch=64, reference=16)

        def fail() -> None:
            raise ValueError

        for _ in range(2):
            with pytest.raises(ValueError):
                opt.step(fail)  # type: ignore[arg-type]
        opt.step()
        assert opt.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        ({"batch": 64}, "both batch and reference"),
        ({"rule": "cubic"}, "Unknown rule 'cubic'"),
        ({"warmup": -1}, "not a number of steps"),
        ({"warmup": 0.1}, "not a number of steps"),
    ],
)
def test_what_gives_no_factor_is_an_error(scale: dict[str, Any], message: str) -> None:
    with quiet() as run:
        opt = torch.optim.SGD(run.wrap(net()).parameters(), lr=0.1)
        with pytest.raises(UsageError, match=message):
            run.scale_lr(opt, **scale)


def test_an_optimizer_is_scaled_once_and_by_numbers() -> None:
    with quiet() as run:
        model = run.wrap(net())
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        run.scale_lr(opt)
        with pytest.raises(UsageError, match="already scaled"):
            run.scale_lr(opt)
        with pytest.raises(UsageError, match="not tensors"):
            run.scale_lr(torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1)))
