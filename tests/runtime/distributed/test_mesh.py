"""A mesh of replicate x shard x tensor trains what one process trains, and its checkpoints fit every other mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import paceline
from paceline.errors import UsageError
from paceline.runtime.checkpoint import export
from paceline.runtime.distributed.mesh import resolve_sizes
from tests.forked_ranks import Ranks
from tests.runtime.models import assert_close, weights
from tests.runtime.training.test_wrap import quiet

HSDP = {"replicate": 2, "shard": 2}
TENSOR = {"shard": 2, "tensor": 2}
COPIES = {"replicate": 2, "tensor": -1}
CHAINS = [
    pytest.param([HSDP, TENSOR, COPIES], id="hsdp and tensor"),
    pytest.param(
        [{"shard": 4}, {"tensor": 4}, {"replicate": 4}], id="one dimension", marks=pytest.mark.slow
    ),
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))  # type: ignore[no-any-return]


class Blocks(nn.Module):
    """Two blocks whose layers can be split, and a head that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).squeeze(1)  # type: ignore[no-any-return]


def split(model: Blocks, mesh: Any) -> None:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def samples() -> TensorDataset:
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, x.sum(1).sin())


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from zip(*samples().tensors, strict=True)


def wrap(
    run: paceline.Run, mesh: dict[str, int], seed: int = 0
) -> tuple[Blocks, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = run.wrap(Blocks().double(), mesh=mesh, parallelize=split if "tensor" in mesh else None)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train(mesh: dict[str, int], folder: Path, epochs: int) -> dict[str, Any]:
    """Resume if there is a checkpoint, train and evaluate, with a tail that some ranks have no samples of."""
    with quiet(seed=0, folder=folder, progress=False) as run:
        model, optimizer = wrap(run, mesh, seed=run.rank)
        loader = run.loader(samples(), batch_size=16, accumulate=2, drop_last=False)
        run.resume(model=model, opt=optimizer)
        found, random = weights(model), torch.rand(()).item()
        for _ in run.epochs(epochs):
            for x, y in run.steps(loader):
                run.backward(((model(x) - y) ** 2).mean())
                run.update(optimizer, clip=0.1)
        model.eval()
        seen, total = 0, torch.zeros((), dtype=torch.float64)
        with torch.no_grad():
            for x, y in run.evaluate(samples(), batch_size=16):
                seen += len(y)
                total += ((model(x) - y) ** 2).sum()
        generator = torch.Generator()
        generator.set_state(torch.get_rng_state())
        return {
            "found": found,
            "left": weights(model),
            "step": run.step,
            "loss": run.sum(total).item(),
            "seen": run.sum(seen),
            "dp": (run.dp_rank, run.dp_size),
            "mean": run.mean(float(run.dp_rank)),
            "random": random,
            "next_random": torch.rand((), generator=generator).item(),
        }


def train_chain(meshes: list[dict[str, int]], folder: Path) -> list[dict[str, Any]]:
    return [train(mesh, folder, epochs) for epochs, mesh in enumerate(meshes, 1)]


@pytest.mark.parametrize("meshes", CHAINS)
def test_each_mesh_continues_what_another_saved_as_one_process_does(
    ranks: Ranks, tmp_path: Path, meshes: list[dict[str, int]]
) -> None:
    expected = train_chain([HSDP] * 3, tmp_path / "one")
    assert expected[0]["dp"] == (0, 1)  # with a single rank, the mesh has no effect
    chains = ranks(train_chain, 4, meshes, tmp_path / "four")
    for rank, chain in enumerate(chains):
        for number, (mesh, found) in enumerate(zip(meshes, chain, strict=True)):
            tensor = 2 if mesh == COPIES else mesh.get("tensor", 1)
            assert found["dp"] == (rank // tensor, 4 // tensor)
            assert (found["step"], found["seen"]) == (3 * number + 3, 40)
            assert found["mean"] == (4 // tensor - 1) / 2
            assert_close(found["left"], expected[number]["left"])
            assert found["loss"] == pytest.approx(expected[number]["loss"], abs=1e-10)
            assert number == 0 or found["found"] == chain[number - 1]["left"]
            # Ranks along tensor draw the same dropout, others draw their own.
            same = {
                other
                for other in range(4)
                if chains[other][number]["next_random"] == found["next_random"]
            }
            assert same == {other for other in range(4) if other // tensor == rank // tensor}
    if meshes[2] == COPIES:
        # As many data-parallel ranks as before continue with the same random numbers, also without tensor parallelism.
        assert [chain[2]["random"] for chain in chains] == [
            chain[1]["next_random"] for chain in chains
        ]
        pair = ranks(train, 2, {"shard": -1}, tmp_path / "four", 3)
        assert [each["random"] for each in pair] == [
            chains[0][2]["next_random"],
            chains[2][2]["next_random"],
        ]
        assert all(each["found"] == chains[0][2]["left"] for each in pair)
        names = [name for name, _ in Blocks().named_parameters()]
        whole = export.gather(tmp_path / "four/checkpoints/step-00000009", "model")
        assert torch.cat([whole[name].flatten() for name in names]).tolist() == chains[0][2]["left"]


def read_data() -> dict[str, Any]:
    """The mesh of the session is known before any model is wrapped."""
    with quiet(mesh=TENSOR) as run:
        stream = run.loader(Stream(), batch_size=8, drop_last=False)
        kept = [x.sum().item() for x, _ in stream]
        counts = [len(y) for _, y in run.evaluate(Stream(), batch_size=8)]
        with pytest.raises(UsageError, match="nothing splits this model"):
            run.wrap(Blocks())
        with pytest.raises(
            UsageError,
            match="mesh is replicate=2 x shard=2 x tensor=1, but the mesh of this run is",
        ):
            run.wrap(Blocks(), mesh=HSDP)
        with pytest.raises(
            UsageError, match="Ranks 0 and 1 are tensor-parallel, so they need the same"
        ):
            next(run.steps([torch.ones(2) * run.rank]))
        assert len(list(run.steps([torch.ones(2) * run.dp_rank]))) == 1
        whole = run.wrap(Blocks().double(), mode="ddp")
        loss = run.sum(whole(torch.ones(2, 6, dtype=torch.float64)).sum()).item()
        random = torch.rand(()).item()  # without a seed
        return {
            "stream": kept,
            "counts": counts,
            "loss": loss,
            "random": random,
            "names": run.mesh.mesh_dim_names,
            "steps": stream.steps_per_epoch,
            "rest": run.sum(torch.tensor(counts).sum()).item(),
            "gathered": [each.item() for each in run.gather(torch.tensor(run.dp_rank))],
        }


def test_ranks_along_tensor_read_the_same_samples(ranks: Ranks) -> None:
    found = ranks(read_data, 4)
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert found[0]["random"] != found[2]["random"]
    assert sum(found[0]["stream"] + found[2]["stream"]) == pytest.approx(
        samples().tensors[0].sum().item()
    )
    assert found[0]["names"] == ("replicate", "shard", "tensor")
    assert found[0]["rest"] == 40
    assert found[0]["gathered"] == [0, 1]


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"replicate": 2, "shard": 3}, "needs 6 ranks, but the world has 4"),
        ({"shard": -1, "tensor": 3}, "needs a multiple of 3 ranks, but the world has 4"),
        ({"shard": -1, "tensor": -1}, "must be sizes of"),
        ({"pipeline": 4}, "'pipeline': 4"),
        ({"shard": 0}, "must be sizes of"),
        ({}, "must be sizes of"),
    ],
)
def test_a_mesh_that_does_not_fit_is_an_error(mesh: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve_sizes(mesh, 4)


def wrap_late() -> list[str]:
    found = []
    for before in ("loader", "resume", "evaluate"):
        with quiet(seed=0) as run:
            if before == "loader":
                run.loader(samples(), batch_size=8)
            elif before == "resume":
                run.resume()  # after which each rank draws its own random numbers
            else:
                run.evaluate(samples(), batch_size=8)
            with pytest.raises(UsageError) as error:
                run.wrap(Blocks(), mesh={"tensor": 2}, parallelize=split)
            found.append(f"{error.value} {error.value.hint}")
            run.wrap(Blocks(), mesh={"replicate": 2})  # each rank keeps its samples
    return found


def test_a_mesh_must_not_change_afterwards_who_reads_what(ranks: Ranks) -> None:
    for found in ranks(wrap_late, 2):
        assert all(
            "given each rank its own" in each and "or pass the mesh to paceline.session" in each
            for each in found
        )


def test_wrap_says_when_there_is_nothing_to_split() -> None:
    with quiet() as run:
        with pytest.raises(UsageError, match="needs mode='fsdp' and a mesh"):
            run.wrap(Blocks(), parallelize=split)
        assert (run.mesh, run.dp_rank, run.dp_size) == (None, 0, 1)
