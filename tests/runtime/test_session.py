"""A session: its ranks, its settings, and that it always ends."""

from __future__ import annotations

import copy
import json
import math
import multiprocessing
import os
import pickle
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import TensorDataset

import paceline
from paceline.agent.rank_failures import IMPORTING
from paceline.contract import env
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import RunFolder
from paceline.errors import LaunchError, RunError, UsageError
from paceline.runtime.distributed.placement import (
    RankPlacement,
    find_shared_gpu,
    format_cpu_list,
    parse_cpu_list,
)
from paceline.runtime.settings import Params, Settings
from tests.forked_ranks import Ranks
from tests.ports import free_port
from tests.runtime.models import net
from tests.runtime.training.test_wrap import quiet


def two_sessions() -> list[tuple[int, int, float, float, int]]:
    found = []
    for _ in range(2):
        with quiet() as run:
            total = run.sum(torch.tensor([run.rank + 1.0]))
            found.append(
                (run.rank, run.world_size, total.item(), run.mean(float(run.rank)), run.sum(3))
            )
        assert not torch.distributed.is_initialized()
    return found


def test_sums_means_and_a_second_session_in_one_process(ranks: Ranks) -> None:
    assert ranks(two_sessions, 2) == [[(0, 2, 3.0, 0.5, 6)] * 2, [(1, 2, 3.0, 0.5, 6)] * 2]
    assert two_sessions() == [(0, 1, 1.0, 0.0, 3)] * 2


def sums() -> list[object]:
    with quiet() as run:
        odd = run.rank % 2 == 1
        flags = torch.tensor([True, odd, False])
        many = torch.full((2,), 200, dtype=torch.uint8)
        late = 0 if run.rank == 0 else 0.5  # a count that is an int until its first batch
        message = ""
        try:
            run.sum([1, 2])  # type: ignore[call-overload]
        except UsageError as error:
            message = error.message
        return [
            run.sum(True),
            run.sum(odd),
            type(run.sum(odd)),
            run.sum(flags).tolist(),
            run.mean(flags).tolist(),
            run.sum(many).tolist(),
            many.dtype,
            run.sum(late),
            run.sum(numpy.int32(2)),
            run.sum(2**60 + 1),
            message,
        ]


def test_sums_count_booleans_and_do_not_overflow(ranks: Ranks) -> None:
    assert sums()[:6] == [1, 0, int, [1, 0, 0], [1.0, 0.0, 0.0], [200, 200]]
    refused = "run.sum and run.mean got a list, but take numbers and tensors."
    expected = [
        3,
        1,
        int,
        [3, 1, 0],
        pytest.approx([1.0, 1 / 3, 0.0]),
        [600, 600],
        torch.uint8,
        1.0,
        6,
        3 * (2**60 + 1),
        refused,
    ]
    assert ranks(sums, 3) == [expected] * 3


def weighted_means() -> list[object]:
    """Rank r has r samples with the value r, so rank 0 has none: its mean is NaN."""
    with quiet() as run:
        own = float(run.rank) if run.rank else math.nan
        tensor = torch.tensor([own, -own])
        half = torch.full((), 30000.0, dtype=torch.float16)
        byte = torch.tensor(200, dtype=torch.uint8)
        counts = torch.tensor([run.rank, 1])
        return [
            run.mean(own, weight=run.rank),
            run.mean(tensor, weight=run.rank).tolist(),
            run.mean(tensor, weight=torch.tensor(run.rank)).tolist(),
            run.mean(half, weight=1000).item(),
            run.mean(byte, weight=10).item(),
            run.mean(torch.tensor([own, 2.0]), weight=counts).tolist(),
            run.mean(0 if run.rank == 0 else tensor, weight=run.rank).tolist(),
            math.isnan(run.mean(own, weight=0)),
            run.mean(tensor, weight=0).isnan().all().item(),
        ]


def test_a_weighted_mean_over_ranks(ranks: Ranks) -> None:
    expected = [
        5 / 3,
        [5 / 3, -5 / 3],
        [5 / 3, -5 / 3],
        30000,
        200,
        [5 / 3, 2],
        [5 / 3, -5 / 3],
        True,
        True,
    ]
    for found in ranks(weighted_means, 3):
        for value, right in zip(found, expected, strict=True):
            assert value == pytest.approx(right)


