"""The example of a stream: it learns in both ways, resumes exactly, and every point of unequal shards counts once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from paceline.runtime.data.loader import make_loader
from paceline.runtime.distributed.identity import read_identity
from tests.examples.ranks import import_from, learn_and_resume, run_example, saved_tensors
from tests.forked_ranks import Ranks

SHORT = ["--shards", "4", "--epochs", "6"]  # rank 0 has 100 and 300 points, rank 1 has 200 and 400


def test_steps_learn_and_resume_exactly(ranks: Ranks, tmp_path: Path) -> None:
    accuracy, printed = learn_and_resume(ranks, "stream", SHORT, tmp_path, stop_at=60, last=200)
    assert accuracy > 0.9
    assert "final test accuracy" in printed


def test_joined_ranks_learn_and_resume_after_the_epoch(ranks: Ranks, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    args = ["--join", *SHORT]
    (accuracy, printed), (other, _) = ranks(
        run_example, 2, "stream", [*args, "--folder", str(whole)]
    )
    assert accuracy == other > 0.9
    assert printed.count("done: [400, 600] points") == 6
    (nothing, until), _ = ranks(run_example, 2, "stream", [*args, "--folder", str(parts)], 30)
    assert nothing is None
    done = until.count("done: [400, 600] points")
    assert 1 <= done < 6, "it was stopped in the middle"
    resumed = ranks(run_example, 2, "stream", [*args, "--folder", str(parts)])
    assert resumed[0][0] == accuracy
    assert resumed[0][1].startswith(f"epoch {done + 1} done")
    expected, found = saved_tensors(whole), saved_tensors(parts)
    assert found.keys() == expected.keys() != set()
    assert all(found[name].equal(tensor) for name, tensor in expected.items())


def read_epochs(folder: str, workers: int) -> list[list[Any]]:
    train = import_from("stream", "train")
    identity = read_identity()
    dist.init_process_group("gloo")
    files = train.make_shards(Path(folder) / str(identity.rank), 5)
    data = train.Shards(files, rank=identity.rank, ranks=identity.world_size)
    options: dict[str, Any] = {"sharded": True, "drop_last": False, "num_workers": workers}
    loader = make_loader(data, batch_size=32, identity=identity, **options)
    epochs = []
    for epoch in range(2):
        found = [
            point
            for micro in loader.micro_batches(epoch)
            for point in micro.data[0].tolist()[: micro.count]
        ]
        epochs.append([tuple(point) for point in found])
    loader.close()
    dist.destroy_process_group()
    return epochs


@pytest.mark.parametrize("workers", [0, 2])
def test_every_point_counts_once(ranks: Ranks, tmp_path: Path, workers: int) -> None:
    first, second = ranks(read_epochs, 2, str(tmp_path), workers)
    assert (len(first[0]), len(second[0])) == (900, 600)
    lines = [
        line for path in (tmp_path / "0").glob("*.csv") for line in path.read_text().splitlines()
    ]
    everything = Counter(tuple(map(float, line.split(",")[:2])) for line in lines)
    for epoch in range(2):
        read = Counter((round(x, 4), round(y, 4)) for x, y in first[epoch] + second[epoch])
        assert read == everything
    assert first[0] != first[1], "another order in each epoch"
