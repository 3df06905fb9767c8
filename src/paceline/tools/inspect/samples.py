"""The samples of a run on this machine: record them, and read the records of all ranks together."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from paceline.contract.foreign_records import read_tail
from paceline.contract.rank_records import (
    Batch,
    EpochEnd,
    EpochStart,
    Items,
    LoaderFacts,
    Record,
    Trained,
    read_records,
)
from paceline.contract.run_folder import DONE, INTERRUPTED_EXIT
from paceline.errors import LaunchError
from paceline.launch.agents import ParallelRuns
from paceline.launch.local_run import LocalRun
from paceline.spec.job import Job, Program
from paceline.spec.option import Flag
from paceline.watch.failure import describe_failure

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


MODULE = "paceline.runtime.data.inspection"  # of the other half: it runs in the ranks
RECORDS = "samples"
TAIL = 4096  # bytes of the log that may say why the run failed
INTERRUPT_INTERVAL = 1.0  # seconds: two signals at once may arrive as one


@dataclass(frozen=True)
class Request:
    """What to record."""

    program: Program
    epochs: int = 2
    limit: int | None = None  # steps of each epoch; None: all of them

    def recorder(self, folder: Path, cwd: Path) -> Program:
        """Return the program that runs the script and records its loaders."""
        script = (
            ("-m", self.program.name) if self.program.is_module else (str(cwd / self.program.name),)
        )
        args = (
            str(folder / RECORDS),
            str(self.epochs),
            str(self.limit or 0),
            *script,
            *self.program.args,
        )
        return Program(MODULE, args, is_module=True)


def overrides(folder: Path) -> list[Flag]:
    """Return the settings of a run that nobody wants to keep: its own folder, no copy of the code,
    no trackers.
    """
    return [
        Flag("--scratch", "project.scratch", str(folder)),
        Flag("--no-snapshot", "project.snapshot", False),
        Flag("--no-wandb", "tracking.wandb", False),
        Flag("--no-tensorboard", "tracking.tensorboard", False),
        Flag("--max-attempts", "resume.max_attempts", 1),
    ]


def record(job: Job, folder: Path, command: Sequence[str]) -> Samples:
    """Run the job, and return what its ranks recorded in `folder`."""
    (folder / RECORDS).mkdir()
    run = LocalRun(job)
    run.prepare(command)
    verdicts: list[str] = []
    runs = ParallelRuns(1)
    again = 0.0

    def end_at_once() -> None:
        """There is nothing to save, and a rank that only reads its loader reaches no boundary
        between steps.
        """
        nonlocal again
        if runs.stopping and time.monotonic() >= again:
            again = time.monotonic() + INTERRUPT_INTERVAL
            runs.interrupt()

    runs.run(
        [0],
        begin=lambda *_: run.plan,
        end=lambda _, verdict: verdicts.append(verdict),
        stop=lambda _: None,
        poll=end_at_once,
    )
    if runs.interrupted:
        raise SystemExit(INTERRUPTED_EXIT)
    failure: list[str] = []
    if verdicts != [DONE]:
        run_folder = run.plan.run_path.folder
        log = read_tail(run_folder.slurm_log, TAIL).decode(errors="replace").splitlines()
        failure = [
            line for line in describe_failure(run_folder) if "paceline logs" not in line
        ] or log[-5:]
    samples = read_samples(folder / RECORDS, failure)
    if samples is None:
        if failure:
            raise LaunchError(
                "The script failed before it read any data.", hint="\n  ".join(failure)
            )
        raise LaunchError(
            "The script used neither run.loader nor a DataLoader.",
            hint="Pass the arguments that you train with. Paceline does not see loaders in "
            "processes that the script "
            "starts itself.",
        )
    return samples
