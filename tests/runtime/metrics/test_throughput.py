"""Samples, tokens and FLOPs per second, waiting for data, and MFU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import UsageError
from paceline.runtime.metrics import throughput
from paceline.runtime.metrics.progress_bar import describe_rates
from paceline.runtime.metrics.throughput import Amounts, Rates, ThroughputCounter, peak_flops
from paceline.watch.metrics import describe_throughput
from tests.forked_ranks import Ranks
from tests.runtime.metrics.test_metrics import lines_of
from tests.runtime.models import data, net
from tests.runtime.training.test_wrap import quiet


def count(folder: str, own: bool, alone: bool = False) -> None:
    x, y = data(24)
    with quiet(seed=0, folder=folder) as run:
        model = run.wrap(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = run.loader(TensorDataset(x, y), batch_size=8, accumulate=2)
        for _ in run.epochs(2):
            for a, b in run.steps(loader):
                run.backward(((model(a) - b) ** 2).mean())
                tokens = 100 * (run.rank + 1)
                run.throughput(samples=2 * len(a), tokens=tokens, flops=tokens * 10**9)
                if run.update(optimizer) and not (alone and run.rank):
                    run.log(**({"tokens_per_second": 5.0} if own else {"x": 1.0}))


def test_the_rates_of_all_ranks_are_written(ranks: Ranks, tmp_path: Path) -> None:
    for world_size in (1, 2):
        folder = tmp_path / str(world_size)
        ranks(count, world_size, str(folder), False)
        steps = [line for line in lines_of(folder) if "x" in line]
        assert len(steps) == 6
        for line in steps:
            tokens = 2 * sum(100 * (rank + 1) for rank in range(world_size))
            assert line["tokens_per_second"] / line["samples_per_second"] == pytest.approx(
                tokens / 16, rel=1e-4
            )
            assert line["tflops_per_second"] / line["tokens_per_second"] == pytest.approx(
                1e-3, rel=1e-4
            )
            assert 0 <= line["data_wait"] <= 1
            assert "mfu" not in line, "nobody knows the peak of this device"


def test_time_for_which_a_rank_waited_is_counted_in_all_as_well() -> None:
    """What the doctor reads must grow, whatever is taken for the metrics in between."""
    counter = ThroughputCounter()
    counter.waited += 2.0
    counter.take()
    counter.waited += 1.0
    assert (counter.waited, counter.waited_in_all) == (1.0, 3.0)


def test_the_rates_are_those_of_all_ranks_if_only_one_logs(ranks: Ranks, tmp_path: Path) -> None:
    ranks(count, 2, str(tmp_path), False, True)
    lines = [line for line in lines_of(tmp_path) if "x" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for line in lines:
        assert line["samples_per_second"] * line["seconds"] == pytest.approx(16, rel=1e-4)
        # Rank 1 counts twice as much as rank 0, not always over the same steps.
        assert 2 * 200 * 0.999 < line["tokens_per_second"] * line["seconds"] < 2 * 400 * 1.001


def read_with_a_mesh(folder: str) -> None:
    with quiet(seed=0, folder=folder, mesh={"tensor": 2}) as run:
        for a, _ in run.steps(run.loader(TensorDataset(*data(24)), batch_size=8)):
            run.throughput(tokens=10 * len(a))
            run.log(x=1.0)


def test_ranks_with_the_same_samples_count_once(ranks: Ranks, tmp_path: Path) -> None:
    ranks(read_with_a_mesh, 2, str(tmp_path))
    for line in lines_of(tmp_path):
        assert line["samples_per_second"] * line["seconds"] == pytest.approx(8, rel=1e-4)
        assert line["tokens_per_second"] * line["seconds"] == pytest.approx(80, rel=1e-4)


def test_a_number_of_the_script_comes_first(ranks: Ranks, tmp_path: Path) -> None:
    ranks(count, 1, str(tmp_path), True)
    assert [
        line["tokens_per_second"] for line in lines_of(tmp_path) if "tokens_per_second" in line
    ] == [5.0] * 6


def test_only_the_time_of_loops_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: clock[0])
    counter = ThroughputCounter()
    counter.begin_loop()
    clock[0] += 2
    counter.waited += 0.5
    counter.steps, counter.samples = 4, 32
    counter.add(0, 2, 3)
    assert counter.take()() == Amounts(2.0, 0.5, 4, 32, 2, 3)
    clock[0] += 1
    counter.end_loop()
    clock[0] += 60  # an evaluation
    counter.begin_loop()
    clock[0] += 4
    counter.add(5, 0, 0)
    assert counter.take()() == Amounts(5.0, 0, 0, 5, 0, 0)
    counter.end_loop()
    clock[0] += 60
    assert counter.take()() == Amounts(0, 0, 0, 0, 0, 0)


def test_rates_and_mfu() -> None:
    rates = Rates(find_peak=lambda: 100e12)
    # Two seconds and five steps on each of four ranks.
    found = rates.of(Amounts(8.0, 2.0, 20, 64, 4000, 400e12), 4)
    assert found == {
        "seconds": 0.4,
        "data_wait": 0.25,
        "samples_per_second": 32,
        "tokens_per_second": 2000,
        "tflops_per_second": 200,
        "mfu": 0.5,
    }
    assert rates.of(Amounts(0, 0, 0, 0, 0, 0), 4) == {}
    assert describe_rates(found) == [
        "32 samples/s",
        "2k tokens/s",
        "50.0% MFU",
        "25% waiting for data",
    ]


@pytest.mark.parametrize(
    ("name", "dtype", "precision", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, "highest", 989.4),
        ("NVIDIA H100 PCIe", torch.float16, "highest", 756.0),
        ("NVIDIA GH200 480GB", torch.float32, "high", 494.7),
        ("NVIDIA A100-SXM4-80GB", torch.float32, "highest", 19.5),
        ("NVIDIA A10G", torch.bfloat16, "highest", 70.0),
        ("Tesla V100-PCIE-16GB", torch.float16, "highest", 112.0),
        ("Tesla V100-SXM2-16GB", torch.float32, "high", 15.7),
        ("NVIDIA T400", torch.float16, "highest", None),
        ("Some GPU", torch.float16, "highest", None),
    ],
)
def test_peaks(
    name: str, dtype: Any, precision: str, teraflops: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    found = peak_flops(torch.device("cuda"), dtype)
    assert found == (None if teraflops is None else pytest.approx(teraflops * 1e12))
    assert peak_flops(torch.device("cpu"), dtype) is None


def test_the_flops_of_models() -> None:
    assert paceline.transformer_flops(
        124_000_000, layers=12, width=768, length=1024
    ) == pytest.approx(857.25e6, rel=1e-3)
    model = torch.nn.Linear(8, 4, bias=False)
    assert paceline.transformer_flops(model, layers=0, width=0, length=0) == 6 * 32
    assert paceline.count_flops(lambda: model(torch.ones(5, 8)).sum().backward()) == 2 * (
        2 * 5 * 8 * 4
    )


def test_show_has_a_line_of_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert describe_throughput(path) == ""
    rates = '"tokens_per_second": 123456, "data_wait": 0.031, "mfu": 0.52, "peak_memory": 31'
    line = f'{{"step": 1, "seconds": 0.0412, {rates}}}'
    # as in lists of runs, the newest line counts
    older = line.replace("123456", "999999").replace("0.0412", "9.9")
    path.write_text(f'{{"step": 0}}\n{older}\n{older}\n{line}\n{line[:20]}')
    assert (
        describe_throughput(path)
        == "123.5k tokens/s · 41.2 ms per step · 3% waiting for data · 52.0% MFU · 31 GB at most"
    )


def test_the_batch_of_a_dataloader_is_not_the_global_one() -> None:
    with quiet(seed=0) as run:
        optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
        with pytest.raises(UsageError, match="that of one rank"):
            run.scale_lr(
                optimizer, batch=torch.utils.data.DataLoader([1, 2], batch_size=2), reference=2
            )
