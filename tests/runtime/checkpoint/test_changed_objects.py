"""Objects that are not what they were when they were saved: what their `load_state_dict` accepts is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline.errors import CheckpointError
from paceline.runtime.checkpoint.manager import CheckpointManager
from tests.runtime.checkpoint.trainer import Holder
from tests.runtime.training.test_wrap import quiet


def save(folder: Path, **objects: Any) -> None:
    checkpoints = CheckpointManager(folder)
    checkpoints.register(**objects)
    checkpoints.save(1, wait=True)
    assert checkpoints.close()[0].error is None


def load(folder: Path, *, strict: bool = True, **objects: Any) -> list[str]:
    """Resume the objects and return the warnings."""
    warnings: list[str] = []
    checkpoints = CheckpointManager(folder, warn=warnings.append)
    checkpoints.register(**objects)
    try:
        assert checkpoints.restore(strict=strict) is not None
    finally:
        checkpoints.close()
    return warnings


@pytest.mark.parametrize(
    "start",
    [
        {"a": torch.zeros(2)},
        {"a": torch.zeros(2), "b": None},
        {"a": torch.zeros(5), "b": torch.zeros(1)},
        {"c": 1},
        {},
    ],
)
def test_state_that_appears_later(tmp_path: Path, start: dict[str, Any]) -> None:
    save(tmp_path, it=Holder(a=torch.ones(2), b=torch.full((3,), 7.0)))
    fresh = Holder(**start)
    assert load(tmp_path, it=fresh) == []
    assert {key: value.tolist() for key, value in fresh.state.items()} == {
        "a": [1, 1],
        "b": [7, 7, 7],
    }


def test_a_lazy_module(tmp_path: Path) -> None:
    """Saved before and after its first forward, resumed before it."""
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    save(tmp_path / "before", model=model)
    model(torch.randn(4, 5))
    save(tmp_path / "after", model=model)
    fresh = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    load(tmp_path / "before", model=fresh)
    load(tmp_path / "after", model=fresh)
    assert torch.equal(fresh[0].weight, model[0].weight)
    assert torch.equal(fresh[1].running_mean, model[1].running_mean)


class Renamed(nn.Module):
    """What was called `body` is now `trunk`: a hook renames the keys of older states."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(2, 2)
        self.register_load_state_dict_pre_hook(self.rename)

    @staticmethod
    def rename(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for key in [key for key in state if key.startswith(f"{prefix}body.")]:
            state[key.replace("body.", "trunk.")] = state.pop(key)


class Versioned(nn.Module):
    """The first version stored half of the scale."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(8.0))

    def _load_from_state_dict(
        self, state: Any, prefix: str, metadata: dict[str, Any], *rest: Any
    ) -> None:
        if (metadata.get("version") or 1) < 2:
            state[f"{prefix}scale"] = state[f"{prefix}scale"] * 2
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def test_modules_that_translate_their_state(tmp_path: Path) -> None:
    old = nn.Module()
    old.body = nn.Linear(2, 2)
    save(tmp_path, model=old, versioned=Versioned())
    new, versioned = Renamed(), Versioned()
    nn.init.zeros_(versioned.scale)
    assert load(tmp_path, model=new, versioned=versioned) == []
    assert torch.equal(new.trunk.weight, old.body.weight)
    assert versioned.scale.item() == 8.0
    new.more = nn.Linear(1, 1)
    with pytest.raises(
        CheckpointError, match=r"(?s)doesn't fit 'model': .*Missing key.*more.weight"
    ):
        load(tmp_path, model=new, versioned=versioned)


def test_without_strict_what_fits_is_loaded(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    opt = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    opt.step()
    save(tmp_path, model=model, opt=opt, other=Holder(a=1))
    new = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    for objects in (
        {"model": new},
        {"model": model, "ema": nn.Linear(1, 1), "opt": opt, "another": Holder()},
    ):
        with pytest.raises(CheckpointError) as error:
            load(tmp_path, **objects)
        assert "strict=False" in str(error.value.hint)
    optimizer = torch.optim.Adam(new.parameters())
    warnings = load(tmp_path, strict=False, model=new, opt=optimizer, another=Holder(a=2))
    assert torch.equal(new[0].weight, model[0].weight)
    assert torch.equal(
        optimizer.state[new[0].weight]["exp_avg"], opt.state[model[0].weight]["exp_avg"]
    )
    assert new[1].weight not in optimizer.state
    new(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert warnings == [
        "not loaded: 'another' (step-00000001 has no state of that name)",
        "not resumed: 'other' (step-00000001 has a state that run.resume does not ask for)",
        "'model' is loaded only partially; wrong shape: '1.weight', '1.bias'",
        "'opt' is loaded only partially; 2 of 4 parameters have a different shape",
    ]
    sgd = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.5)
    warnings = load(tmp_path, strict=False, opt=sgd, model=model, other=Holder())
    assert warnings[0].startswith(
        "not loaded: 'opt' (The checkpoint doesn't fit 'opt': ValueError: loaded state"
    )
    assert sgd.param_groups[0]["lr"] == 0.5


def test_a_new_object_starts_as_it_is_and_a_renamed_one_is_an_error(tmp_path: Path) -> None:
    save(tmp_path, model=nn.Linear(1, 1), history=Holder(a=1))
    (warning,) = load(tmp_path, model=nn.Linear(1, 1), history=Holder(), ema=nn.Linear(1, 1))
    assert warning == "not loaded: 'ema' (step-00000001 has no state of that name)"
    with pytest.raises(CheckpointError, match="has state for 'model', but not for 'net'"):
        load(tmp_path, net=nn.Linear(1, 1), history=Holder())


# -- runs ------------------------------------------------------------------------------------------------


def train(
    folder: Path, *, batch_size: int, epochs: int, loaders: int = 1, **settings: Any
) -> list[int]:
    """Return the first step, the steps of each epoch, and the last step."""
    data = TensorDataset(torch.arange(32.0).reshape(32, 1))
    model = nn.Linear(1, 1)
    with quiet(folder=folder, seed=0, **settings) as run:
        made = [run.loader(data, batch_size=batch_size) for _ in range(loaders)]
        run.resume(model=model)
        seen = [run.step]
        for _ in run.epochs(epochs):
            seen.append(sum(1 for _ in run.steps(made[0])))
        return [*seen, run.step]


def test_starting_from_a_finished_run_with_another_batch_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "a", batch_size=8, epochs=2) == [0, 4, 4, 8]
    assert train(
        tmp_path / "b", batch_size=16, epochs=4, start_from=str(tmp_path / "a"), start_continue=True
    ) == [8, 2, 2, 12]
    assert "starting at step 8 and epoch 2 from" in capsys.readouterr().err
    assert train(tmp_path / "c", batch_size=8, epochs=2, max_steps=6) == [0, 4, 2, 6]
    assert train(
        tmp_path / "d", batch_size=16, epochs=2, start_from=str(tmp_path / "c"), start_continue=True
    ) == [6, 2, 8]
    assert (
        "not loaded: 'loader_0' (The checkpoint is in the middle of an epoch"
        in capsys.readouterr().err
    )


def test_a_loader_that_is_added_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path, batch_size=8, epochs=2, max_steps=6) == [0, 4, 2, 6]
    assert train(tmp_path, batch_size=8, epochs=2, loaders=2) == [6, 2, 8]
    assert "not loaded: 'loader_1'" in capsys.readouterr().err
