"""`paceline sweep --local`: the same trials as on a cluster, several at a time on this machine."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.contract.sweep_folder import SweepFolder
from paceline.launch.local_run import Machine
from paceline.spec.job import Program
from paceline.spec.load import load_job
from paceline.spec.option import Flag
from paceline.sweep.local_sweep import slots, with_ranks
from tests.until import until

Completed = subprocess.CompletedProcess[str]
Paceline = Callable[..., Completed]

SCRIPT = """\
import argparse, os, pathlib
import paceline
parser = argparse.ArgumentParser()
parser.add_argument("--x", type=float)
args = parser.parse_args()
if args.x == 2 and not pathlib.Path("mended").exists():
    raise ValueError("two is too much")
paceline.report(args.x + 1)
"""
# Starts the script as a fresh process, without torch.
SWEEP = """\
[sweep]
metric = "loss"
script = "train.py"
[space]
x = [3, 1, 2]
[launch]
style = "spawn"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "project"
    made.mkdir()
    (made / "train.py").write_text(SCRIPT, encoding="utf-8")
    (made / "digits.toml").write_text(SWEEP, encoding="utf-8")
    return made


def sweep_of(scratch: Path, name: str = "digits") -> SweepFolder:
    return SweepFolder(scratch / "project" / "default" / name)


def results(sweep: SweepFolder) -> dict[int, dict[str, Any]]:
    return {
        int(path.parent.name): json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(
            sweep.trials.glob("*/result.json"), key=lambda path: int(path.parent.name)
        )
    }


def test_a_local_sweep_prints_the_best_trial_and_reruns_failed_ones(
    paceline: Paceline, folder: Path, scratch: Path
) -> None:
    refused = paceline("sweep", "--local", "--setup", "module load cuda", "digits.toml", cwd=folder)
    assert "--setup applies to jobs on Slurm" in refused.stderr
    shown = paceline("sweep", "--local", "--dry-run", "digits.toml", cwd=folder, check=True)
    assert "  2: x=2" in shown.stdout
    assert not scratch.exists()
    done = paceline("sweep", "--local", "--parallel", "2", "digits.toml", cwd=folder)
    assert done.returncode == 1
    assert "best of 2: trial 1, loss 2, x=1" in done.stderr
    assert "trial 2: failed, x=2, ValueError: two is too much" in done.stderr
    sweep = sweep_of(scratch)
    assert [result["state"] for result in results(sweep).values()] == ["done", "done", "failed"]
    assert results(sweep)[0]["value"] == 4.0

    again = paceline("sweep", "--local", "digits.toml", cwd=folder)
    assert again.returncode == 2
    assert "already has all of these trials" in again.stderr
    (folder / "mended").touch()
    paceline("sweep", "--local", "--resubmit", "failed", "digits", cwd=folder, check=True)
    assert [result["state"] for result in results(sweep).values()] == ["done"] * 3
    assert [path.name for path in sorted(sweep.path.glob("submissions/*"))] == ["1", "2"]
    missing = paceline("sweep", "--local", "--resubmit", "missing", "digits", cwd=folder)
    assert "There are no missing trials in 'digits'" in missing.stderr

    (folder / "digits.toml").write_text(SWEEP.replace('"loss"', '"accuracy"'), encoding="utf-8")
    other = paceline("sweep", "--local", "digits.toml", cwd=folder)
    assert other.returncode == 2
    assert "with a different metric: 'loss'" in other.stderr
    assert "--name" in other.stderr


def test_seeds_and_lists(paceline: Paceline, folder: Path, scratch: Path) -> None:
    (folder / "seeded.py").write_text(
        "import json, os, paceline\n"
        "order = json.load(open(os.environ['PACELINE_RUN'] + '/launch.json'))\n"
        "paceline.report(order['runtime']['seed'])\n",
        encoding="utf-8",
    )
    (folder / "configurations.txt").write_text(
        "seeded.py --x 5 # one\n\nseeded.py 'a b'\n", encoding="utf-8"
    )
    paceline(
        "sweep",
        "--local",
        "--seeds",
        "2",
        "--style",
        "spawn",
        "configurations.txt",
        cwd=folder,
        check=True,
    )
    sweep = sweep_of(scratch, "configurations")
    assert [result["value"] for result in results(sweep).values()] == [0, 1, 0, 1]
    assert [point.group for point in sweep.read_points()] == [0, 0, 1, 1]
    order = json.loads(sweep.trial(2).launch_spec.read_text(encoding="utf-8"))
    assert order["args"] == ["a b"]
    assert order["program"] == str(folder / "seeded.py")