def wrong_weights() -> list[object]:
    found: list[object] = []
    with quiet() as run:
        try:
            run.mean(1.0, weight=None if run.rank else 2)
        except UsageError as error:
            found.append(error.message)
        return [*found, run.sum(1)]


def test_ranks_agree_on_weights(ranks: Ranks) -> None:
    """Otherwise all sums that follow would be those of other values."""
    expected = [
        "Rank 0 has called run.mean with a weight, but rank 1 run.mean without a weight.",
        2,
    ]
    assert ranks(wrong_weights, 2) == [expected] * 2


@pytest.mark.parametrize("name", [name for name in dir(paceline.Run) if not name.startswith("_")])
def test_public_names_have_help(name: str) -> None:
    assert (getattr(paceline.Run, name).__doc__ or "").strip()
    assert {"autocast", "backward", "update", "mean"} <= set(dir(paceline.Run))


class Unpicklable:
    def __reduce__(self) -> str:
        raise ValueError("not me")


def gathered() -> list[object]:
    """Values that differ between ranks in shape and content; what goes wrong is the same on all ranks."""
    found: list[object] = []
    with quiet() as run:
        rank = run.rank
        ragged = torch.full((rank, 2), rank, dtype=torch.bfloat16)
        scalar = torch.tensor(rank + 1j, requires_grad=True)
        other = torch.arange(6.0).reshape(2, 3).T if rank else torch.ones(1, 1, 4)
        found += [[(each.tolist(), each.dtype) for each in run.gather(ragged)]]
        found += [
            [each.tolist() for each in run.gather(value)]
            for value in (scalar, other, torch.ones(0) > 0)
        ]
        found.append(
            run.gather({"rank": rank, "text": "x" * rank, "tensor": torch.ones(2)})[-1]["text"]
        )
        found.append(run.gather(None))
        try:
            run.gather(Unpicklable() if rank else 1)
        except UsageError as error:
            found.append(error.message)
        found.append(run.gather(rank))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gather_takes_ragged_tensors_and_objects(ranks: Ranks, world_size: int) -> None:
    results = ranks(gathered, world_size)
    everyone = range(world_size)
    matrix = [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    expected: list[object] = [
        [([[float(rank)] * 2] * rank, torch.bfloat16) for rank in everyone],
        [rank + 1j for rank in everyone],
        [[[[1.0] * 4]], *[matrix] * (world_size - 1)],
        [[]] * world_size,
        "x" * (world_size - 1),
        [None] * world_size,
    ]
    if world_size > 1:
        expected += ["run.gather could not pickle the object of rank 1: ValueError: not me"]
    assert results == [[*expected, list(everyone)]] * world_size


def drawn(folder: str | None, steps: int) -> tuple[list[float], dict[int, float]]:
    """Return the initial weights, and what each step of a hand-written loop drew from the global generator."""
    numbers = {}
    with quiet(seed=3, folder=folder) as run:
        model = torch.nn.Linear(1, 2)
        initial = model.weight.flatten().tolist()
        run.wrap(model)
        if folder is not None:
            run.resume(model=model)
        while run.step < steps:
            numbers[run.step] = torch.rand(()).item()
            if run.should_stop:
                break
    return initial, numbers


def test_ranks_draw_their_own_numbers_in_hand_written_loops_and_resume_them(
    ranks: Ranks, tmp_path: Path
) -> None:
    whole = ranks(drawn, 2, str(tmp_path / "whole"), 6)
    assert whole[0][0] == whole[1][0], "one seed builds one model"
    assert len({*whole[0][1].values(), *whole[1][1].values()}) == 12
    parts = [ranks(drawn, 2, str(tmp_path / "parts"), steps) for steps in (3, 6)]
    assert [parts[0][rank][1] | parts[1][rank][1] for rank in (0, 1)] == [
        numbers for _, numbers in whole
    ]
    assert sorted(parts[1][0][1]) == [3, 4, 5]
    first, second = (numbers for _, numbers in ranks(drawn, 2, None, 4))
    assert [first[step] == second[step] for step in range(4)] == [True, False, False, False], (
        "from the first boundary"
    )


def download_to_each_node(folder: str) -> str:
    rank = int(os.environ["RANK"])
    os.environ |= {
        "LOCAL_RANK": str(rank % 2),
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": str(rank // 2),
    }
    os.environ["GROUP_WORLD_SIZE"] = "2"
    with quiet() as run, run.rank_zero_first():
        cache = Path(folder) / f"node-{run.identity.node}"
        if not cache.exists():
            time.sleep(0.3 * (run.local_rank == 0))
            cache.write_text(f"made by {run.rank}")
        return cache.read_text()


def test_one_rank_of_each_node_goes_before_the_others(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(download_to_each_node, 4, str(tmp_path)) == ["made by 0"] * 2 + ["made by 2"] * 2


def failing_download() -> str:
    try:
        with quiet() as run, run.rank_zero_first():
            if run.rank == 0:
                raise OSError("no network")
    except (OSError, RunError) as error:
        return type(error).__name__
    return "fine"


def test_others_fail_when_rank_zero_failed_first(ranks: Ranks) -> None:
    assert ranks(failing_download, 2) == ["OSError", "RunError"]


def uneven() -> list[float]:
    with quiet() as run:
        model = run.wrap(net())
        with run.join(model):
            for _ in range(3 + 2 * run.rank):
                model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
        return [run.sum(1.0)]


def test_join_lets_ranks_have_unequally_many_inputs(ranks: Ranks) -> None:
    assert ranks(uneven, 2) == [[2.0], [2.0]]
    assert uneven() == [1.0]


def exits(folder: str, code: object) -> tuple[object, list[str]]:
    """Ranks exit by `sys.exit` within the loop; rank 0 is last, and reaches the end of the body."""
    left: object = "by the end"
    try:
        with quiet(folder=folder) as run:
            model = run.wrap(net())
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            run.resume(model=model, opt=opt)
            for step in run.steps(range(10)):
                run.backward(model(torch.ones(2, 4, dtype=torch.float64)).sum())
                run.update(opt)
                if step == 4:
                    if run.rank == 0:
                        time.sleep(0.3)
                        break
                    sys.exit(code)  # type: ignore[arg-type]
    except SystemExit as leaving:
        left = leaving.code
    return left, sorted(
        path.parent.name for path in Path(folder).glob("checkpoints/*/complete.json")
    )


@pytest.mark.parametrize("code", [None, 0])
def test_a_clean_exit_ends_the_session(ranks: Ranks, tmp_path: Path, code: object) -> None:
    saved = ["step-00000005"]
    assert ranks(exits, 3, str(tmp_path), code) == [
        ("by the end", saved),
        (code, saved),
        (code, saved),
    ]


SCRIPT = """
import os, sys, time
import torch, paceline
sys.path.insert(0, {root!r})
from tests.runtime.models import data, net

x, y = data()
with paceline.session(cpu=True, report=False) as run:
    model = run.wrap(net())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in run.steps(range(100000)):
        if step == {step} and run.rank == 1:
            {action}
        run.backward(((model(x) - y) ** 2).mean())
        run.update(opt)
        run.log(loss=1.0)
"""


def start(script: Path, world_size: int) -> list[subprocess.Popen[str]]:
    port = str(free_port())
    started = []
    for rank in range(world_size):
        rank_variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world_size),
        }
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        variables = {**os.environ, **rank_variables, **rendezvous}
        process = subprocess.Popen(
            [sys.executable, str(script)],
            env=variables,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        started.append(process)
    return started


@pytest.fixture
def running() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that end with the test."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "action", ["raise ValueError('boom')", pytest.param("sys.exit(3)", marks=pytest.mark.slow)]
)
def test_a_failing_rank_does_not_hang_the_others(
    running: list[subprocess.Popen[str]], tmp_path: Path, action: str
) -> None:
    """No agent here: the rank itself must get out though its peers wait for it, and they notice by themselves."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(root=str(Path(__file__).parents[2]), step=30, action=action))
    running += start(script, 2)
    _, captured = running[1].communicate(timeout=150)
    assert running[1].returncode == (3 if "exit" in action else 1)
    assert "boom" in captured or "exit" in action
    running[0].communicate(timeout=150)
    assert running[0].returncode != 0


def folder_with(tmp_path: Path, **launch_spec: object) -> str:
    made = LaunchSpec(run_id="r", program="train.py", args=[], **launch_spec)  # type: ignore[arg-type]
    RunFolder(tmp_path).launch_spec.write_text(made.to_json())
    return str(tmp_path)


def test_a_wrong_world_size_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patch:
        patch.setenv(env.RUN, folder_with(tmp_path, nodes=2, nproc=4))
        with pytest.raises(RunError, match=r"The job has 8 ranks.*world size of 1"), quiet():
            pass


def test_params_and_settings_come_from_the_launch_spec(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = folder_with(
        tmp_path, params={"lr": 0.1, "net": {"width": 8}}, runtime={"max_steps": 3, "seed": None}
    )
    with monkeypatch.context() as patch:
        patch.setenv(env.RUN, folder)
        session = quiet(seed=5, max_steps=100)
    with session as run:
        assert (run.params.lr, run.params["net"].width, run.params.get("depth", 2)) == (0.1, 8, 2)
        assert run.settings.seed == 5
        with pytest.raises(AttributeError, match="--param depth="):
            _ = run.params.depth
        with pytest.raises(AttributeError):
            run.params.lr = 1
        batches = [batch for _ in run.epochs(9) for batch in run.steps(range(2))]
    assert batches == [0, 1, 0]
    events = [
        json.loads(line) for line in (tmp_path / "events" / "rank-0.jsonl").read_text().splitlines()
    ]
    names = ["training", "total_steps", "first_batch", "first_step", "session_end"]
    assert [each["event"] for each in events] == names
    assert events.pop(1)["steps"] == 3
    assert events.pop(1)["step"] == 0
    phases = ["device", "rendezvous", "process_group", "setup", "first_batch", "first_step"]
    assert list(events[1]["seconds"]) == phases
    assert events[1]["step"] == 1
    assert all(each >= 0 for each in events[1]["seconds"].values())
    params = Params({"a": {"b": 1}})
    for copied in (copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        assert (dict(copied), copied.a.b) == ({"a": {"b": 1}}, 1)


def test_invalid_settings_are_named() -> None:
    for wrong in ({"precision": "fp8"}, {"on_nonfinite": "pray"}, {"max_steps": 0}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            Settings(**wrong).validate()  # type: ignore[arg-type]


def test_two_ranks_on_one_gpu_are_named() -> None:
    def placed(rank: int, host: str, hardware: str) -> RankPlacement:
        return RankPlacement(rank, host, hardware, "")

    devices = [(0, "a", "GPU-1"), (1, "a", "GPU-2"), (2, "b", "GPU-1"), (3, "b", "GPU-1")]
    placements = [placed(*each) for each in devices]
    assert find_shared_gpu(placements[:3]) is None
    assert find_shared_gpu(placements) == "Ranks 2 and 3 are on the same GPU of node b (GPU-1)."
    # CPUs may be shared
    assert find_shared_gpu([placed(0, "a", ""), placed(1, "a", "")]) is None


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize(
    "wants", ["resume", "save_every_steps", "save_every_seconds", "best", "", "folder", "a folder"]
)
def test_a_session_that_cannot_save_says_so_once(
    wants: str, by_hand: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, dict[str, Any]] = {
        "save_every_steps": {"save_every_steps": 1},
        "save_every_seconds": {"save_every_seconds": 60},
        "best": {"best": "loss"},
        "folder": {"folder": tmp_path, "save_every_steps": 1},
        "a folder": {"save_every_steps": 1},
    }
    with quiet(progress=False, **settings.get(wants, {})) as run:
        if wants == "resume":
            run.resume()
        elif wants == "a folder":
            run.resume(folder=tmp_path)
        for _ in range(2):
            if by_hand:
                assert not run.should_stop
            else:
                list(run.steps(range(2)))
    error = capfd.readouterr().err
    assert error.count("no run folder: nothing is saved; pass folder=...") == (
        wants not in ("", "folder", "a folder")
    )
    unsaved = "save_every_steps is set, but nothing is saved: the script does not call run.resume"
    assert error.count(unsaved) == (wants == "folder")


def test_the_report_lists_the_placement(capfd: pytest.CaptureFixture[str]) -> None:
    with paceline.session(cpu=True) as run:
        run.print("hello")
    captured = capfd.readouterr()
    assert captured.out == "hello\n"
    assert (
        f"rank 0 of 1 · node {os.uname().nodename} · local rank 0 · cpu · pid {os.getpid()} · cpus"
        in captured.err
    )
    assert "done in" in captured.err
    assert parse_cpu_list(format_cpu_list({0, 1, 2, 5, 9})) == {0, 1, 2, 5, 9}


def write_rank(folder: str, fail: bool) -> None:
    with quiet() as run:
        total = run.sum(run.rank)
        (Path(folder) / str(run.rank)).write_text(f"{run.world_size} {total} {run.identity.source}")
        if fail and run.rank == 1:
            raise ValueError("boom")
        while fail and run.rank == 0:
            time.sleep(0.05)


def test_evaluation_loaders_are_limited() -> None:
    made = []
    with quiet() as run:
        for _ in range(30):
            fresh = TensorDataset(torch.ones(4, 1))
            made.append(weakref.ref(fresh))
            assert sum(len(x) for (x,) in run.evaluate(fresh)) == 4
            del fresh
        assert sum(each() is not None for each in made) < 15


def test_spawned_ranks_find_each_other(tmp_path: Path) -> None:
    paceline.spawn(write_rank, (str(tmp_path), False), nproc=2)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["2 1 spawn"] * 2


def test_a_call_of_spawn_without_a_guard_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process that imports the script."""
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(RuntimeError) as raised:
        paceline.spawn(write_rank, nproc=2)
    assert IMPORTING.search(str(raised.value)), "the agent recognizes it in the log"


