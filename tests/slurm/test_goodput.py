"""Goodput of a run on a real cluster, into which known delays and a failure are injected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.watch.details import read_details
from paceline.watch.records import read_record
from tests.slurm.harness import Cluster
from tests.slurm.runs import Paceline, diagnostics, run_of

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

# Writes down how long each injected delay really took, and when each step ended.
SCRIPT = """
import json, os, signal, sys, time
began = time.time()
time.sleep(4)
imported = time.time() - began
import torch
import paceline
ledger = open(sys.argv[1], "a", buffering=1)
def record(what, **fields):
    print(json.dumps({"what": what, "time": time.time(), **fields}), file=ledger)
def delay(what, seconds):
    began = time.time()
    time.sleep(seconds)
    record(what, seconds=time.time() - began)
record("import", seconds=imported)
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 80
    def __getitem__(self, index):
        delay("data", 0.1)
        return torch.ones(2)
with paceline.session(save_every_steps=20, progress=False) as run:
    model = run.wrap(torch.nn.Linear(2, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = run.loader(Slow(), batch_size=1)
    resumed = run.resume(model=model, opt=opt, loader=loader)
    delay("setup", 5)
    is_first = True
    for x in run.steps(loader):
        if is_first:
            delay("compile", 4)
            is_first = False
        time.sleep(0.2)
        run.backward(model(x).pow(2).mean())
        run.update(opt)
        if run.step == 50 and not resumed:
            delay("stuck", 6)
            record("killed")
            os.kill(os.getpid(), signal.SIGKILL)
        record("step", step=run.step)
"""
SHAPE = ("--nodes", "1", "--gpus", "1", "--cpus-per-gpu", "1", "--cpu", "--time", "30m", "--no-snapshot")


def test_goodput_agrees_with_injected_delays(slurm_paceline: Paceline, cluster: Cluster, tmp_path: Path) -> None:
    script, ledger = tmp_path / "train.py", tmp_path / "ledger.jsonl"
    script.write_text(SCRIPT)
    done = slurm_paceline("submit", *SHAPE, str(script), str(ledger), cwd=tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    folder = run_of(done)
    assert cluster.wait(folder.job.read_text().strip(), timeout=400) == "COMPLETED", diagnostics(folder)

    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    [killed] = [number for number, line in enumerate(lines) if line["what"] == "killed"]
    first, second = lines[:killed], lines[killed + 1 :]

    def seconds(part: list[dict[str, float]], what: str) -> float:
        return sum(line["seconds"] for line in part if line["what"] == what)

    saved = next(number for number, line in enumerate(first) if line.get("step") == 39)  # 40 steps are done
    lost = lines[killed]["time"] - first[saved]["time"]
    goodput = read_details(read_record(folder, lambda jobs: {})).goodput
    near = {"rel": 0.05, "abs": 0.5}
    assert goodput.seconds["lost"] == pytest.approx(lost, **near)
    counted = [*first[:saved], *second]
    waits = [line for line in counted if line["what"] == "data"]
    assert goodput.parts["training"]["data"] == pytest.approx(seconds(waits, "data"), **near)
    trained = 0.0
    for part in (first[: saved + 1], second):
        steps = [line["time"] for line in part if line["what"] == "step"]
        trained += (steps[-1] - steps[0]) * len(steps) / (len(steps) - 1)
    assert goodput.seconds["training"] + goodput.seconds["saving"] == pytest.approx(trained, **near)
    starting = goodput.parts["starting"]
    assert starting["compile"] == pytest.approx(seconds(lines, "compile"), **near)
    assert starting["setup"] == pytest.approx(seconds(lines, "setup"), rel=0.05, abs=1.5)  # and building the model
    assert starting["import"] > seconds(lines, "import")
    assert (goodput.failures, sum(goodput.seconds.values())) == (1, pytest.approx(goodput.total))
