"""What a rank records: the samples that a step really got, and nothing that changes the training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.contract import env
from paceline.contract.rank_records import ProofSpec, record_path
from paceline.runtime.proof.calls import row_digests
from paceline.runtime.proof.weights import project, weights_digest
from paceline.tools.prove.records import RankRecords
from tests.forked_ranks import Ranks

SAMPLES = 40


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(1, 4), nn.Dropout(0.2), nn.BatchNorm1d(4), nn.Linear(4, 1)
        )

    def forward(self, *, x: torch.Tensor) -> Any:
        return self.body(x)


def train(folder: str, workers: int, recorded: bool) -> tuple[list[list[int]], list[float]]:
    """Train with accumulation, workers, clipping and evaluations. Returns the samples of each step, and the weights."""
    if recorded:
        spec = Path(folder) / "probe.json"
        spec.write_text(ProofSpec(folder, steps=7).to_json(), encoding="utf-8")
        os.environ[env.PROOF] = str(spec)
        from paceline.runtime.proof.patches import start_recorder

        start_recorder()
    torch.manual_seed(0)
    data = TensorDataset(torch.arange(float(SAMPLES)).reshape(-1, 1))
    loader: Any = DataLoader(data, batch_size=4, shuffle=True, num_workers=workers)
    test: Any = DataLoader(data, batch_size=8)
    model, taken = Net(), list[list[int]]()
    opt = torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in range(2):
        batches = list(loader)
        for first, second in zip(batches[::2], batches[1::2], strict=True):
            if len(taken) == 7:
                break
            taken.append([int(value) for (x,) in (first, second) for value in x.flatten()])
            for (x,) in (first, second):
                model(x=x).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            opt.step()
            opt.zero_grad()
        model.eval()
        with torch.no_grad():
            for (x,) in test:
                model(x=x)
        model.train()
    if recorded:
        start_recorder().end_at_exit()
    return taken, [float(each.detach().sum()) for each in model.parameters()]


@pytest.mark.parametrize("workers", [0, 1])
def test_it_records_the_samples_of_each_step_and_changes_nothing(
    ranks: Ranks, tmp_path: Path, workers: int
) -> None:
    ((taken, weights),) = ranks(train, 1, str(tmp_path), workers, True)
    if not workers:
        assert ranks(train, 1, str(tmp_path), workers, False) == [(taken, weights)]
    records = RankRecords.read(record_path(tmp_path, 0))
    assert [records.steps[step]["samples"] for step in range(1, 8)] == taken
    for record in records.steps.values():
        assert record["rows"] == len(record["contents"]) == 8, record
        assert len(record["losses"]) == 2
        assert record["norm"] == pytest.approx(0.1, rel=1e-3), "as the optimizer gets them: clipped"
    assert records.end["uses"] == ["batchnorm", "draws", "dropout"]
    assert (records.start["dtype"], records.start["runtime"]) == ("float32", False)
    assert records.end["weights"]


def test_digests_tell_samples_apart() -> None:
    x, y = torch.randn(5, 3), torch.arange(5)
    whole = row_digests([x, y], 5)
    assert whole is not None
    assert len({tuple(columns) for columns in whole}) == 5
    assert row_digests([x[2:], y[2:]], 3) == whole[2:], "whatever else is in the batch"
    assert row_digests([x.bfloat16()], 5) != row_digests([x], 5)
    first = row_digests([x.unsqueeze(0).repeat(7, 1, 1)], 5)
    assert first is not None, "time may come first"
    assert weights_digest([x]) != weights_digest([x + 1e-7])
    ones = [torch.ones(1000), torch.ones(24)]
    assert project(ones) == project([each.clone() for each in ones])
    assert project(ones) != project([ones[0], torch.cat([torch.zeros(1), ones[1][1:]])])