def test_a_spawned_rank_that_fails_ends_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is also written where an agent looks for it."""
    with monkeypatch.context() as patch:
        patch.setenv(env.RUN, folder_with(tmp_path, nproc=2, style="spawn"))
        attempt = RunFolder(tmp_path).attempt(1)
        attempt.path.mkdir()
        with pytest.raises(LaunchError, match="Rank 1 of 2 failed: exit code 1"):
            paceline.spawn(write_rank, (str(tmp_path), True), nproc=2)
    record = json.loads(attempt.error(1).read_text())
    assert (record["rank"], record["type"], record["message"]) == (1, "ValueError", "boom")
    assert "write_rank" in record["traceback"]


def add_different_things() -> list[Any]:
    found: list[Any] = []
    with quiet() as run:
        first = run.rank == 0
        three = torch.tensor(3)
        for value in (0 if first else three, 0 if first else torch.ones(2)):
            total = run.sum(value)
            found.append((total.tolist(), str(total.dtype)))
        for one, other in (
            (torch.ones(2), torch.ones(2).double()),
            (torch.ones(2), torch.ones(3)),
            (1, torch.ones(2)),
        ):
            with pytest.raises(UsageError) as error:
                run.sum(one if first else other)
            found.append(error.value.message)
        found.append(run.sum(2**70))
    return found


def test_ranks_add_up_numbers_and_tensors(ranks: Ranks) -> None:
    got = "run.sum and run.mean got a cpu tensor of torch.float32 and shape (2,) on one rank"
    expected = [
        (3, "torch.int64"),
        ([1.0, 1.0], "torch.float32"),
        f"{got}, but a cpu tensor of torch.float64 and shape (2,) on rank 1.",
        f"{got}, but a cpu tensor of torch.float32 and shape (3,) on rank 1.",
        f"{got}, but the number 1 on rank 0.",
        2**71,
    ]
    assert ranks(add_different_things, 2) == [expected, expected]


def test_all_state_goes_to_one_resume_under_names_of_its_own(tmp_path: Path) -> None:
    """A second call would drop what the first one saves, and a name of ours would hide our state."""
    data = TensorDataset(torch.zeros(8, 1))
    with quiet() as run:
        loader = run.loader(data, batch_size=4)
        model = run.wrap(net())
        for name in ("loader_0", "plain_loader"):
            with pytest.raises(UsageError, match=f"saves state of its own as '{name}'"):
                run.resume(model=model, **{name: model}, folder=tmp_path)
        run.resume(model=model, folder=tmp_path)
        with pytest.raises(UsageError, match="a second time"):
            run.resume(opt=torch.optim.SGD(model.parameters(), 0.1), folder=tmp_path)
        assert sum(1 for _ in run.steps(loader)) == 2
