"""Replicas that drift apart end the run, before a checkpoint of them is written."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import ReplicasDiffer, UsageError
from paceline.launch.launch_spec import runtime_settings
from paceline.runtime.settings import Settings
from paceline.runtime.step_boundary import stop_consensus
from paceline.runtime.training.checksum import CHUNK, Checksum
from paceline.spec.job import Program
from paceline.spec.load import load_job
from paceline.spec.option import Flag
from tests.forked_ranks import Ranks
from tests.runtime.models import Net, data, net
from tests.runtime.training.test_wrap import quiet

# -- the checksum ----------------------------------------------------------------------------------------------


def checksum(*tensors: torch.Tensor) -> int:
    return Checksum(tensors).value()


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.complex64,
        torch.complex128,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.float8_e4m3fn,
    ],
)
def test_every_bit_counts(dtype: torch.dtype) -> None:
    first = (torch.randn(37, 5) * 50).to(dtype)
    # also empty, not aligned, not contiguous
    for tensor in (first, first[:0], first[3:], first.t()):
        around = [torch.ones(3), tensor, torch.zeros((), dtype=torch.bool)]
        before = checksum(*around)
        assert before == checksum(*[each.clone() for each in around])
        if tensor.numel():
            raw = tensor.contiguous().reshape(-1).view(torch.uint8).clone()
            for bit in range(8):
                changed = raw.clone()
                changed[-3] ^= 1 << bit
                around[1] = changed.view(dtype).reshape(tensor.shape)
                assert checksum(*around) != before


def test_exchanged_values_and_changes_that_cancel_out_are_noticed() -> None:
    numbers = torch.arange(5000, dtype=torch.int64)
    other = numbers.clone()
    # the sums of all rows and columns stay the same
    other[[7, 2055, 8, 2056]] += torch.tensor([1, -1, -1, 1])
    swapped = numbers.clone()
    swapped[[5, 4000]] = numbers[[4000, 5]]
    values = torch.tensor([0.0, -0.0, torch.nan, -torch.nan])
    found = [
        numbers,
        other,
        swapped,
        numbers.flip(0),
        values[:1],
        values[1:2],
        values[2:3],
        values[3:],
    ]
    assert len({checksum(each) for each in found}) == len(found)
    assert checksum(values) == checksum(values.clone())
    assert checksum(numbers[:10], numbers[10:20]) != checksum(numbers[10:20], numbers[:10])


def test_tensors_larger_than_a_chunk() -> None:
    large = torch.zeros(CHUNK * 2 + 5)
    before = checksum(large[1:], large[:3])
    for position in (1, CHUNK + 2, -1):
        changed = large.clone()
        changed[position] = 1
        assert checksum(changed[1:], large[:3]) != before
    assert checksum(large) == checksum(large.clone()) != checksum(large[1:])


# -- training --------------------------------------------------------------------------------------------------


def harm(kind: str, model: Net, rank: int) -> None:
    """What happens at step 7, on some ranks."""
    first, last = model.layers[0], model.layers[1]
    assert isinstance(first, nn.Linear)
    assert isinstance(last, nn.Linear)
    with torch.no_grad():
        if kind == "bit" and rank == 1:
            last.weight.view(torch.int64)[0, 3] ^= 1
        if kind == "majority" and rank == 0:
            first.weight[0, :2] = first.weight[0, [1, 0]]
        if kind == "two of four" and rank in (1, 3):
            first.bias[2] += 1e-9


def diverge(folder: str, kind: str, options: dict[str, Any]) -> tuple[str, int, list[str]]:
    """Return the error, the last step, and the checkpoints."""
    stop_consensus.INTERVAL = 0.002
    x, y = data()
    step, message = 0, "fine"
    try:
        with quiet(folder=folder, seed=0, **options) as run:
            model = run.wrap(net())
            opt = torch.optim.Adam(model.parameters(), lr=0.01)
            run.resume(model=model, opt=opt)
            for _ in run.steps(range(200)):
                run.backward(((model(x) - y) ** 2).mean())
                run.update(opt)
                while run.step == 5 and "save_every_steps" in options and not list_saved(folder):
                    time.sleep(0.01)
                if run.step == 6:
                    harm(kind, model, run.rank)
                step = run.step + 1
    except ReplicasDiffer as error:
        message = error.message
    return message, step, list_saved(folder)


def list_saved(folder: str) -> list[str]:
    # rank 0 may remove an incomplete one while another rank looks
    checkpoints = Path(folder, "checkpoints")
    names = os.listdir(checkpoints) if checkpoints.exists() else []
    complete = (name for name in names if (checkpoints / name / "complete.json").exists())
    return sorted(name for name in complete if ".tmp" not in name)


MESSAGES = {  # kind: ranks, message
    "bit": (
        2,
        "rank 1 no longer has the same replica as rank 0. The first parameter that differs is 'layers.1.weight'.",
    ),
    "majority": (
        3,
        "rank 0 no longer has the same replica as ranks 1 and 2. "
        "The first parameter that differs is 'layers.0.weight'.",
    ),
    "two of four": (
        4,
        "ranks 1 and 3 no longer have the same replica as ranks 0 and 2. "
        "The first parameter that differs is 'layers.0.bias'.",
    ),
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_save_finds_replicas_that_differ_and_writes_nothing(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    world_size, message = MESSAGES[kind]
    options = {"save_every_steps": 4, "max_steps": 12, "replica_check": 1000}
    expected = (f"After step 8, {message}", 8, ["step-00000004"])
    assert ranks(diverge, world_size, str(tmp_path), kind, options) == [expected] * world_size
    if kind == "bit":  # the earlier checkpoint is intact
        saved = ["step-00000008", "step-00000012"]
        assert ranks(diverge, world_size, str(tmp_path), "nothing", options)[0] == (
            "fine",
            12,
            saved,
        )


def test_without_saves_a_later_step_finds_it_unless_it_is_turned_off(
    ranks: Ranks, tmp_path: Path
) -> None:
    for found, step, saved in ranks(diverge, 2, str(tmp_path / "on"), "bit", {"replica_check": 1}):
        pattern = (
            r"After step (\d+), rank 1 no longer .* parameter that differs is 'layers.1.weight'."
        )
        assert (matched := re.fullmatch(pattern, found)), found
        assert 7 <= int(matched[1]) <= step < 200
        assert saved == []
    assert ranks(diverge, 2, str(tmp_path / "off"), "bit", {"replica_check": 0})[0] == (
        "fine",
        200,
        ["step-00000200"],
    )


def hand_written(folder: str) -> str:
    stop_consensus.INTERVAL = 0.002
    try:
        with quiet(folder=folder, replica_check=1) as run:
            model = run.wrap(net())
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            while run.step < 1000:
                model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
                opt.step()
                opt.zero_grad()
                if run.step == 3 and run.rank == 1:
                    model.layers[1].weight.data *= 2
                if run.should_stop:
                    break
    except ReplicasDiffer as error:
        return error.message
    return "fine"


def test_hand_written_loops_are_checked(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks(hand_written, 2, str(tmp_path)):
        assert (
            "rank 1 no longer has the same replica as rank 0. The first parameter that differs is 'layers.1.weight'"
            in found
        )


def short_session() -> str:
    """Too short for a consensus between two steps, and without a save."""
    try:
        with quiet() as run:
            model = run.wrap(nn.Linear(4, 1, bias=False))
            opt = torch.optim.Adam(model.parameters(), lr=0.1)
            for _ in run.steps(range(4)):
                run.backward(model(torch.ones(2, 4)).sum())
                run.update(opt)
            if run.rank == 1:
                model.weight.data *= 2
    except ReplicasDiffer as error:
        return error.message
    return "fine"


def test_the_end_of_a_session_is_checked(ranks: Ranks) -> None:
    message = "After step 4, rank 1 no longer has the same replica as rank 0. The first parameter that differs is 'weight'."
    assert ranks(short_session, 2) == [message] * 2


class Odd(nn.Module):
    """Parameters of many kinds; buffers of ranks differ."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.complex = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.frozen = nn.Parameter(torch.arange(5), requires_grad=False)
        self.empty = nn.Parameter(torch.ones(0))
        self.nan = nn.Parameter(torch.tensor([torch.nan]), requires_grad=False)
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(3, momentum=0.5)
        self.tied = self.conv.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = (
            self.conv(x).mean((2, 3)) * self.low.float()
            + self.complex.abs().sum()
            + self.empty.sum()
        )
        return self.norm(out)


