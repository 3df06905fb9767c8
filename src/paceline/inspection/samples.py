"""Which rank got which samples: the records of all ranks together."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from paceline.contract.files.sample_records import Batch, EpochEnd, EpochStart, LoaderFacts, read_records

Key = int | str


@dataclass(frozen=True)
class RankSamples:
    """What one rank recorded."""

    facts: LoaderFacts
    batches: list[Batch]
    ended: frozenset[int]  # epochs that it read to their end

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
        """Return whether all ranks get the same as in another epoch, in the same order, as far as both were read."""
        compared = 0
        for rank, batches in self.ranks.items():
            mine, theirs = ([text for batch in each for text in batch.digests or batch.keys]
                            for each in (batches, other.ranks.get(rank, [])))  # fmt: skip
            common = min(len(mine), len(theirs))
            if mine[:common] != theirs[:common]:
                return False
            compared += common
        return compared > 0

    @property
    def steps(self) -> dict[int, int]:
        """The number of steps of each rank."""
        return {rank: 1 + max((batch.step for batch in batches), default=-1) for rank, batches in self.ranks.items()}


@dataclass(frozen=True)
class Samples:
    """What all ranks recorded. `failure` says why the script failed, if it did."""

    ranks: Sequence[RankSamples]
    failure: Sequence[str] = field(default_factory=list)

    @property
    def facts(self) -> LoaderFacts:
        return self.ranks[0].facts

    @cached_property
    def epochs(self) -> list[Epoch]:
        numbers = sorted({batch.epoch for rank in self.ranks for batch in rank.batches})
        return [
            Epoch(
                number, {rank.facts.rank: rank.of_epoch(number) for rank in self.ranks},
                all(number in rank.ended for rank in self.ranks),
            )
            for number in numbers
        ]  # fmt: skip


def read_samples(folder: Path, failure: Sequence[str] = ()) -> Samples | None:
    """Return what the ranks recorded, or None if no loader was used."""
    ranks = []
    for path in folder.glob("rank-*.jsonl"):
        records = list(read_records(path))
        facts = next((each for each in records if isinstance(each, LoaderFacts)), None)
        if facts is not None:
            begun = {each.epoch: index for index, each in enumerate(records) if isinstance(each, EpochStart)}
            batches = [
                each
                for index, each in enumerate(records)
                if isinstance(each, Batch) and index > begun.get(each.epoch, 0)
            ]
            ended = frozenset(each.epoch for each in records if isinstance(each, EpochEnd))
            ranks.append(RankSamples(facts, batches, ended))
    ranks.sort(key=lambda each: each.facts.rank)
    return Samples(ranks, failure) if any(rank.batches for rank in ranks) else None