def test_an_interrupted_sweep_resumes(paceline: Paceline, folder: Path, scratch: Path) -> None:
    (folder / "train.py").write_text(
        "import pathlib, sys, time\nimport paceline\n"
        "pathlib.Path(f'began-{sys.argv[2]}').touch()\n"
        "while not pathlib.Path('go').exists(): time.sleep(0.05)\n"
        "paceline.report(1)\n",
        encoding="utf-8",
    )
    environment = {**os.environ, "PACELINE_SCRATCH": str(scratch)}
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "sweep", "--local", "--parallel", "2", "digits.toml"],
        cwd=folder,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until(lambda: len(list(folder.glob("began-*"))) == 2, "no two trials begin")
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert process.returncode == 130, stderr
    assert (
        "2 trials will save and stop, and no more will start; press Ctrl-C again to end at once"
        in stderr
    )
    assert "trial 0: stopped" in stderr
    assert "--resubmit missing digits" in stderr
    sweep = sweep_of(scratch)
    assert results(sweep) == {}
    shown = paceline("sweep", "show", "digits", cwd=folder, check=True).stdout
    assert "\n3 missing of 3\n" in shown
    assert "again: paceline sweep --local --resubmit missing digits" in shown
    (folder / "go").touch()
    paceline("sweep", "--local", "--resubmit", "missing", "digits", cwd=folder, check=True)
    assert [result["state"] for result in results(sweep).values()] == ["done"] * 3
    assert len(sweep.trial(0).attempts()) == 2


@pytest.mark.slow  # tests/remote/test_hostile_names.py quotes names
def test_commands_to_type_quote_the_name_of_a_sweep(paceline: Paceline, folder: Path) -> None:
    (folder / "list of.txt").write_text("train.py --x 1\ntrain.py --x 2\n", encoding="utf-8")
    done = paceline("sweep", "--local", "--style", "spawn", "list of.txt", cwd=folder)
    assert done.returncode == 1
    [state] = re.findall("state +(paceline sweep show .*)", done.stdout + done.stderr)
    shown = paceline(*shlex.split(state)[1:], cwd=folder, check=True).stdout
    [again] = re.findall("run again: (.*)", shown)
    assert again == "paceline sweep --local --resubmit failed 'list of'"
    (folder / "mended").touch()
    paceline(*shlex.split(again)[1:], cwd=folder, check=True)


def test_an_invalid_file_leaves_no_folder(paceline: Paceline, folder: Path, scratch: Path) -> None:
    (folder / "digits.toml").write_text(SWEEP.replace("train.py", "trian.py"), encoding="utf-8")
    done = paceline("sweep", "--local", "digits.toml", cwd=folder)
    assert done.returncode == 2
    assert "There is no script 'trian.py'" in done.stderr
    assert not scratch.exists()
    unknown = paceline("sweep", "--local", "nothing.toml", cwd=folder)
    assert unknown.returncode == 2
    assert "There is no file 'nothing.toml' here" in unknown.stderr


def test_trials_share_this_machine(tmp_path: Path) -> None:
    def job(**keys: Any) -> Any:
        flags = [Flag(f"--{key}", key.replace("__", "."), value) for key, value in keys.items()]
        return with_ranks(load_job(Program("t.py"), flags=flags, cwd=tmp_path))

    machine = Machine(cores=8, gpus=4)
    two = slots(job(job__gpus_per_node=2), machine, None)
    assert [each.devices for each in two] == [("0", "1"), ("2", "3")]
    assert [each.cores for each in two] == [4, 4]
    assert [each.devices for each in slots(job(), machine, 2)] == [("0",), ("1",)]
    # more than there are: an error of the plan
    assert len(slots(job(launch__nproc=8), machine, None)) == 1
    assert len(slots(job(runtime__cpu=True, launch__nproc=2), machine, None)) == 4
    assert len(slots(job(), Machine(cores=2, gpus=0), 5)) == 5


