"""Read which samples each rank got, and check two epochs: every sample once, none twice, and
another order in each.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from paceline.contract.foreign_records import make, read_objects
from paceline.contract.rank_records import BATCH, EPOCH_END, ITEMS, TRAINED, LoaderFacts
from paceline.spec.findings import GOOD, PROBLEM, WARNING, Finding

Key = int | str
UNSPLIT = ("RandomSampler", "SequentialSampler")  # they give each rank all of its dataset
NEARLY_ALL = 0.9  # of the items: with --limit, the last ones have not come from all workers
SHOWN = 5  # samples that a finding names
AGREE = "Check that the ranks agree on the order: the same seed, the same set_epoch."


@dataclass
class RankSamples:
    """What one rank recorded of a loader."""

    facts: LoaderFacts
    # by epoch and step: each has these two, and the keys of its samples
    batches: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)  # epochs that it read to their end
    # digests of the first items of its dataset; None if one is not always the same
    items: list[str | None] = field(default_factory=list)
    is_trained: bool = False

    @classmethod
    def read(cls, path: Path) -> RankSamples:
        records = read_objects(path)
        first = next(records)  # a file is made with it
        found = cls(make(LoaderFacts, first))
        for record in records:
            kind = record.pop("record")
            if kind == BATCH:
                found.batches[record["epoch"], record["step"]] = record
            elif kind == ITEMS:
                found.items = record["digests"]
            elif kind == EPOCH_END:
                found.ended.add(record["epoch"])
            elif kind == TRAINED:
                found.is_trained = True
        return found


@dataclass(frozen=True)
class Epoch:
    """One epoch of all ranks."""

    number: int
    keys: dict[int, list[Key]]  # the samples of each rank
    steps: dict[int, int]  # how many each rank has
    is_whole: bool  # every rank read it to its end

    @cached_property
    def counts(self) -> Counter[Key]:
        return Counter(chain.from_iterable(self.keys.values()))


@dataclass(frozen=True)
class Samples:
    """What all ranks recorded. `failure` says why the script failed, if it did."""

    ranks: Sequence[RankSamples]
    failure: Sequence[str] = ()

    @property
    def facts(self) -> LoaderFacts:
        return self.ranks[0].facts

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
        return self.facts.kind == "DataLoader" and self.facts.sampler in UNSPLIT

    @property
    def has_own_data(self) -> bool:
        """Whether each rank reads all of a dataset of its own."""
        return self.is_unsplit and self.different_item is not None

    @cached_property
    def epochs(self) -> list[Epoch]:
        return [
            self._epoch(number)
            for number in sorted({epoch for rank in self.ranks for epoch, _ in rank.batches})
        ]

    def _epoch(self, number: int) -> Epoch:
        keys: dict[int, list[Key]] = {}
        steps = {}
        for rank in self.ranks:
            batches = [each["keys"] for each in rank.batches.values() if each["epoch"] == number]
            own = list(chain.from_iterable(batches))
            if self.has_own_data:  # equal keys of two ranks are different samples
                own = [f"{rank.facts.rank}:{key}" for key in own]
            keys[rank.facts.rank], steps[rank.facts.rank] = own, len(batches)
        return Epoch(number, keys, steps, all(number in rank.ended for rank in self.ranks))


def read_samples(folder: Path, failure: Sequence[str] = ()) -> Samples | None:
    """Return what the ranks recorded of the loader that they train with, or None if no loader was
    used.

    It is the one whose steps have a backward pass; of several, the one with the most samples.
    Without any, it is the first one that the script reads.
    """
    loaders: dict[str, list[RankSamples]] = defaultdict(list)
    for path in sorted(folder.glob("rank-*.jsonl")):
        loaders[path.stem.partition("-loader-")[2]].append(RankSamples.read(path))
    used = [ranks for _, ranks in sorted(loaders.items()) if any(rank.batches for rank in ranks)]
    if not used:
        return None
    trained = [ranks for ranks in used if any(rank.is_trained for rank in ranks)]
    chosen = max(trained, key=_count_samples, default=used[0])
    return Samples(sorted(chosen, key=lambda each: each.facts.rank), failure)


def _count_samples(ranks: list[RankSamples]) -> int:
    return sum(len(each["keys"]) for rank in ranks for each in rank.batches.values())


def check_samples(samples: Samples) -> list[Finding]:
    """Return what is good and what is wrong about who gets which samples."""
    findings = list(_check_ranks(samples))
    for epoch in samples.epochs:
        findings += _check_steps(epoch)
        # else the keys of two ranks do not name the same samples
        if samples.different_item is None or samples.has_own_data:
            findings.append(_check_coverage(samples, epoch))
    return [*findings, _check_order(samples)]


def _check_ranks(samples: Samples) -> Iterator[Finding]:
    """Check that the script ran, and that all ranks have the same dataset, or read the same
    stream.
    """
    facts = [rank.facts for rank in samples.ranks]
    first = facts[0]
    if samples.failure:
        text, rest = f"The script failed: {samples.failure[0]}", "\n".join(samples.failure[1:])
        yield Finding("script", PROBLEM, text, rest)
    missing = sorted(set(range(first.world_size)) - {each.rank for each in facts})
    if missing:
        text = f"No data reached rank {_list(missing)}."
        yield Finding("ranks", PROBLEM, text, "Every rank needs its own loader.")
    if samples.different_item is not None and not samples.has_own_data:
        rank, index = samples.different_item
        splits = f"{first.sampler or first.kind} splits it again"
        text = f"Rank {rank} has different data from rank 0: item {index} differs. {splits}, so "
        text += f"each rank reads about 1/{first.world_size} of its own, and nobody reads the rest."
        hint = (
            "Let every rank open the whole dataset, and the loader split it. Or leave your own "
            "split: pass sharded=True to run.loader for a stream, or use a plain DataLoader "
            "without a DistributedSampler."
        )
        yield Finding("dataset", PROBLEM, text, hint)


def _check_steps(epoch: Epoch) -> Iterator[Finding]:
    steps = epoch.steps
    if len(set(steps.values())) == 1:
        return
    text = ", ".join(f"{count} on rank {rank}" for rank, count in list(steps.items())[:8])
    hint = (
        "All-reduce of the gradients waits for every rank, so this hangs or fails. Use "
        "run.loader, which ends the epoch on all ranks together, torch's Join, or the same number "
        "of batches on each rank."
    )
    about = f"epoch {epoch.number}"
    text = f"The ranks have different numbers of batches: {text}."
    yield Finding(about, PROBLEM, text, hint)


def _check_coverage(samples: Samples, epoch: Epoch) -> Finding:
    about = f"epoch {epoch.number}"
    facts, counts = samples.facts, epoch.counts
    twice = [key for key, count in counts.items() if count > 1]
    if twice:
        return Finding(about, *_explain_twice(samples, epoch, twice))
    total = facts.samples
    if samples.has_own_data:
        total = sum(rank.facts.samples or 0 for rank in samples.ranks)
    missing = 0 if total is None or not epoch.is_whole else total - len(counts)
    if missing > 0:
        return Finding(about, *_explain_missing(samples, epoch, missing))
    what = f"all {len(counts):,}" if total and epoch.is_whole else f"{len(counts):,}"
    part = "" if epoch.is_whole else " of the steps seen"
    known = " (by their contents)" if facts.by_content else ""
    return Finding(about, GOOD, f"{what} samples{part} once, none twice{known}")


def _explain_twice(samples: Samples, epoch: Epoch, twice: Sequence[Key]) -> tuple[str, str, str]:
    """Return the level, the text and the hint about samples that are used more than once."""
    facts, counts = samples.facts, epoch.counts
    number = f"{len(twice):,} sample{'' if len(twice) == 1 else 's'}"
    reads_all = all(len(set(keys)) == len(counts) for keys in epoch.keys.values())
    if facts.world_size > 1 and (reads_all or samples.is_unsplit):
        text = (
            f"Every rank reads all {len(counts):,} samples: each counts {facts.world_size} times."
        )
        hint = "Split the data: use run.loader, or give the DataLoader a DistributedSampler."
        if facts.by_content:
            hint = (
                "Let the stream skip the items of other ranks, or use run.loader, which splits it."
            )
        return PROBLEM, text, hint
    workers = facts.num_workers
    if facts.by_content and workers > 1 and len(twice) > NEARLY_ALL * len(counts):
        text = f"Each of the {workers} workers reads all samples of its rank: each "
        hint = (
            "Split the stream by worker, too: torch.utils.data.get_worker_info() tells the "
            "dataset which worker it is in. Or use run.loader, which splits it."
        )
        return PROBLEM, f"{text}counts {workers} times.", hint
    if facts.by_content:
        hint = (
            "Paceline tells the items of such a stream apart by their contents. If your data has "
            'no duplicate items, the stream isn\'t split by rank and worker: see Data, "Streams", '
            "in the documentation."
        )
        return WARNING, f"The same contents as another sample: {number}.", hint
    if facts.sampler.endswith("replacement") or (facts.kind == "run.loader" and facts.sampler):
        hint = "This is expected when sampling with replacement."
        return WARNING, f"{facts.sampler} draws {number} more than once.", hint
    text = f"More than once: {number} ({_list(twice)})."
    if facts.sampler == "DistributedSampler" and counts.total() - len(counts) < facts.world_size:
        text += " DistributedSampler repeats the first samples to give all ranks the same number."
        hint = (
            "Harmless in training; an evaluation counts them twice. run.loader and run.evaluate "
            "don't repeat any."
        )
        return WARNING, text, hint
    return PROBLEM, text, AGREE


def _explain_missing(samples: Samples, epoch: Epoch, missing: int) -> tuple[str, str, str]:
    """Return the level, the text and the hint about samples that no rank gets."""
    facts = samples.facts
    total = len(epoch.counts) + missing
    if facts.sampler not in ("", "DistributedSampler", *UNSPLIT):
        text = f"{facts.sampler} leaves out {missing:,} of {total:,} samples."
        return WARNING, text, "This is expected if the sampler weights or filters samples."
    tail = (facts.batch_size or 0) * (1 if facts.kind == "run.loader" else facts.world_size)
    drops_tail = facts.drop_last and missing < tail + facts.world_size
    if drops_tail and (facts.shuffled or not facts.sampler or samples.has_own_data):
        other = ", different ones in each epoch" if facts.shuffled else ""
        text = f"{len(epoch.counts):,} samples once, none twice; {missing:,} don't fill a last "
        return GOOD, f"{text}batch{other} (drop_last)", ""
    left = [key for key in range(total) if key not in epoch.counts][: SHOWN + 1]
    text = f"No rank gets {missing:,} of {total:,} samples ({_list(left)})."
    if drops_tail:
        hint = (
            "Shuffle, so that each epoch leaves out different samples, or keep the last batch "
            "with drop_last=False."
        )
        return WARNING, f"{text} The last batch is dropped (drop_last).", hint
    return PROBLEM, text, AGREE


def _check_order(samples: Samples) -> Finding:
    if len(samples.epochs) < 2:
        text = "Only one epoch was seen, so the orders of two epochs can't be compared."
        return Finding("order", WARNING, text, "Let the script train for two epochs.")
    first, second = samples.epochs
    facts, same = samples.facts, "in epochs 0 and 1"
    if facts.by_content and first.counts.keys().isdisjoint(second.counts):
        text = "The items of epochs 0 and 1 have nothing in common, so their order can't be "
        hint = (
            "Paceline tells the items of this stream apart by their contents. Turn off random "
            "augmentation."
        )
        return Finding("order", WARNING, f"{text}compared.", hint)
    pairs = [
        pair
        for rank in first.keys
        for pair in zip(first.keys[rank], second.keys[rank], strict=False)
    ]
    if any(before != after for before, after in pairs):
        return Finding("order", GOOD, "differs between epochs 0 and 1")
    if facts.samples is None:
        hint = "Shuffle in the dataset: set_epoch(epoch) tells it which epoch it is."
        return Finding("order", WARNING, f"The stream comes in the same order {same}.", hint)
    if not facts.shuffled:
        text = f"The data isn't shuffled: it comes in the same order {same}."
        hint = "This is fine for evaluation; for training, use shuffle=True."
        return Finding("order", WARNING, text, hint)
    hint = (
        "Call sampler.set_epoch(epoch) before each epoch. Another sampler should draw from torch's "
        "generator, or from the epoch that set_epoch gives it."
    )
    return Finding("order", PROBLEM, f"The samples come in the same order {same}.", hint)


def _list(things: Sequence[Key]) -> str:
    text = ", ".join(map(str, things[:SHOWN]))
    return text if len(things) <= SHOWN else f"{text}, ..."
