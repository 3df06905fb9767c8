"""Adopted scripts train on two ranks as on one: equal weights after every script, to rounding."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline.tools.adopt.script_changes import advise
from paceline.tools.adopt.source_edits import read_source

CORPUS = Path(__file__).parent / "corpus"
Paceline = Callable[..., "subprocess.CompletedProcess[str]"]

SINGLE = (
    "accumulation",
    "argparse_main",
    "cuda_everywhere",
    "default_device",
    "gan",
    "mixed_precision",
    "notebook",
    "numbered_epochs",
    "progress_and_schedule",
    "trainer_class",
    "two_optimizers",
    "two_phases",
    "umlaute",
)
# these do not shuffle: one rank trains as before
ORDERED = ("gan", "numbered_epochs", "two_phases")
DDP = ("ddp",)
SLOW = {  # other scripts have the same kinds of loops
    "default_device",
    "notebook",
    "progress_and_schedule",
    "trainer_class",
    "two_optimizers",
    "umlaute",
}

# Records the parameters after the last step, and the loss of every backward as it is averaged over the ranks.
RECORDER = """
import atexit, os, runpy, sys, torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import paceline.runtime.run

last, losses, counts = {}, [], []

def remember(optimizer, *_):
    last[id(optimizer)] = optimizer

def backward(loss, *args, original=torch.autograd.backward, **options):
    losses.append(float(loss))
    original(loss, *args, **options)

def count_batches(run, *args, steps=paceline.runtime.run.Run.steps, **options):
    for batch in steps(run, *args, **options):
        counts.append(len(batch[0]))
        yield batch

def write():
    parameters = [p.detach().clone() for each in last.values() for group in each.param_groups for p in group["params"]]
    torch.save({"parameters": parameters, "losses": losses, "counts": counts}, "state-" + os.environ["RANK"] + ".pt")

register_optimizer_step_post_hook(remember)
torch.autograd.backward = backward  # which Tensor.backward calls
paceline.runtime.run.Run.steps = count_batches
atexit.register(write)
sys.argv = [%r, *%r]
runpy.run_path(%r, run_name="__main__")
"""


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train all scripts that are tested, on one rank and on two, from one process that imports torch once."""
    folder = tmp_path_factory.mktemp("adopted")
    (folder / "runs").mkdir()
    cases = []
    own = [
        item
        for item in request.session.items
        if item.path == request.path and isinstance(item, pytest.Function)
    ]
    tested = {item.callspec.params["name"] for item in own if hasattr(item, "callspec")}
    for name in sorted(tested | {"argparse_main"}):
        script = folder / f"{name}.py"
        source = read_source(CORPUS / f"{name}.py")
        script.write_bytes(advise(source).text.encode(source.encoding))
        if name in ORDERED:
            cases.append([f"{name}-0", 1, RECORDER % (str(source.name), [], str(source.name))])
        for ranks in (1, 2):
            args = ["--batch-size", str(16 // ranks)] if name in DDP else []
            cases.append([f"{name}-{ranks}", ranks, RECORDER % (str(script), args, str(script))])
    done = subprocess.run(
        [sys.executable, "-m", "tests.runtime.flat_scripts", str(folder / "runs"), "--quick"],
        input=json.dumps(cases),
        text=True,
        capture_output=True,
        cwd=Path(__file__).parents[3],
        timeout=540,
    )
    assert done.returncode == 0, done.stderr
    (folder / "codes.json").write_text(done.stdout.splitlines()[-1])
    return folder


def state(trained: Path, name: str, ranks: int) -> list[dict[str, list[torch.Tensor]]]:
    folder = trained / "runs" / f"{name}-{ranks}"
    logs = "\n".join(path.read_text() for path in sorted(folder.glob("rank-*.log")))
    codes = json.loads((trained / "codes.json").read_text())[f"{name}-{ranks}"]
    assert set(codes) == {0}, logs
    return [torch.load(folder / f"state-{rank}.pt") for rank in range(len(codes))]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())
        for name in (*SINGLE, *DDP)
    ],
)
def test_two_ranks_train_as_one(name: str, trained: Path) -> None:
    (one,), two = state(trained, name, 1), state(trained, name, 2)
    for rank in two:
        assert len(one["parameters"]) == len(rank["parameters"]) > 0
        for expected, found in zip(one["parameters"], rank["parameters"], strict=True):
            assert torch.allclose(expected, found, rtol=1e-4, atol=1e-6)
    pairs = list(zip(two[0]["losses"], two[1]["losses"], strict=True))
    assert [sum(pair) / 2 for pair in pairs] == pytest.approx(one["losses"], rel=1e-4, abs=1e-7)
    assert len(set(one["losses"])) == len(one["losses"]) > 1, "it trains"
    assert any(left != right for left, right in pairs), "each rank trains on its part"
    if name in DDP:
        return
    assert len(one["counts"]) == len(two[0]["counts"]) > 0
    assert [sum(pair) for pair in zip(two[0]["counts"], two[1]["counts"], strict=True)] == one[
        "counts"
    ], "shares"


