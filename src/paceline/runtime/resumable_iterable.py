"""Batches of any iterable, such as a plain DataLoader, in a form that can be resumed.

An iterable knows no position. A resume therefore iterates again, from the random state with which
the iteration began, and skips the batches that were trained on. A DataLoader draws its permutation
and the seeds of its workers from that state, so it gives the same batches again. The first batch
shows whether it really does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from paceline.errors import CheckpointError
from paceline.runtime import randomness
from paceline.runtime.checkpoint.state_tree import digest_state, encode
from paceline.runtime.console import note
from paceline.runtime.data.sample_assignment import MicroBatch
from paceline.runtime.data.sample_order import (
    get_generator_state,
    own_generators,
    set_generator_state,
)
from paceline.runtime.data.transfer import map_tensors, transfer_batch

_END = object()

HINT = (
    "Let the order depend only on torch's, NumPy's and Python's generators and on the epoch; the "
    "random state of workers with persistent_workers=True is lost. run.loader resumes exactly: if "
    "these are its batches, pass the loader itself to run.steps, with max_steps=n for n steps. To "
    "train on whatever comes next, pass exact=False to run.steps."
)


class PlainLoader:
    """The iterable of the current loop. Its state is how many batches it gave, and how the
    iteration began.
    """

    def __init__(self, *, device: torch.device, rank: int, world_size: int) -> None:
        self.epoch = self.step = 0
        self.accumulate = 1
        self._device, self._rank, self._world_size = device, rank, world_size
        self._iterable: Iterable[Any] = ()
        self._exact = True
        self._saves_itself = False
        self._taken = 0  # batches since the iteration began
        self._loops = 0  # loops over the same iteration: more than one if it is an iterator
        self._began: dict[str, Any] = {}  # the generators then
        self._own: list[Any] = []  # those that the iterable holds itself
        self._number = 0  # of this loop in its epoch
        self._iterables: dict[int, Iterable[Any]] = {}  # of all loops of an epoch
        self._set_epochs: dict[int, int] = {}  # by the id of a sampler: what it got last
        # what was loaded for those that have not come yet
        self._generators: dict[str, list[Any]] = {}
        # loops whose DataLoader had begun before the resume, and kept its workers
        self._kept: set[str] = set()
        self._reuses_workers = False  # whether this iteration found them there
        # checksum of the first batch; None if an older version has saved another one
        self._first: int | None = None
        # of the first batch in this process that has tensors; with several ranks
        self.digest: int | None = None
        self._resumed: Mapping[str, Any] | None = None
        self._iterator: Iterator[Any] = iter(())
        self._exhausted = False
        # an iterator that a resume took for one of all epochs
        self._assumed: Iterable[Any] | None = None

    def attach(
        self,
        iterable: Iterable[Any],
        number: int,
        *,
        epoch: int | None,
        accumulate: int,
        exact: bool,
        saves_itself: bool,
    ) -> None:
        """Take the iterable of the next loop. If it `saves_itself`, it continues from its own
        position.

        The samplers of a DataLoader get the `epoch`, unless it is None, or the script has set
        another one than this did before.
        """
        if epoch is not None:
            for sampler in _samplers(iterable):
                if getattr(sampler, "epoch", 0) in (0, self._set_epochs.get(id(sampler))):
                    sampler.set_epoch(epoch)
                    self._set_epochs[id(sampler)] = epoch
        continues = iterable is self._iterable and isinstance(iterable, Iterator)
        if (
            self._assumed is not None
            and isinstance(iterable, Iterator)
            and iterable is not self._assumed
        ):
            raise CheckpointError(
                "The resumed run assumed one iterator for all epochs, but run.steps got a new "
                "iterator for this epoch.",
                hint="Pass the iterable itself to run.steps, not an iterator of it.",
            )
        self._loops = self._loops + 1 if continues else 1
        if not continues:
            self._taken = 0
        self._number, self._iterables[number] = number, iterable
        for generator, state in zip(
            own_generators(iterable), self._generators.pop(str(number), ()), strict=False
        ):
            set_generator_state(generator, state)
        self._iterable, self.accumulate, self._exact, self._saves_itself = (
            iterable,
            accumulate,
            exact,
            saves_itself,
        )

    def exhaust(self) -> None:
        """Let the iterator end if it has given all its batches: a sampler may draw once more at
        its end.
        """
        if self.step == self.steps_per_epoch:
            next(self._iterator, None)

    def finish(self) -> None:
        """Skip the batches of a loop that has no steps left."""
        if self._resumed is not None:
            self._begin(self._resumed["epoch"])

    @property
    def steps_per_epoch(self) -> int | None:
        try:
            return -(-len(self._iterable) // self.accumulate)  # type: ignore[arg-type]
        except TypeError:  # a DataLoader has a length only if its dataset has one
            return None

    def first_step(self, epoch: int, number: int | None = None) -> int:
        """Return how many steps of this epoch are done, in this loop or in one that has not begun
        yet.
        """
        return (
            int(self._resumed["step"])
            if self._resumed and self._is_in(self._resumed, epoch, number)
            else 0
        )

    def _is_in(self, state: Mapping[str, Any], epoch: int, number: int | None = None) -> bool:
        """Return whether a state is of this loop, in this epoch."""
        return (state["epoch"], state["number"]) == (
            epoch,
            self._number if number is None else number,
        )

    def micro_batches(self, epoch: int) -> Iterator[MicroBatch]:
        """Yield the batches with equal weights, on the device."""
        self._iterator = iterator = self._begin(epoch)
        # The whole step at once: its last batches may be missing, and each of the others then
        # weighs more.
        while batches := list(islice(iterator, self.accumulate)):
            for index, data in enumerate(batches):
                last = index == len(batches) - 1
                if last:
                    self._taken += len(batches)
                    self.step += 1
                yield MicroBatch(
                    transfer_batch(data, self._device), 1, len(batches), index, last, 0, 1
                )
        self._exhausted = True

    def _begin(self, epoch: int) -> Iterator[Any]:
        resumed, self._resumed = self._resumed, None
        self.epoch, self.step, self._exhausted = epoch, 0, False
        if resumed is not None and self._saves_itself:
            self.step = resumed["step"] if self._is_in(resumed, epoch) else 0
        elif resumed is not None:
            continues = isinstance(self._iterable, Iterator) and not resumed["exhausted"]
            if self._is_in(resumed, epoch) or (continues and resumed["number"] == self._number):
                is_unsure = resumed["epoch"] != epoch and resumed["loops"] == 1
                self._assumed = self._iterable if is_unsure else None
                return self._begin_again(resumed)
        if self._taken:
            return iter(self._iterable)
        self._find_workers(str(self._number) in self._kept)
        self._began, self._own = (
            randomness.capture(),
            [get_generator_state(each) for each in own_generators(self._iterable)],
        )
        iterator = iter(self._iterable)
        first = next(iterator, _END)
        self._first = 0 if first is _END else _checksum(first)
        if self.digest is None and self._world_size > 1:
            self.digest = _digest(first)
        return iterator if first is _END else chain([first], iterator)

    def _begin_again(self, state: Mapping[str, Any]) -> Iterator[Any]:
        """Iterate as before, and skip what was taken."""
        self.step = state["step"] if self._is_in(state, self.epoch) else 0
        self._taken, self._loops = state["batches"], state["loops"]
        self._began, self._own, self._first = state["began"], state["own"], state.get("checksum")
        same_ranks = state["world_size"] == self._world_size
        if self._rank == 0 and self._taken:
            note(f"skipping {self._taken} batches that the run has already trained on")
            if not same_ranks:
                note(
                    f"these batches were split between {state['world_size']} ranks, and now there "
                    "are "
                    f"{self._world_size}: some samples of this epoch appear twice or not at all; "
                    "run.loader avoids that"
                )
        self._find_workers(state["reuses_workers"])
        # The restored generators include what the skipped batches drew, so they must not draw
        # again.
        now = randomness.capture()
        if same_ranks:
            randomness.restore(self._began)
            for generator, saved in zip(own_generators(self._iterable), self._own, strict=False):
                set_generator_state(generator, saved)
        iterator = iter(self._iterable)
        skipped = 0
        for number, batch in enumerate(islice(iterator, self._taken), 1):
            skipped = number
            if number == 1 and same_ranks and self._first not in (None, _checksum(batch)):
                self._complain("yields different batches than before")
        if skipped < self._taken and same_ranks:
            self._complain(f"ends after {skipped} batches, but {self._taken} were trained on")
        randomness.restore(now)
        return iterator

    def _find_workers(self, has_kept: bool) -> None:
        """Start the workers that a DataLoader would have kept from an earlier epoch.

        It draws their seed only when it starts them, so this must not draw from any generator.
        """
        loader = self._iterable
        if has_kept and _keeps_workers(loader) and loader._iterator is None:  # type: ignore[attr-defined]
            own = own_generators(loader)
            now, states = randomness.capture(), [get_generator_state(each) for each in own]
            iter(loader)
            randomness.restore(now)
            for generator, state in zip(own, states, strict=True):
                set_generator_state(generator, state)
        self._reuses_workers = getattr(loader, "_iterator", None) is not None

    def _complain(self, problem: str) -> None:
        problem = (
            "The resumed run can't continue this epoch where it was: the iterable of "
            f"run.steps {problem}"
        )
        if self._exact:
            raise CheckpointError(f"{problem}.", hint=HINT)
        if self._rank == 0:
            note(f"{problem}; it continues with what comes next")

    def state_dict(self) -> dict[str, Any]:
        if self._resumed is not None:
            return dict(self._resumed)
        if not self._taken:
            return {}
        generators, kept = dict(self._generators), set(self._kept)
        for number, each in self._iterables.items():
            if own := own_generators(each):
                generators[str(number)] = list(map(get_generator_state, own))
            if _keeps_workers(each):
                kept.add(str(number))
        return {
            "epoch": self.epoch,
            "step": self.step,
            "number": self._number,
            "batches": self._taken,
            "loops": self._loops,
            "exhausted": self._exhausted,
            "world_size": self._world_size,
            "began": self._began,
            "own": self._own,
            "generators": generators,
            "kept": sorted(kept),
            "reuses_workers": self._reuses_workers,
            "checksum": self._first,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._resumed = dict(state) if state else None
        self._generators = dict(state.get("generators", {}))
        self._kept = set(state.get("kept", ()))


def _keeps_workers(iterable: Any) -> bool:
    return isinstance(iterable, DataLoader) and iterable.persistent_workers


def _samplers(iterable: Any) -> list[Any]:
    """Return the samplers of a DataLoader that can be told the epoch."""
    in_batches = getattr(iterable, "batch_sampler", None)
    found = (getattr(iterable, "sampler", None), in_batches, getattr(in_batches, "sampler", None))
    return [
        each for each in {id(each): each for each in found}.values() if hasattr(each, "set_epoch")
    ]


def _digest(batch: Any) -> int | None:
    """Return a digest of the tensors in a batch, which a float64 can hold. None if there are none.

    Then it is a number or a name from which the script gets its samples, and the same on all ranks.
    """
    tensors = _tensors(batch)
    return digest_state([], tensors) >> 8 if any(each.numel() for each in tensors) else None


def _checksum(batch: Any) -> int:
    """Return a checksum of a batch that tells it from another one; of an object of another library,
    only its tensors count.
    """
    arrays: list[torch.Tensor] = []

    def store(path: str, tensor: torch.Tensor) -> dict[str, Any]:
        arrays.append(tensor)
        return {}

    try:
        tree = encode(batch, "batch", store)
    except CheckpointError:
        return digest_state([], _tensors(batch))
    return digest_state(tree, _comparable(arrays))


def _tensors(batch: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(batch, found.append)
    return _comparable(found)


def _comparable(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [
        each
        for each in tensors
        if each.layout == torch.strided and not (each.is_meta or each.is_nested)
    ]
