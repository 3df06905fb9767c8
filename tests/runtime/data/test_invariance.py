"""World-size invariance: with the same global batch, each step's loss is the same on 1, 2 and 4 ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import paceline
from paceline.runtime.data.sample_assignment import MicroBatch
from tests.forked_ranks import Ranks
from tests.runtime.data.datasets import Noisy

QUIET: dict[str, Any] = {"seed": 3, "cpu": True, "report": False, "progress": False}


def net(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)


def record(loader: Any) -> list[MicroBatch]:
    """Record the micro-batches that the loop takes, with their real counts."""
    taken: list[MicroBatch] = []
    original = loader.micro_batches

    def micro_batches(*args: Any) -> Iterator[MicroBatch]:
        for micro in original(*args):
            taken.append(micro)
            yield micro

    loader.micro_batches = micro_batches
    return taken


def losses_of_a_rank(
    *, steps: int, accumulate: int, drop_last: bool, workers: int, single: bool, weighted: bool
) -> list[float]:
    """Train with scheduler and EMA; return the mean loss of each global batch over all ranks."""
    dtype = torch.float32 if single else torch.float64
    found: list[float] = []
    with paceline.session(**QUIET) as run:
        model = run.wrap(net(dtype))
        opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        loader = run.loader(
            Noisy(157, dtype=dtype),
            batch_size=16,
            accumulate=accumulate,
            drop_last=drop_last,
            num_workers=workers,
        )
        taken = record(loader)
        total, seen, held = torch.zeros(2, dtype=torch.float64), 0, 0.0
        for _ in run.epochs(100):
            for x, y in run.steps(loader, max_steps=steps - run.step):
                out = model(x)
                loss = cross_entropy(out, y, reduction="sum" if weighted else "mean")
                run.backward(loss, weight=len(y)) if weighted else run.backward(loss)
                micro = taken[-1]
                mean = loss.item() / (len(y) if weighted else 1)
                total += torch.tensor([mean * micro.count, micro.count], dtype=torch.float64)
                if run.update(opt):
                    sched.step()
                    ema.update_parameters(model)
                    both = run.sum(total)
                    found.append((both[0] / both[1]).item())
                    assert both[1] == micro.global_count
                    total.zero_()
            if run.step >= steps:
                break
        weights = [each.detach().double().abs().sum().item() for each in ema.module.parameters()]
        seen, held = len(found), sum(weights)
    assert seen == steps
    return [*found, held]


CASES: dict[str, dict[str, Any]] = {
    "plain": {"accumulate": 1, "drop_last": True, "workers": 0, "weighted": False},
    "tail, accumulated": {"accumulate": 2, "drop_last": False, "workers": 0, "weighted": False},
    "tail, sums, workers": {"accumulate": 2, "drop_last": False, "workers": 2, "weighted": True},
}


def run_case(steps: int, single: bool, case: dict[str, Any]) -> list[float]:
    return losses_of_a_rank(steps=steps, single=single, **case)


@pytest.fixture(scope="module")
def reference(ranks: Ranks) -> dict[bool, list[float]]:
    """One rank, one micro-step, no worker; with and without the tail."""
    return {
        drop_last: ranks(run_case, 1, 100, False, {**CASES["plain"], "drop_last": drop_last})[0]
        for drop_last in (True, False)
    }


@pytest.mark.parametrize(
    ("world_size", "name"),
    [
        (2, "plain"),
        pytest.param(4, "plain", marks=pytest.mark.slow),
        (1, "tail, accumulated"),
        pytest.param(2, "tail, accumulated", marks=pytest.mark.slow),
        pytest.param(4, "tail, accumulated", marks=pytest.mark.slow),
        (2, "tail, sums, workers"),
    ],
)
def test_float64_agrees_over_100_steps(
    ranks: Ranks, reference: dict[bool, list[float]], world_size: int, name: str
) -> None:
    case = CASES[name]
    expected = reference[case["drop_last"]]
    assert expected[0] > 1.2 * expected[99], "the model must learn, or equal losses mean nothing"
    for found in ranks(run_case, world_size, 100, False, case):
        assert found == pytest.approx(expected, abs=1e-10)


def test_float32_agrees_over_20_steps(ranks: Ranks) -> None:
    case = CASES["tail, accumulated"]
    (expected,) = ranks(run_case, 1, 20, True, case)
    for world_size in (2, 4):
        for found in ranks(run_case, world_size, 20, True, case):
            assert found[:20] == pytest.approx(expected[:20], abs=1e-5)


def gan_rank() -> list[float]:
    """Two networks, two optimizers, two updates a step; each network also gets gradients from the other's loss."""
    found: list[float] = []
    with paceline.session(**QUIET) as run:
        maker = run.wrap(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6)).double())
        judge = run.wrap(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1)).double())
        opt_m = torch.optim.SGD(maker.parameters(), lr=0.1)
        opt_j = torch.optim.SGD(judge.parameters(), lr=0.1)
        loader = run.loader(Noisy(61), batch_size=8, accumulate=2, drop_last=False)
        score = nn.functional.binary_cross_entropy_with_logits
        for _ in run.epochs(3):
            for x, _ in run.steps(loader):
                real, fake = judge(x), judge(maker(x).detach())
                judged = score(real, torch.ones_like(real)) + score(fake, torch.zeros_like(fake))
                run.backward(judged)
                run.update(opt_j)
                fooled = judge(maker(x))
                made = score(fooled, torch.ones_like(fooled))
                run.backward(made)
                if run.update(opt_m):
                    found.append(
                        sum(
                            p.detach().abs().sum().item()
                            for m in (maker, judge)
                            for p in m.parameters()
                        )
                    )
    return found


def test_a_gan_trains_the_same_at_every_world_size(ranks: Ranks) -> None:
    (expected,) = ranks(gan_rank, 1)
    assert len(expected) == 24
    assert abs(expected[-1] - expected[0]) > 1e-2
    for world_size in (2, 4):
        for found in ranks(gan_rank, world_size):
            assert found == pytest.approx(expected, abs=1e-10)
