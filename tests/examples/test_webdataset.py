"""The example of WebDataset: shards of the bundled digits, read once per epoch, and an exact resume."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from tests.examples.ranks import EXAMPLES, import_from, learn_and_resume, logged
from tests.forked_ranks import Ranks

pytest.importorskip("webdataset")


def make_shards(target: str, samples: str) -> None:
    import_from("webdataset", "make_shards").main(
        [str(EXAMPLES / "mnist" / "data"), target, "--samples", samples, "--shards", "4"]
    )


@pytest.mark.slow
def test_two_ranks_learn_and_resume_exactly(ranks: Ranks, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
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
    accuracy, printed = learn_and_resume(ranks, "webdataset", args, tmp_path, stop_at=15, last=60)
    assert accuracy > 0.75
    assert "final test accuracy" in printed
    losses = logged(tmp_path / "whole", "loss")
    assert list(losses) == list(range(1, 65)), "1003 samples are 32 steps"
