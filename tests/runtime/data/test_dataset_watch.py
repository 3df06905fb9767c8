"""What is changed in a data set between epochs reaches workers that stay alive."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import Subset

from paceline.runtime.data.dataset_watch import DatasetWatch
from paceline.runtime.data.loader import make_loader
from paceline.runtime.distributed.identity import Identity
from tests.runtime.data.datasets import Numbers


class Settable(Numbers):
    """Each item shows the data set's attributes, and the process that computed it."""

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
    loader = make_loader(Subset(data, range(4)), batch_size=4, shuffle=False, num_workers=1, identity=Identity())
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
