"""The order in which an epoch takes its samples: a permutation, a sampler's, or the batches of a
batch sampler.

Every order depends on (seed, epoch) alone, so all ranks get the same one, and a resumed epoch gets
it again. Samplers draw from Python's, NumPy's and torch's global generators or from one of their
own. All of these are seeded for the draw, and afterwards continue from where they were.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import UsageError
from paceline.runtime.distributed.identity import Identity
from paceline.runtime.randomness import derive_seed, preserve_host_rng, seed_host

NESTED_SAMPLERS = ("sampler", "batch_sampler", "data_source", "dataset")


def epoch_order(samples: int, *, seed: int, epoch: int, shuffle: bool = True) -> torch.Tensor:
    """Return an epoch's sample order. It depends on (seed, epoch) alone, so every rank gets the
    same one.
    """
    if not shuffle:
        return torch.arange(samples)
    generator = torch.Generator().manual_seed(derive_seed(seed, epoch))
    return torch.randperm(samples, generator=generator)


@dataclass(frozen=True, eq=False)
class EpochOrder:
    """The samples of one epoch: their keys in order, and how a batch sampler cuts them into
    batches.
    """

    keys: Any  # a tensor of indices, or a list of whatever keys the dataset takes
    sizes: tuple[int, ...] | None = None  # of the batches; None if the batch size decides
    digest: str | None = None  # only of a sampler's order, which the seed alone may not determine

    @property
    def is_sampled(self) -> bool:
        return self.digest is not None


class Permutation:
    """All samples once, shuffled or not."""

    def __init__(self, samples: int, *, shuffle: bool) -> None:
        self.samples, self.shuffle = samples, shuffle

    def draw(self, seed: int, epoch: int) -> EpochOrder:
        return EpochOrder(epoch_order(self.samples, seed=seed, epoch=epoch, shuffle=self.shuffle))


class Sampled:
    """What a sampler yields, or a batch sampler."""

    def __init__(
        self, sampler: Iterable[Any], *, in_batches: bool = False, dataset: Any = None
    ) -> None:
        self.sampler, self.in_batches = sampler, in_batches
        # Far more than any epoch has. Without a limit, a sampler that never ends would fill the
        # memory.
        self._limit = 100 * (len(dataset) if hasattr(dataset, "__len__") else 0) + 10_000_000
        for each in (sampler, getattr(sampler, "sampler", None)):
            if getattr(each, "num_replicas", 1) > 1:
                raise UsageError(
                    f"{type(each).__name__} splits the dataset by rank, which the loader does as "
                    "well.",
                    hint="Remove it, or pass a sampler of the whole dataset.",
                )

    def draw(self, seed: int, epoch: int) -> EpochOrder:
        with _seeded(self.sampler, derive_seed(seed, epoch, -2)):
            if hasattr(self.sampler, "set_epoch"):
                self.sampler.set_epoch(epoch)
            drawn = list(islice(self.sampler, self._limit))
        if len(drawn) == self._limit:
            raise UsageError(
                f"{type(self.sampler).__name__} has yielded {self._limit} indices without ending: "
                "it seems endless.",
                hint="Let it end after one epoch, or wrap the data in an IterableDataset.",
            )
        if not self.in_batches:
            return EpochOrder(_as_indices(drawn), digest=_digest(drawn))
        batches = [batch for each in drawn if (batch := list(each))]
        keys = [key for batch in batches for key in batch]
        return EpochOrder(_as_indices(keys), tuple(map(len, batches)), _digest(drawn))


def check_same_order(order: EpochOrder, identity: Identity, group: Any) -> None:
    """Raise an error if a sampler's order differs from rank 0's: samples would be lost. Called on
    all ranks.
    """
    if order.digest is None or identity.world_size == 1 or not dist.is_initialized():
        return
    digests: list[Any] = [None] * identity.world_size
    dist.all_gather_object(digests, order.digest, group=group)
    if len(set(digests)) > 1:
        raise UsageError(
            "The sampler yields a different order on each rank, so samples would be lost.",
            hint="Let it draw from torch's, NumPy's or Python's global generator, or from a "
            "generator that is one of "
            "its attributes: the loader seeds all of these. It must not depend on the rank.",
        )


def _as_indices(keys: list[Any]) -> Any:
    """Return a tensor if all keys are integers, otherwise the list."""
    try:
        indices = torch.tensor(keys)
    except (TypeError, ValueError, RuntimeError):
        return keys
    return indices if indices.dtype == torch.int64 and indices.dim() == 1 else keys


def _digest(drawn: list[Any]) -> str:
    indices = _as_indices(drawn)
    data = indices.numpy().tobytes() if isinstance(indices, torch.Tensor) else repr(drawn).encode()
    return hashlib.blake2b(data, digest_size=8).hexdigest()


@contextlib.contextmanager
def _seeded(sampler: Any, seed: int) -> Iterator[None]:
    """Seed the global generators and the sampler's own, and restore them on exit."""
    with preserve_host_rng(), contextlib.ExitStack() as restored:
        for number, generator in enumerate(own_generators(sampler)):
            restored.callback(set_generator_state, generator, get_generator_state(generator))
            _reseed(generator, derive_seed(seed, number))
        seed_host(seed)
        yield


def own_generators(sampler: Any) -> list[Any]:
    """Return the generators that a sampler or a DataLoader holds, and those of the samplers inside
    it.
    """
    found: list[Any] = []
    seen: set[int] = set()
    waiting = [sampler]
    while waiting:
        thing = waiting.pop(0)
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        attributes = getattr(thing, "__dict__", {})
        found += [
            each
            for each in attributes.values()
            if _is_generator(each) and not any(each is other for other in found)
        ]
        waiting += [
            attributes[name] for name in NESTED_SAMPLERS if attributes.get(name) is not None
        ]
    return found


def _is_generator(thing: Any) -> bool:
    numpy = sys.modules.get("numpy")
    kinds = (
        (torch.Generator, random.Random)
        if numpy is None
        else (torch.Generator, random.Random, numpy.random.Generator)
    )
    return isinstance(thing, kinds)


def get_generator_state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return (
        generator.getstate()
        if isinstance(generator, random.Random)
        else generator.bit_generator.state
    )


def set_generator_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.bit_generator.state = state


def _reseed(generator: Any, seed: int) -> None:
    if not isinstance(generator, (torch.Generator, random.Random)):
        set_generator_state(generator, type(generator.bit_generator)(seed).state)
        return
    seed_in_place = (
        generator.manual_seed if isinstance(generator, torch.Generator) else generator.seed
    )
    seed_in_place(seed)
