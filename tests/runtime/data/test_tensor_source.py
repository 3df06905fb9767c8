"""`run.loader(..., resident=True, transform=function)`: batches made on the device, the same on all ranks."""

from __future__ import annotations

import random as python_random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import IterableDataset, TensorDataset

from paceline.errors import UsageError
from paceline.runtime.data.loader import MapLoader, make_loader
from paceline.runtime.data.tensor_source import SampleRandom
from paceline.runtime.distributed.identity import Identity
from paceline.runtime.randomness import preserve_host_rng

IMAGES = torch.randint(
    256, (53, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
)
DATA = TensorDataset(IMAGES, torch.arange(53))
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]


def augment(
    images: torch.Tensor, labels: torch.Tensor, random: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Crop with a margin of one pixel, flip half of the images, and normalize."""
    shift = (random(2) * 3).long()
    rows, columns = shift[:, 0, None] + torch.arange(8, device=images.device), shift[:, 1, None]
    padded = F.pad(images, (1, 1, 1, 1))
    batch = torch.arange(len(images), device=images.device)[:, None, None]
    columns = columns + torch.arange(8, device=images.device)
    cropped = padded[batch, 0, rows[:, :, None], columns[:, None, :]][:, None]
    flipped = torch.where(random(1, 1, 1) < 0.5, cropped.flip(3), cropped)
    return (flipped.float() / 255 - 0.5) / 0.25, labels


def make(
    world_size: int = 1,
    *,
    device: str = "cpu",
    transform: Callable[..., Any] = augment,
    **options: Any,
) -> Any:
    settings = {
        "batch_size": 12,
        "drop_last": False,
        "seed": 3,
        "resident": True,
        "device": device,
        **options,
    }
    return [
        MapLoader(DATA, identity=Identity(rank, world_size), transform=transform, **settings)
        for rank in range(world_size)
    ]


def images_by_label(loaders: Any, epoch: int, first: int | None = None) -> dict[int, torch.Tensor]:
    found = {}
    for loader in loaders:
        for micro in loader.micro_batches(epoch, first):
            images, labels = (field[: micro.count].cpu() for field in micro.data)
            found.update(zip(labels.tolist(), images, strict=True))
    return found


def same(some: dict[int, torch.Tensor], others: dict[int, torch.Tensor]) -> bool:
    """Compare images. A GPU divides a little differently."""
    return some.keys() == others.keys() and all(
        torch.allclose(some[label], others[label], atol=1e-5) for label in some
    )


@pytest.mark.parametrize("device", DEVICES)
def test_a_sample_is_augmented_alike_on_any_number_of_ranks_and_differently_in_each_epoch(
    device: str,
) -> None:
    reference = images_by_label(make(), 1)
    assert len(reference) == 53
    assert same(images_by_label(make(2, device=device), 1), reference)
    assert same(images_by_label(make(3, device=device, accumulate=2), 1), reference)
    assert not same(images_by_label(make(device=device), 2), reference)
    loaders = make(device=device)
    images_by_label(loaders, 0)
    assert same(images_by_label(loaders, 1), reference)  # by the graph that was captured in epoch 0


def test_a_resumed_loader_takes_the_seed_of_the_checkpoint() -> None:
    (first,) = make()
    batches = first.micro_batches(1)
    next(batches), next(batches)
    (second,) = make(seed=9)
    second.load_state_dict(first.state_dict())
    rest = images_by_label([second], 1)
    whole = images_by_label(make(), 1)
    assert same(rest, {label: whole[label] for label in rest})
    assert len(rest) == 53 - 24


def test_random_numbers_are_uniform_and_differ_between_samples_and_calls() -> None:
    random = SampleRandom(torch.arange(20_000), (1 << 64) - 7)
    first, second = random(3), random(3)
    assert first.shape == (20_000, 3)
    for numbers in (first, second):
        assert 0 <= numbers.min() < 0.001
        assert 0.999 < numbers.max() < 1
        assert numbers.mean(0).sub(0.5).abs().max() < 0.01
        assert numbers.var(0).sub(1 / 12).abs().max() < 0.003
    assert torch.corrcoef(torch.cat([first, second], 1).T).fill_diagonal_(0).abs().max() < 0.03
    assert torch.corrcoef(torch.stack([first[1:, 0], first[:-1, 0]]))[0, 1].abs() < 0.03
    assert random().shape == (20_000,)


def test_fields_by_name() -> None:
    loader = MapLoader(
        {"x": torch.arange(6), "y": torch.arange(6)},
        batch_size=6,
        shuffle=False,
        resident=True,
        transform=lambda batch: {**batch, "sum": batch["x"] + batch["y"]},
        identity=Identity(0, 1),
    )
    (batch,) = loader
    assert batch["sum"].tolist() == [0, 2, 4, 6, 8, 10]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(5))


def test_what_cannot_work_is_an_error() -> None:
    with pytest.raises(UsageError, match="needs resident=True"):
        make(resident=False)
    with pytest.raises(UsageError, match="transform doesn't work with Stream"):
        make_loader(Stream(), batch_size=2, transform=augment)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "draw", [python_random.random, numpy.random.rand, lambda: torch.rand(1).item()]
)
def test_random_numbers_that_differ_between_ranks_are_an_error(
    draw: Callable[[], float], device: str
) -> None:
    seen = []

    def later(images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(len(labels))
        return images * (draw() if len(seen) > 2 else 1), labels

    with preserve_host_rng(), pytest.raises(UsageError, match="uses random numbers"):
        list(make(transform=later, device=device)[0].micro_batches(0))
    assert len(seen) == 3


@pytest.mark.gpu
@needs_gpu
def test_random_numbers_of_the_device_are_an_error() -> None:
    (loader,) = make(
        transform=lambda images, labels: (images * torch.rand_like(images, dtype=float), labels),
        device="cuda",
    )
    with pytest.raises(UsageError, match="uses random numbers"):
        list(loader.micro_batches(0))


def test_changes_of_the_scripts_tensors_and_of_batches_do_not_reach_resident_data() -> None:
    mine = torch.arange(12.0)
    loader = make_loader(
        (mine,), batch_size=6, resident=True, shuffle=False, device="cpu", identity=Identity(0, 1)
    )
    mine.zero_()
    for micro in loader.micro_batches(0):
        micro.data[0].fill_(-1)
    assert [value for micro in loader.micro_batches(1) for value in micro.data[0].tolist()] == list(
        range(12)
    )


class Computed:
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("options", [{}, {"resident": True}, {"resident": True, "sampler": [0]}])
@pytest.mark.parametrize("data", [Computed(0), TensorDataset(torch.zeros(0, 3))])
def test_an_empty_data_set_is_an_error(data: Any, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"The dataset of run\.loader is empty"):
        make_loader(data, batch_size=2, identity=Identity(0, 1), **options)


def test_every_pass_takes_the_tensors_that_the_data_set_has() -> None:
    data = TensorDataset(torch.arange(4.0))
    loader = make_loader(data, batch_size=2, shuffle=False, identity=Identity(0, 1))
    assert [batch[0].tolist() for batch in loader] == [[0, 1], [2, 3]]
    data.tensors = (torch.arange(4.0) * 10,)
    assert [batch[0].tolist() for batch in loader] == [[0, 10], [20, 30]]
    data.tensors = (torch.arange(5.0),)
    with pytest.raises(UsageError, match=r"had 4 samples when run.loader got it, and now it has 5"):
        list(loader)
