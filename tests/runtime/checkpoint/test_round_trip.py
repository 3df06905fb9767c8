"""Loaded state equals saved state, bit for bit, with any number of ranks."""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.contract.checkpoint import read_marker
from paceline.errors import CheckpointError, UsageError
from paceline.runtime.checkpoint import state_tree
from paceline.runtime.checkpoint.manager import CheckpointManager
from paceline.runtime.checkpoint.retention import RetentionPolicy
from tests.forked_ranks import Ranks
from tests.runtime.checkpoint.trainer import Holder, Trainer, draws, make


def job_start(folder: Path, first: int, last: int, attempt: int) -> dict[str, Any]:
    """Resume, train some steps, and save at each, waiting only for the last save."""
    trainer = Trainer(folder, seed=attempt, attempt=attempt)
    restored = trainer.checkpoints.restore()
    found = trainer.digest()
    loader = (trainer.loader.position, trainer.loader.rank, int(trainer.loader.noise[0]))
    next_draws = draws()
    for number in range(first, last + 1):
        trainer.step(number)
        trainer.checkpoints.save(number, epoch=1, meta={"tracker": "abc"}, wait=number == last)
        trainer.checkpoints.poll()
    expected_draws = draws() if restored is None else None
    result = {
        "restored": restored
        and (restored.step, restored.epoch, restored.meta, restored.world_size),
        "found": found,
        "digest": trainer.digest(),
        "warnings": trainer.warnings,
        "loader": loader,
        "draws": next_draws,
        "expected": expected_draws,
    }
    trainer.close()
    return result


def test_four_ranks_then_two_then_four(ranks: Ranks, tmp_path: Path) -> None:
    """Every job start continues from the one before it; the last ends where an uninterrupted run ends."""
    straight = ranks(job_start, 1, tmp_path / "straight", 1, 6, 1)[0]
    four = ranks(job_start, 4, tmp_path / "run", 1, 2, 1)
    sizes = {
        name: checksum.size
        for name, checksum in read_marker(tmp_path / "run/step-00000002").files.items()
        if name.endswith(".safetensors")
    }
    two = ranks(job_start, 2, tmp_path / "run", 3, 4, 2)
    again = ranks(job_start, 4, tmp_path / "run", 5, 6, 3)

    assert len({each["digest"] for each in four}) == 1
    for before, after, step, saved_by in ((four, two, 2, 4), (two, again, 4, 2)):
        for rank, each in enumerate(after):
            assert each["restored"] == (step, 1, {"tracker": "abc"}, saved_by)
            assert each["found"] == before[0]["digest"], rank
            assert each["loader"][0] == step
            assert not each["warnings"]
    assert {each["digest"] for each in again} == {straight["digest"]}
    # Each byte is written once: the four shares together are no larger than the state, and about equal.
    state = sum(
        path.stat().st_size for path in (tmp_path / "straight/step-00000006").glob("*.safetensors")
    )
    assert len(sizes) == 4
    assert sum(sizes.values()) < state * 1.05
    assert max(sizes.values()) < state / 4 + 10_000
    # With another number of ranks, each rank gets a new state of its generators.
    assert len({each["draws"] for each in [*two, *again]}) == 6


def test_every_rank_gets_its_own_state_back(ranks: Ranks, tmp_path: Path) -> None:
    """With the same number of ranks, generators and loaders continue where they were."""
    before = ranks(job_start, 2, tmp_path, 1, 2, 1)
    after = ranks(job_start, 2, tmp_path, 3, 3, 2)
    for rank, (first, second) in enumerate(zip(before, after, strict=True)):
        assert second["loader"] == (2, rank, 2 * (rank + 1))
        assert second["draws"] == first["expected"]


