"""Which rank got which samples: the records of all ranks together."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from paceline.contract.sample_records import (
    Batch,
    EpochEnd,
    EpochStart,
    Items,
    LoaderFacts,
    Record,
    Trained,
    read_records,
)

Key = int | str


@dataclass(frozen=True)
class RankSamples:
    """What one rank recorded."""

    facts: LoaderFacts
    batches: list[Batch]
    ended: frozenset[int]  # epochs that it read to their end
    # digests of the first items of its dataset; None if one is not always the same
    items: Sequence[str | None] = ()

    def of_epoch(self, epoch: int) -> list[Batch]:
        return [batch for batch in self.batches if batch.epoch == epoch]


@dataclass(frozen=True)
class Epoch:
    """One epoch of all ranks."""

    number: int
    ranks: dict[int, list[Batch]]
    is_whole: bool  # every rank read it to its end

    def batches(self) -> Iterator[tuple[int, Batch]]:
        """Yield all batches with their ranks, in the order of the steps."""
        numbered = [(rank, batch) for rank, batches in self.ranks.items() for batch in batches]
        yield from sorted(numbered, key=lambda pair: (pair[1].step, pair[1].micro, pair[0]))

    @cached_property
    def order(self) -> list[Key]:
        """The samples in the order in which they are trained on."""
        return [key for _, batch in self.batches() for key in batch.keys]

    @cached_property
    def counts(self) -> Counter[Key]:
        return Counter(self.order)

    @cached_property
    def readers(self) -> dict[Key, set[int]]:
        """The ranks that got each sample."""
        found: dict[Key, set[int]] = defaultdict(set)
        for rank, batches in self.ranks.items():
            for batch in batches:
                for key in batch.keys:
                    found[key].add(rank)
        return found

    def has_order_of(self, other: Epoch) -> bool:
        """Return whether all ranks get the same as in another epoch, in the same order, as far as
        both were read.
        """
        compared = 0
        for rank, batches in self.ranks.items():
            mine, theirs = (
                [text for batch in each for text in batch.digests or batch.keys]
                for each in (batches, other.ranks.get(rank, []))
            )
            common = min(len(mine), len(theirs))
            if mine[:common] != theirs[:common]:
                return False
            compared += common
        return compared > 0

    @property
    def steps(self) -> dict[int, int]:
        """The number of steps of each rank."""
        return {
            rank: 1 + max((batch.step for batch in batches), default=-1)
            for rank, batches in self.ranks.items()
        }


@dataclass(frozen=True)
class Samples:
    """What all ranks recorded. `failure` says why the script failed, if it did."""

    ranks: Sequence[RankSamples]
    failure: Sequence[str] = field(default_factory=list)
    others: Sequence[LoaderFacts] = ()  # loaders whose samples are not judged

    @cached_property
    def different_item(self) -> tuple[int, int] | None:
        """A rank, and the first item in which its dataset differs from that of rank 0; None if
        there is none.
        """
        first = self.ranks[0].items
        for rank in self.ranks[1:]:
            for index, pair in enumerate(zip(first, rank.items, strict=False)):
                if None not in pair and pair[0] != pair[1]:
                    return rank.facts.rank, index
        return None

    @property
    def is_unsplit(self) -> bool:
        """Whether the loader gives each rank all of its dataset."""
        return self.facts.kind == "DataLoader" and self.facts.sampler in (
            "RandomSampler",
            "SequentialSampler",
        )

    @property
    def has_own_data(self) -> bool:
        """Whether each rank reads all of a dataset of its own."""
        return self.is_unsplit and self.different_item is not None

    @property
    def facts(self) -> LoaderFacts:
        return self.ranks[0].facts

    @cached_property
    def epochs(self) -> list[Epoch]:
        numbers = sorted({batch.epoch for rank in self.ranks for batch in rank.batches})
        return [
            Epoch(
                number,
                {rank.facts.rank: rank.of_epoch(number) for rank in self.ranks},
                all(number in rank.ended for rank in self.ranks),
            )
            for number in numbers
        ]


def read_samples(folder: Path, failure: Sequence[str] = ()) -> Samples | None:
    """Return what the ranks recorded of the loader that they train with, or None if no loader was
    used.

    It is the one whose batches reach a backward pass; of several, the one with the most samples.
    Without any, it is the first one that the script reads.
    """
    loaders: dict[int, list[RankSamples]] = defaultdict(list)
    trained = set()
    for path in folder.glob("rank-*.jsonl"):
        records = list(read_records(path))
        facts = next((each for each in records if isinstance(each, LoaderFacts)), None)
        if facts is not None:
            loaders[facts.number].append(_read_rank(facts, records))
            if any(isinstance(each, Trained) for each in records):
                trained.add(facts.number)
    used = [
        number for number, ranks in sorted(loaders.items()) if any(rank.batches for rank in ranks)
    ]
    if not used:
        return None

    def count(number: int) -> int:
        return sum(len(batch.keys) for rank in loaders[number] for batch in rank.batches)

    chosen = max((each for each in used if each in trained), key=count, default=used[0])
    ranks = sorted(loaders[chosen], key=lambda each: each.facts.rank)
    others = [loaders[number][0].facts for number in used if number != chosen]
    return Samples(ranks, failure, others)


def _read_rank(facts: LoaderFacts, records: Sequence[Record]) -> RankSamples:
    begun = {
        each.epoch: index for index, each in enumerate(records) if isinstance(each, EpochStart)
    }
    batches = [
        each
        for index, each in enumerate(records)
        if isinstance(each, Batch) and index > begun.get(each.epoch, 0)
    ]
    ended = frozenset(each.epoch for each in records if isinstance(each, EpochEnd))
    items = next((each.digests for each in records if isinstance(each, Items)), [])
    return RankSamples(facts, batches, ended, items)
