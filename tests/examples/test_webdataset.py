"""The example of WebDataset: shards of the bundled digits, read once per epoch, and an exact resume."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from tests.examples.ranks import EXAMPLES, assert_same_end, import_from, logged, run_example
from tests.forked_ranks import Ranks

pytest.importorskip("webdataset")


def make_shards(target: str, samples: str) -> None:
    import_from("webdataset", "make_shards").main(
        [str(EXAMPLES / "mnist" / "data"), target, "--samples", samples, "--shards", "4"]
    )


@pytest.mark.slow
def test_two_ranks_learn_and_resume_exactly(ranks: Ranks, tmp_path: Path) -> None:
    shards, whole, parts = (tmp_path / name for name in ("shards", "whole", "parts"))
    ranks(make_shards, 1, str(shards), "1003")
    members = []
    for path in sorted(shards.glob("train-*.tar")):
        with tarfile.open(path) as archive:
            members.append(archive.getnames())
    assert [len(names) for names in members] == [502, 502, 502, 500]
    assert len({name for names in members for name in names}) == 2006
    args = [
        "--shards",
        str(shards),
        "--epochs",
        "2",
        "--batch-size",
        "32",
        "--lr",
        "5e-3",
        "--workers",
        "1",
    ]
    (accuracy, printed), (other, silent) = ranks(
        run_example, 2, "webdataset", [*args, "--folder", str(whole)]
    )
    assert accuracy == other > 0.75
    assert "final test accuracy" in printed
    assert silent == ""
    assert list(logged(whole, "loss")) == list(range(1, 65)), "1003 samples are 32 steps"
    assert ranks(run_example, 2, "webdataset", [*args, "--folder", str(parts)], 15)[0][0] is None
    assert 15 <= max(logged(parts, "loss")) < 60, "it was stopped in the middle"
    assert ranks(run_example, 2, "webdataset", [*args, "--folder", str(parts)])[0][0] == accuracy
    assert_same_end(parts, whole)