ODD_STATE = {
    "nothing": None,
    "flag": True,
    "many": 10**30,
    "small": 1e-308,
    "not finite": [float("inf"), -0.0],
    "pair": (1, ("a", 2.5)),
    "set": {1, 2},
    "bytes": b"\x00\xff",
    "complex": 1 + 2j,
    7: "int key",
    "7": "str key",
    (1, 2): "tuple key",
    "$odd": {"$tensor": 1},
    "counter": collections.Counter([3, 3, 4]),
    "empty": {},
    "": "",
    "size": torch.Size([2, 3]),
    "dtype": torch.bfloat16,
    "device": torch.device("cpu"),
    "list": [[], [1]],
}


@pytest.mark.parametrize("with_tensor", [True, False])
def test_python_values_round_trip(tmp_path: Path, with_tensor: bool) -> None:
    """Both with tensors (in objects.json) and without (in each rank's own file)."""
    numpy = pytest.importorskip("numpy")
    state = {**ODD_STATE, "float": numpy.float32(0.1), "array": numpy.arange(6).reshape(2, 3)}
    if with_tensor:
        state["tensor"] = torch.arange(3.0)
    saver = CheckpointManager(tmp_path)
    saver.register(it=Holder(state=state))
    saver.save(1, wait=True)
    found = Holder()
    loader = CheckpointManager(tmp_path)
    loader.register(it=found)
    assert loader.restore() is not None
    value = found.state["state"]
    array, tensor = value.pop("array"), value.pop("tensor", None)
    assert (array == state.pop("array")).all()
    assert tensor is None or torch.equal(tensor, state.pop("tensor"))
    assert value == state
    assert repr(value["not finite"]) == "[inf, -0.0]"
    assert type(value["float"]) is numpy.float32
    assert type(value["counter"]) is collections.Counter


def test_a_state_that_cannot_be_saved_is_named_at_registration(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path)
    with pytest.raises(CheckpointError, match=r"it/state/1/deep is a builtins.object"):
        checkpoints.register(it=Holder(state=[1, {"deep": object()}]))
    with pytest.raises(CheckpointError, match="sparse"):
        checkpoints.register(it=Holder(state=torch.eye(3).to_sparse()))
    with pytest.raises(UsageError, match="has no state_dict"):
        checkpoints.register(it=3)


def test_every_dtype_and_stride(tmp_path: Path) -> None:
    tensors = {
        short: torch.arange(6).reshape(2, 3).to(dtype)
        for short, dtype in state_tree.TORCH_DTYPES.items()
    }
    tensors |= {
        "transposed": torch.randn(5, 7).t(),
        "number": torch.tensor(3.5),
        "step": torch.randn(9)[::2],
    }
    saver = CheckpointManager(tmp_path)
    saver.register(it=Holder(**tensors))
    saver.save(1, wait=True)
    assert saver.poll()[0].error is None
    found = Holder()
    loader = CheckpointManager(tmp_path)
    loader.register(it=found)
    loader.restore()
    for name, tensor in tensors.items():
        assert found.state[name].dtype == tensor.dtype
        assert torch.equal(found.state[name].to(torch.complex128), tensor.to(torch.complex128)), (
            name
        )


