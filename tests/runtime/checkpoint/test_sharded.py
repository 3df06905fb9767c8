"""State sharded over a device mesh: saved by two ranks, loaded by one, two and four, sharded or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.runtime.checkpoint.manager import CheckpointManager
from tests.forked_ranks import Ranks


def build(world_size: int, *, sharded: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    # 7 and 5 rows: no number of ranks divides them all.
    model = nn.Sequential(nn.Linear(16, 7), nn.BatchNorm1d(7), nn.Linear(7, 5))
    if sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world_size,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def full(tensor: Any) -> list[float]:
    value = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return value.detach().double().flatten().tolist()  # type: ignore[no-any-return]


def all_values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[float]]:
    values = {key: full(value) for key, value in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        values |= {f"{index}/{key}": full(value) for key, value in state.items()}
    return values


def train(folder: Path, steps: int, sharded: bool, attempt: int) -> dict[str, Any]:
    """Resume, train, and save at each step (the second without new memory); return the state before and after."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, optimizer = build(world_size, sharded=sharded)
    group = dist.group.WORLD if world_size > 1 else None
    warnings: list[str] = []
    checkpoints = CheckpointManager(
        folder, rank=rank, world_size=world_size, group=group, attempt=attempt, warn=warnings.append
    )
    checkpoints.register(model=model, opt=optimizer)
    restored = checkpoints.restore()
    found = all_values(model, optimizer)
    step = restored.step if restored else 0
    for _ in range(steps):
        step += 1
        data = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        model(data).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpoints.save(step, wait=step % 2 == 0)
    ended = [saved.error for saved in checkpoints.poll()]
    left = all_values(model, optimizer)
    checkpoints.close()
    dist.destroy_process_group()
    return {
        "found": found,
        "left": left,
        "restored": step - steps,
        "ended": ended,
        "warnings": warnings,
    }


def test_two_ranks_save_and_others_load(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks(train, 2, tmp_path, 2, True, 1)
    assert saved[0]["ended"] == [None, None]
    for world_size, sharded in ((2, True), (4, True), (1, True), (1, False)):
        for each in ranks(train, world_size, tmp_path, 0, sharded, 2):
            assert each["restored"] == 2
            assert each["found"] == saved[0]["left"], (world_size, sharded)
    # And the other way around: four sharded ranks load what one plain rank saved.
    plain = ranks(train, 1, tmp_path, 2, False, 3)
    for each in ranks(train, 4, tmp_path, 0, True, 4):
        assert (each["restored"], each["found"]) == (4, plain[0]["left"])


def test_a_flipped_byte_in_a_shard_is_found(ranks: Ranks, tmp_path: Path) -> None:
    ranks(train, 2, tmp_path, 2, True, 1)
    shard = tmp_path / "step-00000002/share-00002-of-00002.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 1
    shard.write_bytes(raw)
    found = ranks(train, 2, tmp_path, 0, True, 2)
    assert [each["restored"] for each in found] == [1, 1]
    assert (
        "skipping checkpoint step-00000002: share-00002-of-00002.safetensors has checksum"
        in found[0]["warnings"][0]
    )


def fail_to_save(folder: Path) -> list[str | None]:
    """Rank 1 can't write its parts: return what `poll` reports, rank 0's first."""
    dist.init_process_group("gloo")
    model, optimizer = build(2, sharded=True)
    checkpoints = CheckpointManager(
        folder, rank=dist.get_rank(), world_size=2, group=dist.group.WORLD, warn=lambda _: None
    )
    checkpoints.register(model=model, opt=optimizer)
    if dist.get_rank() == 1:
        partial = folder / "step-00000001.tmp-1-1"
        partial.mkdir()
        (partial / "share-00002-of-00002.safetensors").symlink_to("missing/file")
    dist.barrier()
    checkpoints.save(1, wait=True)
    ended = [saved.error for saved in checkpoints.poll()]
    checkpoints.close()
    dist.destroy_process_group()
    return ended


def test_a_failed_write_is_no_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    ended = ranks(fail_to_save, 2, tmp_path)
    assert "rank 1: No such file or directory" in ended[0][0]
    assert ended[1][0] is not None
    assert not list(tmp_path.glob("step-????????"))
