"""Check the samples of epochs: every sample once, none twice, and another order in each epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations

from paceline.contract.rank_records import CONTENT, INDEX, POSITION
from paceline.spec.findings import GOOD, PROBLEM, WARNING, Finding
from paceline.tools.inspect.samples import Epoch, Key, Samples

WITH_REPLACEMENT = ("WeightedRandomSampler", "RandomSampler(replacement=True)")
NEARLY_ALL = 0.9  # of the items: with --limit, the last ones have not come from all workers
SHOWN = 5  # samples that a finding names


def check_samples(samples: Samples) -> list[Finding]:
    """Return what is good and what is wrong about who gets which samples."""
    findings = [*_check_failure(samples), *_check_ranks(samples)]
    for epoch in samples.epochs:
        findings += _check_steps(samples, epoch)
        if samples.has_own_data:
            findings += _check_own_data(samples, epoch)
        # else the keys of two ranks do not name the same samples
        elif samples.different_item is None:
            findings += _check_coverage(samples, epoch)
    return [*findings, *_check_order(samples)]


def _check_failure(samples: Samples) -> Iterator[Finding]:
    if samples.failure:
        yield Finding(
            "script",
            PROBLEM,
            f"The script failed: {samples.failure[0]}",
            "\n".join(samples.failure[1:]),
        )


def _check_ranks(samples: Samples) -> Iterator[Finding]:
    """Check that all ranks have the same dataset, and read the same stream."""
    facts = [rank.facts for rank in samples.ranks]
    world_size = facts[0].world_size
    if len(facts) < world_size:
        missing = sorted(set(range(world_size)) - {each.rank for each in facts})
        yield Finding(
            "ranks",
            PROBLEM,
            f"No data reached rank {_list(missing)}.",
            "Every rank needs its own loader.",
        )
    sizes = {each.rank: each.samples for each in facts}
    if samples.different_item is not None and not samples.has_own_data:
        rank, index = samples.different_item
        what = "run.loader" if facts[0].kind == "run.loader" else facts[0].sampler
        yield Finding(
            "dataset",
            PROBLEM,
            f"Rank {rank} has a different dataset from rank 0: item {index} differs. {what} splits "
            f"it again, so each rank reads about 1/{world_size} of its own data, and nobody reads "
            "the rest.",
            "Let every rank open the whole dataset; the loader splits it. Or leave your own "
            "split, and use a plain "
            "DataLoader without a DistributedSampler.",
        )
    elif len(set(sizes.values())) > 1 and not samples.has_own_data:
        text = ", ".join(f"{size} on rank {rank}" for rank, size in sizes.items())
        yield Finding(
            "dataset",
            PROBLEM,
            f"The ranks have datasets of different sizes: {text}.",
            "Let every rank open the whole dataset; the loader splits it.",
        )
    first = facts[0].beginning
    for each in facts[1:]:
        if each.beginning != first:
            where = next(
                (
                    i
                    for i, pair in enumerate(zip(first, each.beginning, strict=False))
                    if pair[0] != pair[1]
                ),
                min(len(first), len(each.beginning)),
            )
            yield Finding(
                "stream",
                PROBLEM,
                f"Rank {each.rank} reads a different stream from rank 0: they differ from item "
                f"{where} on.",
                "The loader gives item i to rank i mod world size, so all ranks must read the "
                "same stream. If the "
                "dataset splits itself by rank, pass sharded=True to run.loader.",
            )
            return


def _check_steps(samples: Samples, epoch: Epoch) -> Iterator[Finding]:
    steps = epoch.steps
    if len(set(steps.values())) == 1:
        return
    text = ", ".join(f"{count} on rank {rank}" for rank, count in list(steps.items())[:8])
    hint = (
        "All-reduce of the gradients waits for every rank, so this hangs or fails. Use "
        "run.loader, which ends the "
        "epoch on all ranks together, torch's Join, or the same number of batches on each rank."
    )
    yield Finding(
        f"epoch {epoch.number}",
        PROBLEM,
        f"The ranks have different numbers of batches: {text}.",
        hint,
    )


def _check_coverage(samples: Samples, epoch: Epoch) -> Iterator[Finding]:
    about = f"epoch {epoch.number}"
    facts, counts = samples.facts, epoch.counts
    twice = [key for key, count in counts.items() if count > 1]
    distinct = len(counts)
    if (
        facts.world_size > 1
        and twice
        and (samples.is_unsplit or _all_read_all(epoch, facts.world_size))
    ):
        hint = "Split the data: use run.loader, or give the DataLoader a DistributedSampler."
        if facts.keys == CONTENT:
            hint = (
                "Let the stream skip the items of other ranks, or use run.loader, which splits it."
            )
        text = f"Every rank reads all {distinct:,} samples: each counts {facts.world_size} times."
        yield Finding(about, PROBLEM, text, hint)
        return
    part = "" if epoch.is_whole else " of the steps seen"
    if twice:
        yield _explain_twice(samples, epoch, twice)
    missing = _count_missing(samples, epoch)
    if missing > 0:
        yield _explain_missing(samples, epoch, missing)
    if not twice and missing <= 0:
        what = f"all {distinct:,}" if epoch.is_whole and facts.keys == INDEX else f"{distinct:,}"
        known = " (by their contents)" if facts.keys == CONTENT else ""
        yield Finding(about, GOOD, f"{what} samples{part} once, none twice{known}")


def _check_own_data(samples: Samples, epoch: Epoch) -> Iterator[Finding]:
    """Check that each rank reads all of its own dataset once."""
    about, missing, total, largest = f"epoch {epoch.number}", 0, 0, 0
    for rank in samples.ranks:
        keys = [key for batch in epoch.ranks[rank.facts.rank] for key in batch.keys]
        if len(set(keys)) < len(keys):
            text = (
                f"Rank {rank.facts.rank} reads {_count(len(keys) - len(set(keys)))} of its "
                "dataset more than once."
            )
            yield Finding(about, PROBLEM, text, "Check the sampler.")
            return
        total += len(keys)
        missing += (rank.facts.samples or len(keys)) - len(keys)
        largest += rank.facts.batch_size or 0
    own = "each rank reads all of a dataset of its own"
    if not epoch.is_whole:
        yield Finding(
            about,
            GOOD,
            f"{total:,} samples of the steps seen once, none twice; each rank has its own data",
        )
    elif missing and not (samples.facts.drop_last and missing < max(1, largest)):
        yield Finding(
            about,
            PROBLEM,
            f"No rank gets {missing:,} of {total + missing:,} samples.",
            "Check the sampler.",
        )
    elif missing:
        yield Finding(
            about,
            GOOD,
            f"{total:,} samples once, none twice; {missing:,} don't fill a last batch (drop_last)",
        )
    else:
        yield Finding(about, GOOD, f"all {total:,} samples once, none twice: {own}")


def _count_missing(samples: Samples, epoch: Epoch) -> int:
    """Return how many samples no rank got. Of a stream, only gaps are known, not what follows its
    last sample.
    """
    keys = [key for key in epoch.counts if isinstance(key, int)]
    if samples.facts.keys == POSITION:
        return 1 + max(keys, default=-1) - len(keys)
    known = samples.facts.samples if samples.facts.keys == INDEX and epoch.is_whole else None
    return known - len(epoch.counts) if known is not None else 0


def _explain_twice(samples: Samples, epoch: Epoch, twice: Sequence[Key]) -> Finding:
    facts, about = samples.facts, f"epoch {epoch.number}"
    readers = sorted({rank for key in twice for rank in epoch.readers[key]})
    count, where = (
        _count(len(twice)),
        f"on {'rank' if len(readers) == 1 else 'ranks'} {_list(readers)}",
    )
    text = f"More than once, {where}: {count} ({_list(twice)})."
    if facts.keys == CONTENT and _workers_read_all(samples, epoch):
        return Finding(
            about,
            PROBLEM,
            f"Each of the {facts.num_workers} workers reads all samples of its rank: each counts "
            f"{facts.num_workers} times.",
            "Split the stream by worker, too: torch.utils.data.get_worker_info() tells the "
            "dataset which worker it is "
            "in. Or use run.loader, which splits it.",
        )
    if facts.keys == CONTENT:
        text = f"The same contents as another sample, {where}: {count}."
        hint = (
            "Paceline tells the items of such a stream apart by their contents. If your data has "
            "no duplicate items, "
            'the stream isn\'t split by rank and worker: see Data, "Streams", in the documentation.'
        )
        return Finding(about, WARNING, text, hint)
    if facts.sampler in WITH_REPLACEMENT or (facts.kind == "run.loader" and facts.sampler):
        return Finding(
            about,
            WARNING,
            f"{facts.sampler} draws {count} more than once.",
            "This is expected when sampling with replacement.",
        )
    padding = (
        facts.samples is not None
        and sum(epoch.counts.values()) - len(epoch.counts) < facts.world_size
    )
    if facts.sampler == "DistributedSampler" and padding:
        return Finding(
            about,
            WARNING,
            f"{text} DistributedSampler repeats the first samples to give all ranks the same "
            "number.",
            "Harmless in training; an evaluation counts them twice. run.loader and run.evaluate "
            "don't repeat any.",
        )
    return Finding(
        about,
        PROBLEM,
        text,
        "Check that the ranks agree on the order: the same seed, the same set_epoch.",
    )


def _explain_missing(samples: Samples, epoch: Epoch, missing: int) -> Finding:
    facts, about = samples.facts, f"epoch {epoch.number}"
    total = facts.samples or len(epoch.counts) + missing
    left = [key for key in range(total) if key not in epoch.counts][: SHOWN + 1]
    text = f"No rank gets {missing:,} of {total:,} samples ({_list(left)})."
    drops_tail = facts.drop_last and facts.keys == INDEX
    size = facts.batch_size or 0
    tail = size if facts.kind == "run.loader" else size * facts.world_size
    if facts.sampler and facts.sampler not in (
        "RandomSampler",
        "SequentialSampler",
        "DistributedSampler",
    ):
        return Finding(
            about,
            WARNING,
            f"{facts.sampler} leaves out {missing:,} of {total:,} samples.",
            "This is expected if the sampler weights or filters samples.",
        )
    if (
        drops_tail
        and (not facts.sampler or facts.shuffled)
        and missing < max(1, tail + facts.world_size)
    ):
        other = ", different ones in each epoch" if facts.shuffled else ""
        seen = f"{len(epoch.counts):,} samples once, none twice"
        return Finding(
            about, GOOD, f"{seen}; {missing:,} don't fill a last batch{other} (drop_last)"
        )
    if drops_tail and missing < tail + facts.world_size:
        hint = (
            "Shuffle, so that each epoch leaves out different samples, or keep the last batch "
            "with drop_last=False."
        )
        return Finding(about, WARNING, f"{text} The last batch is dropped (drop_last).", hint)
    return Finding(
        about,
        PROBLEM,
        text,
        "Check that the ranks agree on the order: the same seed, the same set_epoch.",
    )


def _check_order(samples: Samples) -> Iterator[Finding]:
    if len(samples.epochs) < 2:
        yield Finding(
            "order",
            WARNING,
            "Only one epoch was seen, so the orders of two epochs can't be compared.",
            "Let the script train for two epochs.",
        )
        return
    epochs, facts = samples.epochs, samples.facts
    equal = [pair for pair in combinations(epochs, 2) if pair[1].has_order_of(pair[0])]
    compared = (
        f"epochs {epochs[0].number} {'and' if len(epochs) == 2 else 'to'} {epochs[-1].number}"
    )
    same = compared
    if equal and len(equal) < len(epochs) * (len(epochs) - 1) / 2:
        same = f"epochs {equal[0][0].number} and {equal[0][1].number}"
    if facts.keys == CONTENT and epochs[0].counts.keys().isdisjoint(epochs[1].counts):
        hint = (
            "Paceline tells the items of this stream apart by their contents. Turn off random "
            "augmentation."
        )
        text = f"The items of {compared} have nothing in common, so their order can't be compared."
        yield Finding("order", WARNING, text, hint)
    elif not equal:
        yield Finding("order", GOOD, f"differs between {compared}")
    elif facts.shuffled is False:
        yield Finding(
            "order",
            WARNING,
            f"The data isn't shuffled: {same} have the same order.",
            "This is fine for evaluation; for training, use shuffle=True.",
        )
    elif facts.keys != INDEX:
        yield Finding(
            "order",
            WARNING,
            f"The stream comes in the same order in {same}.",
            "Shuffle in the dataset: set_epoch(epoch) tells it which epoch it is.",
        )
    else:
        hint = (
            "Call sampler.set_epoch(epoch) before each epoch."
            if facts.sampler == "DistributedSampler"
            else (
                "Let the sampler draw from torch's generator, or from the epoch that "
                "set_epoch(epoch) gives it."
            )
        )
        yield Finding("order", PROBLEM, f"The samples come in the same order in {same}.", hint)


def _workers_read_all(samples: Samples, epoch: Epoch) -> bool:
    """Return whether a rank gets nearly every item as often as it has workers."""
    workers = samples.facts.num_workers
    for batches in epoch.ranks.values():
        counts = Counter(key for batch in batches for key in batch.keys)
        often = sum(count >= workers for count in counts.values())
        if workers < 2 or not counts or often < NEARLY_ALL * len(counts):
            return False
    return True


def _all_read_all(epoch: Epoch, world_size: int) -> bool:
    return all(len(ranks) == world_size for ranks in epoch.readers.values())


def _count(number: int) -> str:
    return f"{number:,} sample{'' if number == 1 else 's'}"


def _list(things: Sequence[Key]) -> str:
    text = ", ".join(map(str, things[:SHOWN]))
    return text if len(things) <= SHOWN else f"{text}, ..."