def test_thousands_of_tensors_with_tied_ones(tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.ParameterList([nn.Parameter(torch.randn(7, 3)) for _ in range(2000)])
        model.append(model[0])
        return model, torch.optim.Adam(model.parameters())

    model, optimizer = build()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    saver = CheckpointManager(tmp_path)
    saver.register(model=model, opt=optimizer)
    saver.save(1, wait=True)
    names = list(json.loads((tmp_path / "step-00000001/objects.json").read_text())["model"])
    assert len(names) == 2001
    other, other_optimizer = build()
    loader = CheckpointManager(tmp_path)
    loader.register(model=other, opt=other_optimizer)
    loader.restore()
    assert other[0] is other[2000]
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        for key, value in optimizer.state[mine].items():
            assert torch.equal(value, other_optimizer.state[theirs][key])


@pytest.mark.parametrize("per_rank", [(), ("it",)])
def test_views_and_paths_that_look_the_same(tmp_path: Path, per_rank: tuple[str, ...]) -> None:
    z = torch.randn(3, dtype=torch.complex64)
    same = torch.ones(2)
    state = {
        "z": z,
        "conjugate": z.conj(),
        "negative": z.conj().imag,
        "a": {"b": torch.zeros(2)},
        "a/b": same,
        "tied": same,
    }
    manager = CheckpointManager(tmp_path)
    manager.declare(per_rank=per_rank)
    manager.register(it=Holder(**state))
    manager.save(1, wait=True)
    manager.close()
    loaded, manager = Holder(), CheckpointManager(tmp_path)
    manager.declare(per_rank=per_rank)
    manager.register(it=loaded)
    manager.restore()
    manager.close()
    found = {**loaded.state, "b": loaded.state["a"]["b"]}
    for name, expected in {**state, "b": state["a"]["b"]}.items():
        if name != "a":
            assert torch.equal(found[name], expected.resolve_conj().resolve_neg()), name


def test_the_copy_is_taken_when_save_returns(tmp_path: Path) -> None:
    """Changes after the save don't reach the file, not at the second save either."""
    model = nn.Linear(400, 400)
    checkpoints = CheckpointManager(tmp_path)
    checkpoints.register(model=model)
    for step in (1, 2, 3):
        with torch.no_grad():
            model.weight.fill_(step)
        checkpoints.save(step)
        with torch.no_grad():
            model.weight.fill_(-1)
        assert checkpoints.save(step, wait=True) >= 0
        checkpoints.restore()
        assert model.weight.unique().tolist() == [step]


def test_state_that_grows_gets_new_memory(tmp_path: Path) -> None:
    holder = Holder(it=[torch.ones(3)])
    checkpoints = CheckpointManager(tmp_path)
    checkpoints.register(it=holder)
    for step, state in enumerate(
        ([torch.ones(3)], [torch.ones(5), torch.zeros(2)], [torch.ones(5).double()]), 1
    ):
        holder.state = {"it": state}
        checkpoints.poll()
        checkpoints.save(step, wait=True)
        checkpoints.restore()
        assert [each.tolist() for each in holder.state["it"]] == [each.tolist() for each in state]


def test_starting_from_another_run(tmp_path: Path) -> None:
    """From a run folder, its checkpoints folder or one checkpoint; the run's own checkpoints come first."""
    other = tmp_path / "other"
    make(other / "checkpoints", 1, 2)
    for given, step in (
        (other, 2),
        (other / "checkpoints", 2),
        (other / "checkpoints/step-00000001", 1),
    ):
        trainer = Trainer(tmp_path / f"new-{step}-{given.name}", seed=9)
        restored = trainer.checkpoints.restore(given)
        assert restored is not None
        assert (restored.step, restored.own) == (step, False)
        # This run has no checkpoint of that step yet, so it is saved here.
        trainer.checkpoints.save(step, wait=True)
        restored = trainer.checkpoints.restore(given)
        assert restored is not None
        assert restored.own
        trainer.close()
    with pytest.raises(CheckpointError, match="no complete checkpoint at"):
        Trainer(tmp_path / "fresh").checkpoints.restore(tmp_path / "nowhere")


def test_a_channels_last_model_keeps_its_memory_format(tmp_path: Path) -> None:
    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 64, 3))
        model = layers.to(memory_format=torch.channels_last)
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        return model, optimizer

    saved, restored = build(1), build(2)
    for (model, optimizer), attempt in ((saved, 1), (restored, 2)):
        checkpoints = CheckpointManager(
            tmp_path, rank=0, world_size=1, group=None, attempt=attempt, policy=RetentionPolicy()
        )
        checkpoints.register(model=model, optimizer=optimizer)
        if attempt == 1:
            checkpoints.save(1, epoch=0, meta={}, wait=True)
        else:
            assert checkpoints.restore() is not None
        checkpoints.close()
    for mine, other in zip(saved[0].parameters(), restored[0].parameters(), strict=True):
        assert mine.equal(other)
        assert mine.stride() == other.stride()
        for name, value in saved[1].state[mine].items():
            assert value.equal(restored[1].state[other][name]), name
