"""State that differs between ranks: each rank saves its own, and none gets another's in silence."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.contract.checkpoint import read_marker
from paceline.errors import CheckpointError, UsageError
from paceline.runtime.checkpoint.manager import CheckpointManager
from tests.forked_ranks import Ranks
from tests.runtime.checkpoint.trainer import Holder
from tests.runtime.models import net
from tests.runtime.training.test_wrap import quiet

LARGE = 40_000  # elements: too many for the JSON


class Mergeable(Holder):
    def load_rank_states(self, states: list[dict[str, Any]]) -> None:
        self.state = {
            "items": torch.stack([state["items"][0] for state in states]),
            "size": len(states),
        }


def job_start(
    folder: str, declared: bool, buffer_class: type[Holder], steps: int
) -> dict[str, Any]:
    """Resume, return what was found, and train some steps that change the state of each rank."""
    with quiet(folder=folder, seed=0) as run:
        model = run.wrap(net())
        opt = torch.optim.Adam(model.parameters(), lr=0.01)
        alone = torch.nn.Linear(200, 200)  # not wrapped, and different on each rank
        torch.nn.init.constant_(alone.weight, run.rank)
        average = Holder(weights=torch.ones(LARGE))
        buffer = buffer_class(items=torch.zeros(LARGE), size=0)
        notes = Holder(text="")
        objects: dict[str, Any] = {"model": model, "opt": opt, "average": average, "notes": notes}
        per_rank = {"buffer": buffer, "alone": alone}
        restored = (
            run.resume(per_rank=per_rank, **objects)
            if declared
            else run.resume(**objects, **per_rank)
        )
        size, items = buffer.state["size"], buffer.state["items"][:2].tolist()
        found = (size, items, notes.state["text"], alone.weight[0, 0].item())
        for _ in run.steps(range(steps)):
            run.backward(model(torch.ones(2, 4, dtype=torch.float64)).sum())
            run.update(opt)
            average.state["weights"] += 1
            buffer.state["items"][: run.step + 1] = run.rank + 10.0 * (run.step + 1)
            buffer.state["size"] += 1
            notes.state = {"text": f"rank {run.rank}"}
            alone.weight.data += 1
            run.log(loss=1.0)
        return {
            "restored": restored and restored.step,
            "found": found,
            "average": average.state["weights"][0].item(),
        }


@pytest.mark.parametrize("declared", [False, True])
def test_every_rank_gets_its_own_state_back(
    ranks: Ranks, tmp_path: Path, declared: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks(job_start, 2, str(tmp_path), declared, Holder, 2)
    kinds = read_marker(tmp_path / "checkpoints/step-00000002").objects
    assert kinds == {
        "model": "module",
        "opt": "optimizer",
        "average": "state",
        "notes": "rank",
        "buffer": "rank",
        "alone": "rank",
        "plain_loader": "rank",
    }
    for rank, found in enumerate(ranks(job_start, 2, str(tmp_path), declared, Holder, 3)):
        assert found["restored"] == 2
        assert found["found"] == (2, [rank + 20.0, rank + 20.0], f"rank {rank}", rank + 2.0)
        assert found["average"] == 4, "1, and 3 steps in all"
    if declared:
        with pytest.raises(
            CheckpointError, match="'buffer' has separate state on each of 2 ranks"
        ) as error:
            job_start(str(tmp_path), declared, Holder, 1)
        assert "load_rank_states" in error.value.hint
        return
    assert job_start(str(tmp_path), declared, Holder, 1)["found"] == (
        3,
        [30.0, 30.0],
        "rank 0",
        3.0,
    )
    printed = capfd.readouterr().err
    for name in ("notes", "buffer", "alone"):
        assert (
            f"the state of {name!r} differed between 2 ranks; now there are 1, and all get that of rank 0"
            in printed
        )


def test_another_number_of_ranks_is_up_to_the_object(tmp_path: Path, ranks: Ranks) -> None:
    found = ranks(save_two, 2, tmp_path)
    assert found == [{"buffer"}, {"buffer"}]
    merged, same = Mergeable(items=torch.zeros(LARGE), size=0), Holder(text="")
    loader = CheckpointManager(tmp_path)
    loader.declare(per_rank=["buffer"])
    loader.register(buffer=merged, same=same)
    assert loader.restore() is not None
    assert merged.state["items"].tolist() == [0.0, 1.0]
    assert same.state == {"text": "equal"}, (
        "plain state that is equal on all ranks resumes on any number of them"
    )
    loader.save(2, wait=True)
    loader.close()
    # A declared object of one rank is not copied to two.
    with pytest.raises(AssertionError, match="'buffer' has separate state on each of 1 ranks"):
        ranks(resume_two, 2, tmp_path)


def save_harmless(folder: Path) -> set[str]:
    """States that differ in the order of sets and dicts, and one that only rank 0 has."""
    manager = make_manager(folder)
    fruit = ["apple", "pear", "plum"]
    ordered = {name: torch.ones(2) for name in (fruit if manager.rank else fruit[::-1])}
    history = Holder(loss=torch.ones(4)) if manager.rank == 0 else Holder()
    manager.register(
        ordered=Holder(**ordered),
        words=Holder(seen=set(fruit), counts={1: 2, 3: 4}),
        history=history,
    )
    manager.save(1, wait=True)
    assert manager.poll()[0].error is None
    return set(manager._per_rank)


def load_harmless(folder: Path) -> dict[str, Any]:
    manager = make_manager(folder, world_size=int(os.environ["WORLD_SIZE"]))
    history, words = Holder(), Holder()
    manager.register(ordered=Holder(apple=torch.zeros(2), pear=torch.zeros(2), plum=torch.zeros(2)))
    manager.register(words=words, history=history)
    manager.warn = pytest.fail
    assert manager.restore() is not None
    return {**words.state, **{name: value.tolist() for name, value in history.state.items()}}


def test_harmless_differences_resume_on_any_number_of_ranks(tmp_path: Path, ranks: Ranks) -> None:
    assert ranks(save_harmless, 2, tmp_path) == [{"history"}, {"history"}]
    first, second, third = ranks(load_harmless, 3, tmp_path)
    assert first.pop("loss") == [1.0] * 4
    assert first == second == third == {"seen": {"apple", "pear", "plum"}, "counts": {1: 2, 3: 4}}


def save_two(folder: Path) -> set[str]:
    """Undeclared, with a different shape on each rank."""
    manager = make_manager(folder)
    items = torch.full((LARGE + manager.rank,), float(manager.rank))
    manager.register(buffer=Holder(items=items), same=Holder(text="equal"))
    manager.save(1, wait=True)
    assert manager.poll()[0].error is None
    return set(manager._per_rank)


def resume_two(folder: Path) -> None:
    manager = make_manager(folder)
    manager.declare(per_rank=["buffer"])
    manager.register(buffer=Holder(items=torch.zeros(LARGE)), same=Holder(text="equal"))
    manager.restore()


def save_buffers(folder: Path) -> None:
    """A model outside of DDP, whose buffer is different on each rank."""
    manager = make_manager(folder)
    model = torch.nn.Linear(512, 512)
    torch.nn.init.ones_(model.weight)
    torch.nn.init.ones_(model.bias)
    model.register_buffer("seen", torch.full((1 << 20,), float(manager.rank)))
    manager.register(model=model)
    manager.save(1, wait=True)
    assert manager.poll()[0].error is None
    assert not manager._per_rank


def test_buffers_are_those_of_rank_0(ranks: Ranks, tmp_path: Path) -> None:
    ranks(save_buffers, 2, tmp_path)
    model = torch.nn.Linear(512, 512)
    model.register_buffer("seen", torch.full((1 << 20,), 7.0))
    loader = CheckpointManager(tmp_path)
    loader.register(model=model)
    assert loader.restore() is not None
    assert model.seen.count_nonzero() == 0
    assert (model.weight == 1).all(), "parameters come from both ranks"
    files = read_marker(tmp_path / "step-00000001").files
    assert sum(name.endswith(".safetensors") for name in files) == 2


def make_manager(folder: Path, world_size: int = 2) -> CheckpointManager:
    dist.init_process_group("gloo")
    return CheckpointManager(
        folder, rank=int(os.environ["RANK"]), world_size=world_size, group=dist.group.WORLD
    )


def different_names(folder: Path) -> str:
    manager = make_manager(folder)
    manager.register(**{f"object_{manager.rank}": Holder(a=1)})
    try:
        manager.save(1)
    except CheckpointError as error:
        return error.message
    return "saved"


def test_ranks_that_resume_different_objects_are_an_error(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(different_names, 2, tmp_path) == [
        f"The ranks resumed different objects; rank {rank} has object_{rank}." for rank in range(2)
    ]


def test_an_object_is_given_once(tmp_path: Path) -> None:
    with (
        quiet(folder=tmp_path) as run,
        pytest.raises(UsageError, match=r"run\.resume got 'it' twice"),
    ):
        run.resume(it=Holder(), per_rank={"it": Holder()})
