"""What is said about who gets which samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from paceline.contract.rank_records import LoaderFacts
from paceline.spec.findings import GOOD, PROBLEM, WARNING
from paceline.tools.inspect.samples import RankSamples, Samples, check_samples

Epochs = Sequence[Sequence[list[Any]]]  # of one rank: epochs of batches


def recorded(
    ranks: Sequence[Epochs], *, ends: bool = True, items: Any = ((), ()), **facts: Any
) -> Samples:
    found = []
    for rank, epochs in enumerate(ranks):
        own = RankSamples(LoaderFacts(rank, len(ranks), **{"kind": "run.loader", **facts}))
        own.items = list(items[rank])
        for epoch, batches in enumerate(epochs):
            for step, keys in enumerate(batches):
                own.batches[epoch, step] = {"epoch": epoch, "step": step, "keys": keys}
            own.ended |= {epoch} if ends else set()
        found.append(own)
    return Samples(found)


PLAIN = {"kind": "DataLoader", "samples": 8, "batch_size": 2, "drop_last": False}
SPLIT = [[[[0, 2], [4, 6]], [[3, 1], [6, 4]]], [[[1, 3], [5, 7]], [[0, 2], [7, 5]]]]
SAME = [[[[0, 2]], [[0, 2]]], [[[1, 3]], [[1, 3]]]]
DIFFERS = (GOOD, "differs between epochs 0 and 1")
ONE_EPOCH = (WARNING, "Only one epoch")

# The records, the facts, and the level and words of each finding.
CASES: dict[str, tuple[Sequence[Epochs], dict[str, Any], list[tuple[str, str]]]] = {
    "good": (
        SPLIT,
        {"samples": 8, "batch_size": 4},
        [(GOOD, "all 8 samples once")] * 2 + [DIFFERS],
    ),
    "a tail": (
        SPLIT,
        {"samples": 9, "batch_size": 4},
        [(GOOD, "1 don't fill a last batch, different")] * 2 + [DIFFERS],
    ),
    "a tail that is always the same": (
        SPLIT,
        {"samples": 9, "batch_size": 4, "shuffled": False, "sampler": "DistributedSampler"},
        [(WARNING, "No rank gets 1 of 9 samples (8). The last batch is dropped")] * 2 + [DIFFERS],
    ),
    "not split": (
        [[[[0, 1], [2, 3]], [[3, 2], [1, 0]]]] * 2,
        {**PLAIN, "samples": 4},
        [(PROBLEM, "Every rank reads all 4 samples: each counts 2 times")] * 2 + [DIFFERS],
    ),
    "not split, and each drops another tail": (
        [[[[0, 1], [2, 3]]], [[[3, 4], [1, 0]]]],
        {**PLAIN, "samples": 5, "sampler": "RandomSampler"},
        [(PROBLEM, "Every rank reads all 5 samples"), ONE_EPOCH],
    ),
    "own data": (
        [[[[0, 1]], [[1, 0]]]] * 2,
        {**PLAIN, "samples": 2, "sampler": "RandomSampler", "items": [["a"], ["b"]]},
        [(GOOD, "all 4 samples once")] * 2 + [DIFFERS],
    ),
    "no set_epoch": (
        SAME,
        {**PLAIN, "samples": 4, "sampler": "DistributedSampler"},
        [(GOOD, "all 4")] * 2 + [(PROBLEM, "same order in epochs 0 and 1")],
    ),
    "not shuffled": (
        SAME,
        {**PLAIN, "samples": 4, "shuffled": False},
        [(GOOD, "all 4")] * 2 + [(WARNING, "isn't shuffled")],
    ),
    "padded": (
        [[[[0, 2]], [[2, 0]]], [[[1, 0]], [[0, 1]]]],
        {**PLAIN, "samples": 3, "sampler": "DistributedSampler"},
        [(WARNING, "1 sample (0). DistributedSampler repeats")] * 2 + [DIFFERS],
    ),
    "different orders": (
        [[[[0, 1], [2, 3]]], [[[3, 1], [6, 4]]]],
        PLAIN,
        [(PROBLEM, "More than once: 2 samples (1, 3)"), ONE_EPOCH],
    ),
    "uneven": (
        [[[[0, 1], [2, 3]], [[1, 0], [3, 2]]], [[[4, 5]], [[5, 4]]]],
        {**PLAIN, "samples": 6},
        [(PROBLEM, "different numbers of batches: 2 on rank 0, 1 on rank 1"), (GOOD, "all 6")] * 2
        + [DIFFERS],
    ),
    "weighted": (
        [[[[0, 0], [2, 3]]]],
        {"samples": 4, "batch_size": 2, "sampler": "WeightedRandomSampler"},
        [(WARNING, "draws 1 sample more than once"), ONE_EPOCH],
    ),
    "filtered": (
        [[[[0], [2, 3]]]],
        {**PLAIN, "samples": 4, "sampler": "SubsetRandomSampler"},
        [(WARNING, "SubsetRandomSampler leaves out 1 of 4"), ONE_EPOCH],
    ),
    "a sampler that loses samples": (
        [[[[0, 2]]], [[[1, 4]]]],
        {**PLAIN, "samples": 9, "sampler": "DistributedSampler"},
        [(PROBLEM, "No rank gets 5 of 9 samples (3, 5, 6, 7, 8)"), ONE_EPOCH],
    ),
    "a stream": (
        SAME,
        {"batch_size": 4},
        [(GOOD, "4 samples once")] * 2
        + [(WARNING, "stream comes in the same order in epochs 0 and 1")],
    ),
    "two streams": (
        SPLIT,
        {"items": [["a", "b"], ["a", "c"]]},
        [(PROBLEM, "Rank 1 has different data from rank 0: item 1 differs"), DIFFERS],
    ),
    "a stream that every rank reads": (
        [[[["x", "y"]], [["y", "x"]]]] * 2,
        {"kind": "DataLoader", "by_content": True, "batch_size": 2},
        [(PROBLEM, "Every rank reads all 2 samples")] * 2 + [DIFFERS],
    ),
    "a stream that every worker reads": (
        [[[["x", "y"], ["x", "y"]]], [[["a", "b"], ["a", "b"]]]],
        {"kind": "DataLoader", "by_content": True, "batch_size": 2, "num_workers": 2},
        [(PROBLEM, "Each of the 2 workers reads all samples of its rank"), ONE_EPOCH],
    ),
    "random contents": (
        [[[["a", "b"]], [["e", "f"]]], [[["c", "d"]], [["g", "h"]]]],
        {"by_content": True, "batch_size": 4},
        [(GOOD, "4 samples once, none twice (by their contents)")] * 2
        + [(WARNING, "nothing in common")],
    ),
    "equal contents": (
        [[[["x", "y"]], [["y", "x"]]], [[["x", "z"]], [["z", "x"]]]],
        {"by_content": True, "batch_size": 4},
        [(WARNING, "The same contents as another sample: 1 sample")] * 2 + [DIFFERS],
    ),
    "an epoch that was not read to its end": (
        SPLIT,
        {"samples": 100, "batch_size": 4, "ends": False},
        [(GOOD, "8 samples of the steps seen once, none twice")] * 2 + [DIFFERS],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_fault_is_named_and_nothing_else(case: str) -> None:
    ranks, facts, expected = CASES[case]
    findings = check_samples(recorded(ranks, **facts))
    assert [finding.level for finding in findings] == [level for level, _ in expected], findings
    for finding, (_, words) in zip(findings, expected, strict=True):
        assert words in finding.text
        assert finding.level == GOOD or finding.hint


def test_a_rank_without_data_and_a_failed_script() -> None:
    ranks = recorded(SPLIT, samples=8, batch_size=4).ranks
    failure = ["rank 1 on node: ValueError: boom", "  at train.py:3"]
    findings = check_samples(Samples(ranks[:1], failure))
    assert "ValueError: boom" in findings[0].text
    assert "No data reached rank 1" in findings[1].text