def test_a_trial_is_found_by_its_name(paceline: Paceline, folder: Path, scratch: Path) -> None:
    paceline("sweep", "--local", "--count", "1", "digits.toml", cwd=folder, check=True)
    cancelled = paceline("sweep", "cancel", "digits", cwd=folder, check=True).stdout
    assert cancelled == "digits has already ended: 1 done\n"
    assert not sweep_of(scratch).cancelled.exists()
    rows = paceline("ps", cwd=folder, check=True).stdout.splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["digits"]  # a sweep is one row
    shown = paceline("show", "digits-0", cwd=folder, check=True)
    assert "done" in shown.stdout
    again = paceline("run", "--resume", "digits-0", cwd=folder, check=True)
    assert str(sweep_of(scratch).trial(0).path) in again.stderr
    assert len(sweep_of(scratch).trial(0).attempts()) == 2


def test_a_local_sweep_can_be_cancelled_from_another_terminal(
    paceline: Paceline, folder: Path, scratch: Path
) -> None:
    (folder / "train.py").write_text(
        "import pathlib, time\npathlib.Path('began').touch()\ntime.sleep(600)\n", encoding="utf-8"
    )
    environment = {**os.environ, "PACELINE_SCRATCH": str(scratch)}
    args = [sys.executable, "-m", "paceline", "sweep", "--local", "--parallel", "1", "digits.toml"]
    process = subprocess.Popen(args, cwd=folder, env=environment, stderr=subprocess.DEVNULL)
    try:
        until((folder / "began").exists, "no trial begins")
        assert (
            "cancelled digits"
            in paceline("sweep", "cancel", "digits", cwd=folder, check=True).stdout
        )
        process.send_signal(signal.SIGINT)  # the script ignores stop requests
        assert process.wait(60) == 130
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert [path.name for path in sweep_of(scratch).trials.iterdir()] == ["0"]
    assert results(sweep_of(scratch)) == {}


TRAINING = """\
import torch
import paceline
with paceline.session(cpu=True, seed=0) as run:
    model = run.wrap(torch.nn.Linear(4, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = run.loader(torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1)), batch_size=8)
    run.resume(model=model, opt=opt, loader=loader)
    for epoch in run.epochs(3):
        for x, y in run.steps(loader):
            loss = (model(x) - y).square().mean()
            run.backward(loss)
            run.update(opt)
            run.log(loss=loss)
            if run.step % 4 == 3:
                run.report(run.params.x + epoch)  # within a step
    run.print("came to its end")
"""


@pytest.mark.slow
def test_pruned_ranks_stop_together_even_within_a_step(
    paceline: Paceline, folder: Path, scratch: Path
) -> None:
    (folder / "train.py").write_text(TRAINING, encoding="utf-8")
    head = '[sweep]\nmetric = "loss"\nscript = "train.py"\nprune = "halving"\nparallel = 1\narguments = "none"\n'
    (folder / "digits.toml").write_text(
        head + "[space]\nx = [1, 9]\n[launch]\nnproc = 2\n", encoding="utf-8"
    )
    paceline("sweep", "--local", "digits.toml", cwd=folder, check=True, timeout=280)
    sweep = sweep_of(scratch)
    assert [result["state"] for result in results(sweep).values()] == ["done", "pruned"]
    good, bad = sweep.trial(0), sweep.trial(1)
    assert "came to its end" in good.attempt(1).log(0).read_text()
    assert "came to its end" not in bad.attempt(1).log(0).read_text()
    assert len(bad.reports.read_text().splitlines()) == 1
    assert list(good.checkpoints.glob("step-*"))
    assert not list(bad.checkpoints.glob("step-*"))  # nothing would resume from there
    assert [path.read_text() for path in bad.path.glob("job-starts/*/verdict")] == ["done\n"]