def train_right(fsdp: bool) -> int:
    """Return how many checks were made of models that are trained right, and of those that may differ."""
    stop_consensus.INTERVAL, checks = 0.0, 0
    with quiet(seed=1, replica_check=1) as run:
        model = run.wrap(
            net() if fsdp else Odd(), mode="fsdp" if fsdp else "auto", **({} if fsdp else ODD)
        )
        torch.manual_seed(run.rank)
        own = run.wrap(nn.Linear(2, 2), mode="none")
        opts = [torch.optim.Adam(model.parameters()), torch.optim.Adagrad(own.parameters())]
        run.resume(model=model, opt=opts[0], own=own)
        for _ in run.steps(range(12)):
            x = torch.randn(4, 4, dtype=torch.float64) if fsdp else torch.randn(4, 2, 5, 5)
            run.backward(model(x).square().sum() + own(torch.ones(2)).sum() * run.rank)
            for opt in opts:
                run.update(opt)
            checks += run._boundary.replicas._due > 1
    return checks


ODD = {"broadcast_buffers": False, "find_unused_parameters": True}


@pytest.mark.parametrize("fsdp", [False, True])
def test_training_that_is_right_is_never_reported(ranks: Ranks, fsdp: bool) -> None:
    assert all(checks >= 5 for checks in ranks(train_right, 2, fsdp))


def test_the_interval_is_an_argument_a_key_and_a_flag(tmp_path: Path) -> None:
    (tmp_path / "paceline.toml").write_text("[runtime]\nreplica_check = 7\n")
    flag = Flag("--replica-check", "runtime.replica_check", 0)
    for flags, expected in (([], 7), ([flag], 0)):
        job = load_job(Program("train.py"), flags=flags, cwd=tmp_path)
        assert Settings(replica_check=5).override(runtime_settings(job)).replica_check == expected
    with pytest.raises(UsageError, match="replica_check"):
        quiet(replica_check=-1)
