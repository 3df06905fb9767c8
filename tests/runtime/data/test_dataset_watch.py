"""What is changed in a dataset between epochs reaches workers that stay alive."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import Subset

from paceline.runtime.data.dataset_watch import DatasetWatch
from paceline.runtime.data.loader_selection import make_loader
from paceline.runtime.distributed.identity import Identity
from tests.runtime.data.datasets import Numbers


@dataclass(slots=True)
class Slotted:
    size: int = 1
    names: list[str] = field(default_factory=list)


class Named(list[int]):
    """A list with attributes."""

    name = "a"


class Settable(Numbers):
    """Each item shows the dataset's attributes, and the process that computed it."""

    level = 1
    shapes = [1]  # noqa: RUF012

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.epoch = 0
        self.transforms: list[Any] = [partial(scale, factor=1)]
        self.table = torch.zeros(3)
        self.names = {"a": [1, 2]}
        self.closure: Any = closure_over([0])
        self.large = list(range(5000))
        self.mean = numpy.zeros(3)
        self.pixels = numpy.ones((100, 300))
        self.objects = numpy.array([None, "a"], dtype=object)
        self.none = numpy.zeros((0, 3))
        self.slotted = Slotted()
        self.allowed = {"a", 1, (2, 3)}
        self.buffer = bytearray(10_000)
        self.steps = torch.arange(100)
        self.complex = torch.zeros(3, dtype=torch.complex64).conj()
        self.half = torch.zeros(2, 3, dtype=torch.bfloat16).t()
        self.root = Path("data")
        self.items = Named([1])
        self.masked = numpy.ma.masked_array([1, 2], mask=[False, True])

    def __getitem__(self, index: int) -> Any:
        value = index
        for transform in self.transforms:
            value = transform(value)
        return value, self.epoch, os.getpid()


def scale(value: int, factor: int) -> int:
    return value * factor


def closure_over(values: list[int]) -> Any:
    return lambda: values


def test_changes_reach_persistent_workers() -> None:
    data = Settable(4)
    loader = make_loader(
        Subset(data, range(4)), batch_size=4, shuffle=False, num_workers=1, identity=Identity()
    )
    first, second = next(iter(loader)), None
    list(loader)
    for epoch, transform in ((0, None), (3, None), (3, partial(scale, factor=10))):
        data.epoch = epoch
        if transform is not None:
            data.transforms[0] = transform
        (second,) = [micro.data for micro in loader.micro_batches(1)]
        assert second[0].tolist() == [0, 10, 20, 30] if transform else [0, 1, 2, 3]
        assert second[1].tolist() == [epoch] * 4
        # Workers stay alive as long as nothing changes.
        assert (second[2].tolist() == first[2].tolist()) == (epoch == 0)
    loader.close()


CHANGES: dict[str, Any] = {
    "attribute": lambda data: setattr(data, "epoch", 1),
    "new attribute": lambda data: setattr(data, "extra", None),
    "list": lambda data: data.transforms.append(str),
    "argument of a partial": lambda data: data.transforms[0].keywords.update(factor=2),
    "tensor": lambda data: data.table.add_(1),
    "nested": lambda data: data.names["a"].append(3),
    "closure": lambda data: data.closure().append(1),
    "length of a large list": lambda data: data.large.append(1),
    "order of a large list": lambda data: data.large.reverse(),
    "values of an array": lambda data: data.mean.__iadd__(1),
    "values of a large array": lambda data: data.pixels.__imul__(2),
    "slot": lambda data: setattr(data.slotted, "size", 2),
    "in a slot": lambda data: data.slotted.names.append("a"),
    "deleted slot": lambda data: delattr(data.slotted, "size"),
    "set": lambda data: (data.allowed.remove("a"), data.allowed.add("b")),
    "tuple in a set": lambda data: (data.allowed.remove((2, 3)), data.allowed.add((2, 4))),
    "object in an array": lambda data: data.objects.__setitem__(1, "b"),
    "bytearray": lambda data: data.buffer.__setitem__(slice(100, 200), b"1" * 100),
    "data of a tensor": lambda data: data.steps.data.fill_(7),
    "array of a tensor": lambda data: data.table.numpy().fill(7),
    "tensor in bf16": lambda data: data.half.data[0].fill_(7),
    "complex tensor": lambda data: data.complex.data.fill_(1j),
    "path": lambda data: setattr(data, "root", Path("other")),
    "attribute of a list": lambda data: setattr(data.items, "name", "b"),
    "kind of array": lambda data: data.masked.data.fill(7),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_noticed(change: str) -> None:
    data = Settable(4)
    watch = DatasetWatch([data])
    assert not watch.has_changed()
    watch.record()
    assert not watch.has_changed()
    CHANGES[change](data)
    assert watch.has_changed()
    watch.record()
    assert not watch.has_changed()


@pytest.mark.parametrize(("name", "value"), [("level", 2), ("shapes", [1, 2])])
@pytest.mark.parametrize("nested", [True, False])
def test_changes_of_the_class_are_noticed(
    name: str, value: Any, nested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Settable(4)
    watch = DatasetWatch(Subset(data, range(4)) if nested else data)
    watch.record()
    assert not watch.has_changed()
    monkeypatch.setattr(Settable, name, value)
    assert watch.has_changed()


def test_what_workers_share_is_not_read(tmp_path: Path) -> None:
    """An array in a file may be large and far away, and workers see changes of a shared one."""
    data = Settable(4)
    data.file = numpy.memmap(tmp_path / "file", dtype="u1", mode="w+", shape=(8,))
    data.view = numpy.asarray(data.file)[2:]
    data.mapped = numpy.frombuffer(memoryview(mmap.mmap(-1, 8)), dtype="u1")
    data.shared = torch.zeros(3).share_memory_()
    watch = DatasetWatch(data)
    watch.record()
    data.file[:] = 1
    data.mapped[:] = 1
    data.shared.data.fill_(1)
    assert not watch.has_changed()


def test_using_a_data_set_is_no_change() -> None:
    data = Settable(4)
    watch = DatasetWatch(data)
    watch.record()
    hash(data.root)
    str(data.root / "a")
    data.allowed = {(2, 3), 1, "a"}
    data.slotted.names[:] = []
    assert not watch.has_changed()
