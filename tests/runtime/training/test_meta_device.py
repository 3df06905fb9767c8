"""A model built on the meta device gets the same values on any number of ranks; an error names what gets none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import UsageError
from tests.forked_ranks import Ranks
from tests.runtime.distributed.test_mesh import TENSOR, Blocks, split
from tests.runtime.models import assert_close
from tests.runtime.training.test_wrap import quiet


class Positions(nn.Module):
    """A parameter and two tables of its own, which only a method of its own initializes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("table", torch.arange(6.0).cos())
        self.register_buffer("mask", torch.ones(6, dtype=torch.bool), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.table * self.mask  # type: ignore[no-any-return,operator]


class Initialized(Positions):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale)
        self.table = torch.arange(6.0).cos()  # assigned, not written in place
        self.mask.fill_(True)  # type: ignore[operator]


class Attention(nn.Module):
    """Its reset_parameters also writes to children, and one of its parameters has two names."""

    def __init__(self, positions: type[Positions] = Initialized) -> None:
        super().__init__()
        self.positions = positions()
        self.attention = nn.MultiheadAttention(6, 2)
        self.inner = Blocks()
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.attention.out_proj.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.positions(x)
        x = x + self.attention(x, x, x)[0]
        return self.inner(self.tied(x))  # type: ignore[no-any-return]


def small(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.weight.data.mul_(0.5)
    elif isinstance(module, Blocks):
        module.seen.zero_()  # type: ignore[operator]


def build(mode: str, mesh: dict[str, int] | None = None) -> dict[str, Any]:
    with quiet(seed=3) as run:
        torch.rand(run.rank + 1)  # ranks may have drawn different random numbers
        with torch.device("meta"):
            model = Attention()
        parallelize = (lambda model, tensor: split(model.inner, tensor)) if mesh else None
        model = run.wrap(model, mode=mode, mesh=mesh, parallelize=parallelize, init=small)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = {
            name: value.full_tensor() if hasattr(value, "full_tensor") else value
            for name, value in model.state_dict().items()
        }
        start = {name: value.double().flatten().tolist() for name, value in state.items()}
        assert model.tied.weight is model.attention.out_proj.weight
        run.backward(model(torch.ones(3, 6)).sum())
        run.update(optimizer)
        end = model.attention.out_proj.weight
        whole = end.full_tensor() if hasattr(end, "full_tensor") else end
        return {"start": start, "end": whole.detach().double().flatten().tolist()}


def build_all() -> list[dict[str, Any]]:
    torch.use_deterministic_algorithms(True)  # new memory is full of NaN
    return [build("fsdp", TENSOR), build("ddp")]


def test_values_are_the_same_on_any_number_of_ranks(ranks: Ranks) -> None:
    expected = build("fsdp")
    start = expected["start"]
    # written by its parent, after its own reset
    assert start["attention.out_proj.bias"] == [0.0] * 6
    assert start["positions.table"] == pytest.approx(torch.arange(6.0).cos().tolist())
    limit = 0.5 * 6**-0.5
    assert 0.5 * limit < max(start["inner.blocks.0.up.weight"]) <= limit  # halved by `init`
    assert start["inner.blocks.0.up.weight"] != start["inner.blocks.1.up.weight"]
    for found in [build("none"), *(each for results in ranks(build_all, 4) for each in results)]:
        assert found["start"] == start
        assert_close(found["end"], expected["end"], atol=1e-6)


def failures() -> dict[str, str]:
    """Errors of sharded models, which are initialized block by block."""
    found = {}
    with quiet() as run:
        for name, kind in (("missing", Missing), ("nosy", Nosy)):
            with torch.device("meta"):
                model = kind()
            with pytest.raises(UsageError) as error:
                run.wrap(model, mode="fsdp")
            found[name] = str(error.value)
    return found


class Missing(Attention):
    def __init__(self) -> None:
        super().__init__(Positions)


class Nosy(Blocks):
    def reset_parameters(self) -> None:
        self.seen.zero_()  # type: ignore[operator]
        for parameter in self.parameters():
            parameter.data.normal_()


def test_nothing_stays_without_values(ranks: Ranks) -> None:
    for found in ranks(failures, 2):
        assert (
            "nothing initializes positions.scale, positions.table, positions.mask, inner.seen."
            in found["missing"]
        )
        assert "another module changes blocks.0.norm.weight" in found["nosy"]
    for mode in ("none", "fsdp"):
        with (
            quiet() as run,
            torch.device("meta"),
            pytest.raises(UsageError, match=r"initializes scale, table, mask\."),
        ):
            run.wrap(Positions(), mode=mode)


def test_init_is_for_models_without_values() -> None:
    with quiet() as run, pytest.raises(UsageError, match="already has values"):
        run.wrap(Positions(), init=small)