@pytest.mark.parametrize("name", ORDERED)
def test_one_rank_trains_as_the_script_did_before(name: str, trained: Path) -> None:
    (before,), (one,) = state(trained, name, 0), state(trained, name, 1)
    assert one["losses"] == pytest.approx(before["losses"], rel=1e-5, abs=1e-7)
    assert before["losses"]
    files = [
        sorted(path.name for path in (trained / "runs" / f"{name}-{n}").glob("*.json"))
        for n in (0, 1, 2)
    ]
    assert files[0] == files[1] == files[2]


def test_ranks_write_each_file_once(trained: Path) -> None:
    """Adopted scripts save on rank 0, and print there."""
    folder = trained / "runs" / "argparse_main-2"
    assert (folder / "net.pt").exists()
    assert (folder / "rank-0.log").read_text().count("Train Epoch") == 4
    assert "Train Epoch" not in (folder / "rank-1.log").read_text()


@pytest.mark.slow  # test_two_ranks_train_as_one compares weights
def test_paceline_run_logs_the_same_loss(tmp_path: Path, paceline: Paceline, scratch: Path) -> None:
    """The whole way: adopt, run on one rank; and on two, end in the middle, and resume."""
    (tmp_path / "train.py").write_bytes((CORPUS / "argparse_main.py").read_bytes())
    paceline("adopt", "--write", "train.py", check=True)
    paceline("run", "--cpu", "--nproc", "1", "--name", "ranks-1", "train.py", check=True)
    paceline(
        "run",
        "--cpu",
        "--nproc",
        "2",
        "--max-steps",
        "7",
        "--name",
        "ranks-2",
        "train.py",
        check=True,
    )
    paceline("run", "--max-steps", "1000", "--resume", "ranks-2", check=True)
    found = {}
    for metrics in scratch.rglob("metrics.jsonl"):
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        name = json.loads((metrics.parent / "run.json").read_text())
        key = re.search(r"ranks-\d", json.dumps(name))
        assert key
        found[key[0]] = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert len(found["ranks-1"]) == 20
    assert found["ranks-2"] == pytest.approx(found["ranks-1"], rel=1e-4)


@pytest.mark.slow
def test_a_script_that_spawns_its_ranks(tmp_path: Path, paceline: Paceline) -> None:
    (tmp_path / "train.py").write_bytes((CORPUS / "mp_spawn.py").read_bytes())
    shown = paceline("adopt", "--write", "train.py", check=True)
    command = next(
        line.split() for line in shown.stdout.splitlines() if line.startswith("  paceline run")
    )
    assert command[:4] == ["paceline", "run", "--style", "spawn"]
    losses = []
    for ranks in ("1", "2"):
        done = paceline(
            "run", "--cpu", "--style", "spawn", "--nproc", ranks, "train.py", ranks, check=True
        )
        losses += [float(each) for each in re.findall(r"final loss: ([\d.]+)", done.stdout)]
    assert len(losses) == 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
