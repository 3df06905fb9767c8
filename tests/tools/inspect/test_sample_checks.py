"""What is said about who gets which samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.contract.rank_records import (
    CONTENT,
    INDEX,
    POSITION,
    Batch,
    EpochEnd,
    LoaderFacts,
    record_path,
    write_record,
)
from paceline.spec.findings import GOOD, PROBLEM, WARNING
from paceline.tools.inspect.sample_checks import check_samples
from paceline.tools.inspect.samples import Samples, read_samples

Epochs = Sequence[Sequence[list[Any]]]  # of one rank: epochs of batches


def recorded(folder: Path, ranks: Sequence[Epochs], ends: bool = True, **facts: Any) -> Samples:
    """Write the records of these ranks, and read them."""
    for rank, epochs in enumerate(ranks):
        kept = {"kind": "run.loader", "keys": INDEX, **facts}
        kept["beginning"] = facts["beginning"][rank] if "beginning" in facts else []
        with record_path(folder, rank).open("w") as file:
            write_record(file, LoaderFacts(rank, len(ranks), **kept))
            for number, epoch in enumerate(epochs):
                for step, keys in enumerate(epoch):
                    digests = (
                        [f"d{key}" for key in keys] if facts.get("keys", INDEX) != INDEX else []
                    )
                    write_record(file, Batch(number, step, 0, None, keys, digests))
                if ends:
                    write_record(file, EpochEnd(number))
    samples = read_samples(folder)
    assert samples is not None
    return samples


PLAIN = {"kind": "DataLoader", "samples": 8, "batch_size": 2, "shuffled": True, "drop_last": False}
SPLIT = [[[[0, 2], [4, 6]], [[3, 1], [6, 4]]], [[[1, 3], [5, 7]], [[0, 2], [7, 5]]]]

# The records, the facts, and the level and words of each finding.
CASES: dict[str, tuple[Sequence[Epochs], dict[str, Any], list[tuple[str, str]]]] = {
    "good": (
        SPLIT,
        {"samples": 8, "batch_size": 4, "shuffled": True},
        [
            (GOOD, "all 8 samples once"),
            (GOOD, "all 8 samples once"),
            (GOOD, "differs between epochs 0 and 1"),
        ],
    ),
    "a tail": (
        SPLIT,
        {"samples": 9, "batch_size": 4, "shuffled": True},
        [(GOOD, "1 don't fill a last batch, different"), (GOOD, "1 don't"), (GOOD, "differs")],
    ),
    "a tail that is always the same": (
        SPLIT,
        {"samples": 9, "batch_size": 4, "shuffled": None, "sampler": "DistributedSampler"},
        [(WARNING, "No rank gets 1 of 9 samples (8). The last batch is dropped")] * 2
        + [(GOOD, "differs")],
    ),
    "not split": (
        [[[[0, 1], [2, 3]], [[3, 2], [1, 0]]]] * 2,
        {**PLAIN, "samples": 4},
        [(PROBLEM, "Every rank reads all 4 samples: each counts 2 times")] * 2
        + [(GOOD, "differs")],
    ),
    "not split, and each drops another tail": (
        [[[[0, 1], [2, 3]]], [[[3, 4], [1, 0]]]],
        {**PLAIN, "samples": 5, "sampler": "RandomSampler"},
        [(PROBLEM, "Every rank reads all 5 samples"), (WARNING, "Only one epoch")],
    ),
    "no set_epoch": (
        [[[[0, 2]], [[0, 2]]], [[[1, 3]], [[1, 3]]]],
        {**PLAIN, "samples": 4, "sampler": "DistributedSampler"},
        [(GOOD, "all 4")] * 2 + [(PROBLEM, "same order in epochs 0 and 1")],
    ),
    "every second epoch": (
        [[[[0, 1, 2]], [[2, 1, 0]], [[0, 1, 2]]]],
        {**PLAIN, "samples": 3, "sampler": "Own"},
        [(GOOD, "all 3")] * 3 + [(PROBLEM, "same order in epochs 0 and 2.")],
    ),
    "all of many epochs": (
        [[[[0, 1, 2]]] * 3],
        {**PLAIN, "samples": 3, "sampler": "Own"},
        [(GOOD, "all 3")] * 3 + [(PROBLEM, "same order in epochs 0 to 2.")],
    ),
    "other orders in many epochs": (
        [[[[0, 1, 2]], [[2, 1, 0]], [[0, 2, 1]]]],
        {**PLAIN, "samples": 3},
        [(GOOD, "all 3")] * 3 + [(GOOD, "differs between epochs 0 to 2")],
    ),
    "not shuffled": (
        [[[[0, 2]], [[0, 2]]], [[[1, 3]], [[1, 3]]]],
        {**PLAIN, "samples": 4, "shuffled": False},
        [(GOOD, "all 4")] * 2 + [(WARNING, "isn't shuffled: epochs 0 and 1 have")],
    ),
    "padded": (
        [[[[0, 2]], [[2, 0]]], [[[1, 0]], [[0, 1]]]],
        {**PLAIN, "samples": 3, "sampler": "DistributedSampler"},
        [(WARNING, "ranks 0, 1: 1 sample (0). DistributedSampler repeats")] * 2
        + [(GOOD, "differs")],
    ),
    "different orders": (
        [[[[0, 1], [2, 3]]], [[[3, 1], [6, 4]]]],
        PLAIN,
        [
            (PROBLEM, "ranks 0, 1: 2 samples (1, 3)"),
            (PROBLEM, "No rank gets 2 of 8 samples (5, 7)"),
            (WARNING, "Only one epoch"),
        ],
    ),
    "uneven": (
        [[[[0, 1], [2, 3]], [[1, 0], [3, 2]]], [[[4, 5]], [[5, 4]]]],
        {**PLAIN, "samples": 6},
        [(PROBLEM, "different numbers of batches: 2 on rank 0, 1 on rank 1"), (GOOD, "all 6")] * 2
        + [(GOOD, "differs")],
    ),
    "weighted": (
        [[[[0, 0], [2, 3]], [[0, 2], [0, 3]]]],
        {"samples": 4, "batch_size": 2, "sampler": "WeightedRandomSampler"},
        [
            (WARNING, "draws 1 sample more than once"),
            (WARNING, "WeightedRandomSampler leaves out 1 of 4"),
        ]
        * 2
        + [(GOOD, "differs")],
    ),
    "a stream": (
        [[[[0, 2]], [[0, 2]]], [[[1, 3]], [[1, 3]]]],
        {"keys": POSITION, "batch_size": 4},
        [(GOOD, "4 samples once")] * 2
        + [(WARNING, "stream comes in the same order in epochs 0 and 1")],
    ),
    "a stream with a gap": (
        [[[[0, 2]]], [[[1, 4]]]],
        {"keys": POSITION, "batch_size": 4},
        [(PROBLEM, "No rank gets 1 of 5 samples (3)"), (WARNING, "Only one epoch")],
    ),
    "two streams": (
        [[[[0, 2]]], [[[1, 3]]]],
        {"keys": POSITION, "batch_size": 4, "beginning": [["a", "b"], ["a", "c"]]},
        [
            (PROBLEM, "Rank 1 reads a different stream from rank 0: they differ from item 1 on"),
            (GOOD, "4 samples"),
            (WARNING, "Only one epoch"),
        ],
    ),
    "a look, then the same order": (
        [[[[0]], [[0, 2]]], [[[1]], [[1, 3]]]],
        {**PLAIN, "samples": 4, "sampler": "DistributedSampler"},
        [
            (PROBLEM, "No rank gets 2 of 4"),
            (GOOD, "all 4"),
            (PROBLEM, "same order in epochs 0 and 1"),
        ],
    ),
    "a sampler that drops its tail": (
        SPLIT,
        {**PLAIN, "samples": 9, "sampler": "DistributedSampler", "drop_last": True},
        [(GOOD, "1 don't fill")] * 2 + [(GOOD, "differs")],
    ),
    "with replacement": (
        [[[[0, 0], [2, 3]], [[0, 2], [0, 3]]]],
        {**PLAIN, "samples": 4, "sampler": "WeightedRandomSampler"},
        [
            (WARNING, "draws 1 sample more than once"),
            (WARNING, "WeightedRandomSampler leaves out 1 of 4"),
        ]
        * 2
        + [(GOOD, "differs")],
    ),
    "a stream that every rank reads": (
        [[[["x", "y"]], [["y", "x"]]]] * 2,
        {"kind": "DataLoader", "keys": CONTENT, "batch_size": 2},
        [(PROBLEM, "Every rank reads all 2 samples")] * 2 + [(GOOD, "differs")],
    ),
    "a stream that every worker reads": (
        [
            [[["x", "y"], ["x", "y"]], [["y", "x"], ["y", "x"]]],
            [[["a", "b"], ["a", "b"]], [["b", "a"], ["b", "a"]]],
        ],
        {"kind": "DataLoader", "keys": CONTENT, "batch_size": 2, "num_workers": 2},
        [(PROBLEM, "Each of the 2 workers reads all samples of its rank")] * 2
        + [(GOOD, "differs")],
    ),
    "random contents": (
        [[[["a", "b"]], [["e", "f"]]], [[["c", "d"]], [["g", "h"]]]],
        {"keys": CONTENT, "batch_size": 4},
        [(GOOD, "4 samples once, none twice (by their contents)")] * 2
        + [(WARNING, "nothing in common")],
    ),
    "equal contents": (
        [[[["x", "y"]], [["y", "x"]]], [[["x", "z"]], [["z", "x"]]]],
        {"keys": CONTENT, "batch_size": 4},
        [(WARNING, "The same contents as another sample, on ranks 0, 1: 1 sample")] * 2
        + [(GOOD, "differs")],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_fault_is_named_and_nothing_else(case: str, tmp_path: Path) -> None:
    ranks, facts, expected = CASES[case]
    findings = check_samples(recorded(tmp_path, ranks, **facts))
    assert [finding.level for finding in findings] == [level for level, _ in expected], findings
    for finding, (_, words) in zip(findings, expected, strict=True):
        assert words in finding.text
        assert finding.level == GOOD or finding.hint


def test_an_epoch_that_was_not_read_to_its_end_lacks_nothing(tmp_path: Path) -> None:
    samples = recorded(tmp_path, SPLIT, ends=False, samples=100, batch_size=4, shuffled=True)
    assert [finding.text for finding in check_samples(samples)][:1] == [
        "8 samples of the steps seen once, none twice"
    ]


def test_a_rank_without_data_and_a_failed_script(tmp_path: Path) -> None:
    recorded(tmp_path, SPLIT, samples=8, batch_size=4, shuffled=True)
    record_path(tmp_path, 1).unlink()
    samples = read_samples(tmp_path, ["rank 1 on node: ValueError: boom", "  at train.py:3"])
    assert samples is not None
    findings = check_samples(samples)
    assert "ValueError: boom" in findings[0].text
    assert "No data reached rank 1" in findings[1].text


def test_an_unfinished_line_is_left_out(tmp_path: Path) -> None:
    recorded(tmp_path, SPLIT, samples=8)
    path = record_path(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-10])
    samples = read_samples(tmp_path)
    assert samples is not None
    assert samples.ranks[1].ended == {0}
