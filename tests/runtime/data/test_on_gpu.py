"""Transfer of batches to a CUDA device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from paceline.runtime.data.loader import MapLoader
from paceline.runtime.data.transfer import transfer_batches
from paceline.runtime.distributed.identity import Identity
from tests.runtime.data.datasets import Noisy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def no_waiting() -> Any:
    """Raise an error wherever the host waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_batches_arrive_whole_while_the_device_is_busy() -> None:
    big = torch.randn(2048, 2048, device="cuda")
    batches = [{"x": torch.full((1 << 20,), float(number)), "name": "n"} for number in range(8)]
    sums = []
    for batch in transfer_batches(iter(batches), torch.device("cuda")):
        for _ in range(10):  # the next batch is copied meanwhile
            big = big @ big
            big /= big.norm()
        sums.append(batch["x"].sum())
    assert [value.item() / (1 << 20) for value in sums] == list(range(8))


@pytest.mark.parametrize("resident", [True, False])
def test_an_epoch_never_waits_and_has_the_same_order_as_on_the_host(
    no_waiting: None, resident: bool
) -> None:
    x, y = torch.randn(1000, 8), torch.arange(1000)
    options: dict[str, Any] = {
        "batch_size": 64,
        "drop_last": False,
        "seed": 5,
        "identity": Identity(1, 2),
    }
    torch.cuda.set_sync_debug_mode("default")  # moving the dataset happens once, and may wait
    on_gpu = MapLoader(TensorDataset(x, y), device="cuda", resident=resident, **options)
    on_cpu = MapLoader(TensorDataset(x, y), **options)
    torch.cuda.set_sync_debug_mode("error")
    for epoch in (0, 1):
        got = [micro.data for micro in on_gpu.micro_batches(epoch)]
        torch.cuda.set_sync_debug_mode("default")
        for mine, micro in zip(got, on_cpu.micro_batches(epoch), strict=True):
            assert mine[0].is_cuda
            assert mine[0].cpu().equal(micro.data[0])
            assert mine[1].cpu().equal(micro.data[1])
        torch.cuda.set_sync_debug_mode("error")


def test_a_resident_epoch_copies_only_its_order() -> None:
    """An epoch needs one copy from the host, its permutation; data on the host needs one per tensor and batch."""
    x, y = torch.randn(4096, 32), torch.arange(4096)

    def copies(resident: bool) -> int:
        loader = MapLoader(
            TensorDataset(x, y),
            batch_size=64,
            device="cuda",
            resident=resident,
            seed=5,
            identity=Identity(),
        )
        list(loader.micro_batches(0))
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            batches = list(loader.micro_batches(1))
            torch.cuda.synchronize()
        assert len(batches) == 64
        assert all(batch.data[0].is_cuda for batch in batches)
        return sum("HtoD" in event.name for event in seen.events() or ())

    assert copies(resident=True) == 1
    assert copies(resident=False) == 128


def test_workers_feed_the_device() -> None:
    on_gpu = MapLoader(
        Noisy(64), batch_size=16, num_workers=2, device="cuda", seed=1, identity=Identity()
    )
    on_cpu = MapLoader(Noisy(64), batch_size=16, seed=1, identity=Identity())
    for far, near in zip(on_gpu.micro_batches(0), on_cpu.micro_batches(0), strict=True):
        assert far.data[0].cpu().equal(near.data[0])
    on_gpu.close()
