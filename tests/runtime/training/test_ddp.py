"""Replicas stay equal, however a script computes its losses: they train as one process with the mean loss does."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from paceline.errors import UsageError
from paceline.runtime.training.ddp import REBUILD_AFTER, agree_on_used
from tests.forked_ranks import Ranks
from tests.runtime.models import assert_close, data, net, weights
from tests.runtime.training.test_wrap import quiet

WORLD = 2


class Branches(nn.Module):
    """A trunk and two branches. Each can be used without the others."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.trunk(x))
        out: torch.Tensor = self.left(hidden) * self.right(hidden)
        return out

    def part(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """A loss of one part alone, which does not come by way of `forward`."""
        out: torch.Tensor = (getattr(self, name)(x) ** 2).mean()
        return out


def branches() -> Branches:
    torch.manual_seed(0)
    return Branches().double()


# of a rank: each gets its own backward
Losses = Callable[[Any, torch.Tensor, int], list[torch.Tensor]]
UPDATE = "update"


def whole(model: Any, x: torch.Tensor, rank: int) -> list[torch.Tensor]:
    return [(model(x) ** 2).mean()]


def own_branch(model: Any, x: torch.Tensor, rank: int) -> list[torch.Tensor]:
    return [model.part(("left", "right")[rank], x)]


def rank_zero_only(model: Any, x: torch.Tensor, rank: int) -> list[torch.Tensor]:
    return [model.part("trunk", x)] if rank == 0 else []


def two_forwards(model: Any, x: torch.Tensor, rank: int) -> list[torch.Tensor]:
    return [(model(x) ** 2).mean(), (model(2 * x) ** 2).mean()]


def one_forward_for_two(model: Any, x: torch.Tensor, rank: int) -> list[torch.Tensor]:
    out = model(x)
    return [(out**2).mean(), out.mean()]


def sum_of_both(model: Any, x: torch.Tensor, rank: int) -> list[torch.Tensor]:
    return [(model(x) ** 2).mean() + model.part("left", x)]


# What happens in each step.
SCENARIOS: dict[str, list[Losses | str]] = {
    "another branch on each rank": [own_branch, UPDATE],
    "a second update": [whole, UPDATE, own_branch, UPDATE],
    "a method after the forward": [whole, own_branch, UPDATE],
    "a method before the forward": [own_branch, whole, UPDATE],
    "a rank without a loss": [rank_zero_only, UPDATE],
    "a rank without a second loss": [whole, UPDATE, rank_zero_only, UPDATE],
    "an update without a loss": [whole, UPDATE, UPDATE],
    "two forwards, then two backwards": [two_forwards, UPDATE],
    "one forward, two backwards": [one_forward_for_two, UPDATE],
    "a sum of both": [sum_of_both, UPDATE],
}


def by_hand(events: list[Losses | str], steps: int = 4) -> list[float]:
    """Return what one process arrives at that has the data of all ranks."""
    model, x = branches(), data()[0]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for event in events * steps:
        if isinstance(event, str):
            optimizer.step()
            optimizer.zero_grad()
        else:
            losses = [
                loss / WORLD for rank in range(WORLD) for loss in event(model, x[rank::WORLD], rank)
            ]
            torch.stack(losses).sum().backward()
    return weights(model)


def by_run(plain: bool, names: list[str], **options: Any) -> dict[str, list[float]]:
    found = {}
    x = data()[0]
    with quiet() as run:
        for name in names:
            model = run.wrap(branches(), **options)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
            for event in SCENARIOS[name] * 4:
                if isinstance(event, str):
                    if plain:
                        optimizer.step()
                        optimizer.zero_grad()
                    else:
                        run.update(optimizer)
                    continue
                for loss in event(model, x[run.rank :: WORLD], run.rank):
                    if plain:
                        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
                    else:
                        run.backward(loss, retain_graph=True)
            found[name] = weights(model)
    return found


@pytest.mark.parametrize("plain", [False, True])
def test_every_gradient_is_averaged(ranks: Ranks, plain: bool) -> None:
    results = ranks(by_run, WORLD, plain, list(SCENARIOS))
    for name, events in SCENARIOS.items():
        for found in results:
            assert_close(found[name], by_hand(events))


NAMES = ["another branch on each rank", "a second update", "two forwards, then two backwards"]
OPTIONS: list[tuple[list[str], dict[str, Any]]] = [
    (NAMES, {"gradient_as_bucket_view": True}),
    (NAMES, {"find_unused_parameters": True}),
    (NAMES[:2], {"static_graph": True}),
]


def with_options() -> list[dict[str, list[float]]]:
    return [by_run(False, names, **options) for names, options in OPTIONS]


def test_so_it_is_with_options_of_ddp(ranks: Ranks) -> None:
    for results in ranks(with_options, WORLD):
        for found in results:
            for name, numbers in found.items():
                assert_close(numbers, by_hand(SCENARIOS[name]))


def last_micro_step_by_method(plain: bool) -> list[float]:
    x = data()[0]
    with quiet() as run:
        model = run.wrap(branches())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for micro in run.steps(range(8), accumulate=2):
            mine = x[run.rank :: run.world_size]
            loss = model.part("trunk", mine) if micro % 2 else (model(mine) ** 2).mean()
            run.backward(loss)
            if plain and micro % 2:
                optimizer.step()
                optimizer.zero_grad()
            elif not plain:
                assert run.update(optimizer) == bool(micro % 2)
        return weights(model)


@pytest.mark.parametrize("plain", [False, True])
def test_a_last_micro_step_by_a_method_counts_all_of_them(ranks: Ranks, plain: bool) -> None:
    for found in ranks(last_micro_step_by_method, WORLD, plain):
        assert_close(found, last_micro_step_by_method(plain))


def set_by_script(plain: bool) -> list[float]:
    """Two optimizers share a model. The script computes and sets the gradients of each itself."""
    x = data()[0]
    with quiet() as run:
        model = run.wrap(branches())
        parts = [[*model.trunk.parameters(), *model.left.parameters()], [*model.right.parameters()]]
        optimizers = [torch.optim.Adam(part, lr=0.05) for part in parts]
        for _ in range(3):
            for part, optimizer in zip(parts, optimizers, strict=True):
                loss = (model(x[run.rank :: run.world_size]) ** 2).mean()
                for parameter, grad in zip(part, torch.autograd.grad(loss, part), strict=True):
                    parameter.grad = grad
                if plain:
                    optimizer.step()
                    optimizer.zero_grad()
                else:
                    run.update(optimizer)
        return weights(model)


def set_by_script_in_both_ways() -> list[list[float]]:
    return [set_by_script(plain) for plain in (False, True)]


def test_gradients_that_the_script_sets_are_averaged_for_each_optimizer(ranks: Ranks) -> None:
    expected = set_by_script(True)
    for in_both_ways in ranks(set_by_script_in_both_ways, WORLD):
        for found in in_both_ways:
            assert_close(found, expected)


class Phases(nn.Module):
    """Has a real parameter and a complex one, which is used alone by one of the losses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.phase = nn.Parameter(torch.ones(4, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.scale * x * self.phase).sum(1).abs().mean()

    def square(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.phase * 1j - 1).abs().square().mean()


def complex_parameters() -> list[float]:
    with quiet() as run:
        model = run.wrap(Phases())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = data()[0][run.rank :: run.world_size]
        for _ in range(3):
            run.backward(model(x))
            run.backward(model.square(x))
            run.update(optimizer)
        numbers: list[float] = torch.view_as_real(model.phase.detach()).reshape(-1).tolist()
        return numbers


def test_gradients_of_complex_parameters_are_averaged(ranks: Ranks) -> None:
    expected = complex_parameters()
    for found in ranks(complex_parameters, WORLD):
        assert_close(found, expected)


def joined() -> str:
    with quiet() as run:
        model = run.wrap(branches())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            with run.join(model):
                run.backward(model.part("trunk", data()[0]))
                run.update(optimizer)
        except UsageError as error:
            return str(error)
        return "fine"


def test_losses_of_other_methods_cannot_be_joined(ranks: Ranks) -> None:
    assert all("Inside run.join" in message for message in ranks(joined, WORLD))


# -- freezing and unfreezing -----------------------------------------------------------------------------


def set_frozen(model: nn.Module, *names: str) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(names))


# Which layers are frozen in each phase; the first is the state at the wrap.
PHASES: dict[str, list[tuple[str, ...]]] = {
    "freeze the first layer": [(), ("trunk",), ()],
    "unfreeze": [("trunk", "left"), (), ("left",)],
    "all frozen at first": [("trunk", "left", "right"), ("left",), ()],
    "in turns": [(), *[("trunk",), ("left",)] * 4],
}
STEPS_PER_PHASE = 10  # enough to build DDP anew


def frozen_phases(name: str, how: str, compile: Any = False) -> list[float]:
    x = data()[0]
    with quiet() as run:
        model = branches()
        set_frozen(model, *PHASES[name][0])
        model = run.wrap(model, compile=compile)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        for frozen in PHASES[name]:
            set_frozen(model, *frozen)
            for _ in range(1 if name == "in turns" else STEPS_PER_PHASE):
                if len(frozen) == 3:
                    continue
                loss = (model(x[run.rank :: run.world_size]) ** 2).mean()
                if how == "plain":
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    optimizer.zero_grad()
                else:
                    run.backward(loss)
                    run.update(optimizer)
        return weights(model)


def all_frozen_phases() -> dict[tuple[str, str], list[float]]:
    return {(name, how): frozen_phases(name, how) for name in PHASES for how in ("plain", "run")}


def test_layers_may_be_frozen_and_unfrozen_after_the_wrap(ranks: Ranks) -> None:
    expected = all_frozen_phases()
    for found in ranks(all_frozen_phases, WORLD):
        for case, numbers in found.items():
            assert_close(numbers, expected[case])


def compiled_phases() -> list[float]:
    return frozen_phases("freeze the first layer", "run", compile={"backend": "eager"})


def test_compiled_layers_may_be_frozen_too(ranks: Ranks) -> None:
    expected = frozen_phases("freeze the first layer", "run")
    for found in ranks(compiled_phases, WORLD):
        assert_close(found, expected)


def frozen_for_the_last_backward() -> list[float]:
    """Train a branch by another loss first, then freeze it again for the loss that DDP averages."""
    x = data()[0]
    with quiet() as run:
        model = branches()
        set_frozen(model, "right")
        model = run.wrap(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        mine = x[run.rank :: run.world_size]
        for _ in range(3):
            set_frozen(model)
            run.backward(model.part("right", mine))
            set_frozen(model, "right")
            run.backward((model(mine) ** 2).mean())
            run.update(optimizer)
        return weights(model)


def test_gradients_from_before_a_freeze_are_averaged(ranks: Ranks) -> None:
    expected = frozen_for_the_last_backward()
    for found in ranks(frozen_for_the_last_backward, WORLD):
        assert_close(found, expected)


def rebuilds() -> tuple[list[int], bool]:
    """Return the identity of DDP after each step of a phase, and whether the first reducer is gone."""
    x = data()[0]
    with quiet() as run:
        model = run.wrap(branches())
        owner = run._wrapper.models[0]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        first, seen = weakref.ref(owner.ddp.reducer), []  # type: ignore[union-attr]
        set_frozen(model, "trunk")
        for _ in range(STEPS_PER_PHASE):
            run.backward((model(x) ** 2).mean())
            run.update(optimizer)
            seen.append(id(owner.ddp))  # type: ignore[union-attr]
        return [seen.index(each) for each in seen], first() is None


def test_ddp_is_built_anew_for_layers_that_stay_frozen(ranks: Ranks) -> None:
    for found, gone in ranks(rebuilds, WORLD):
        assert found == [0] * REBUILD_AFTER + [REBUILD_AFTER] * (STEPS_PER_PHASE - REBUILD_AFTER)
        assert gone


# -- what cannot work is refused -------------------------------------------------------------------------


def plain_accumulation(case: str) -> str:
    x, y = data()
    with quiet() as run:
        model = run.wrap(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            for micro in run.steps(range(4), accumulate=2):
                loss = ((model(x) - y) ** 2).mean()
                loss.backward()
                if case == "step" or (case == "last step" and micro % 2):
                    optimizer.step()
                elif case == "update":
                    run.update(optimizer)
        except UsageError as error:
            return str(error)
        return "nothing"


@pytest.mark.parametrize(
    ("case", "said"),
    [("step", "only accumulates"), ("last step", "scale losses"), ("update", "scale losses")],
)
def test_plain_calls_that_accumulation_would_falsify_are_errors(case: str, said: str) -> None:
    message = plain_accumulation(case)
    assert said in message
    assert "run.backward(loss)" in message


class Lazy(Branches):
    """Its forward leaves a branch out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.left(torch.tanh(self.trunk(x)))
        return out


def unused_branch(plain: bool) -> str:
    with quiet() as run:
        model = run.wrap(Lazy().double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            loss = model(data()[0]).mean()
            if plain:
                loss.backward()
                optimizer.step()
            else:
                run.backward(loss)
                run.update(optimizer)
        except UsageError as error:
            return str(error)
        return "fine"


def both_unused_branches() -> list[str]:
    return [unused_branch(plain) for plain in (False, True)]


def test_an_unused_parameter_is_named_before_the_step(ranks: Ranks) -> None:
    for plain_and_not in ranks(both_unused_branches, WORLD):
        for message in plain_and_not:
            assert "right.weight, right.bias of Lazy" in message
            assert "find_unused_parameters=True" in message


def disagreement() -> list[str]:
    messages = []
    with quiet() as run:
        model = run.wrap(nn.Embedding(3, 2, sparse=True))
        group = run._wrapper._control
        sparse = run.rank == 0
        for reductions, trainable in ((run.rank, b"1"), (0, b"%d" % run.rank), (0, b"1")):
            if sparse and trainable == b"1" and reductions == 0:
                model.weight.grad = torch.sparse_coo_tensor([[0]], [[1.0, 1.0]], (3, 2))
            with pytest.raises(UsageError) as error:
                agree_on_used(
                    [model.weight],
                    name="Embedding",
                    reductions=reductions,
                    trainable=trainable,
                    group=group,
                )
            messages.append(str(error.value))
    return messages


def test_ranks_that_differ_are_told_so(ranks: Ranks) -> None:
    for counts, patterns, sparse in ranks(disagreement, WORLD):
        assert "0 times on one rank, but 1 times on another" in counts
        assert "which parameters of Embedding require gradients" in patterns
        assert "sparse" in sparse


def after_the_session() -> tuple[bool, int]:
    x = data()[0]
    with quiet() as run:
        model = run.wrap(branches())
        before = model(x).detach()
    after = model(x)
    after.mean().backward()  # neither DDP nor its groups
    return torch.equal(before, after.detach()), len(_global_optimizer_pre_hooks)


def test_the_model_works_on_after_the_session(ranks: Ranks) -> None:
    assert ranks(after_the_session, WORLD) == [(True, 0)] * WORLD
