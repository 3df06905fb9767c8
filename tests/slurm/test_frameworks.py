"""Lightning and Accelerate train with their own loops on our ranks, in the styles named after them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.guests.test_frameworks import TRAINER
from tests.slurm.harness import Cluster
from tests.slurm.runs import Paceline, diagnostics, project, run_of

LIGHTNING = """\
import json
import torch
from lightning.fabric import Fabric

fabric = Fabric(accelerator="cpu", devices=1, num_nodes=2, strategy="ddp")
fabric.launch()
torch.manual_seed(0)
plain = torch.nn.Linear(4, 1)
model, opt = fabric.setup(plain, torch.optim.SGD(plain.parameters(), 0.1))
torch.manual_seed(fabric.global_rank)
loss = model(torch.randn(8, 4)).square().mean()
fabric.backward(loss)
opt.step()
total = fabric.all_reduce(torch.tensor(float(fabric.global_rank + 1)), reduce_op="sum")
report = {"rank": fabric.global_rank, "world": fabric.world_size, "sum": float(total)}
report["weight"] = plain.weight[0, 0].item()
print("report " + json.dumps(report), flush=True)
"""

ACCELERATE = """\
import json
import torch
from accelerate import Accelerator

helper = Accelerator()
torch.manual_seed(0)
plain = torch.nn.Linear(4, 1)
model, opt = helper.prepare(plain, torch.optim.SGD(plain.parameters(), 0.1))
torch.manual_seed(helper.process_index)
loss = model(torch.randn(8, 4)).square().mean()
helper.backward(loss)
opt.step()
total = helper.reduce(torch.tensor(float(helper.process_index + 1)), reduction="sum")
report = {"rank": helper.process_index, "world": helper.num_processes, "sum": float(total)}
report["weight"] = plain.weight[0, 0].item()
print("report " + json.dumps(report), flush=True)
helper.end_training()
"""


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("style", "script"),
    [
        # the Trainer: tests/guests
        pytest.param("lightning", LIGHTNING, id="fabric", marks=pytest.mark.slow),
        pytest.param("lightning", TRAINER, id="trainer", marks=pytest.mark.slow),
        pytest.param("accelerate", ACCELERATE, id="accelerate"),
    ],
)
def test_framework_on_two_nodes(
    style: str, script: str, tmp_path: Path, cluster: Cluster, slurm_paceline: Paceline
) -> None:
    home = project(tmp_path / "project", script)
    done = slurm_paceline(
        "submit",
        "--style",
        style,
        "--nodes",
        "2",
        "--nproc",
        "1",
        "--cpu",
        "--time",
        "10m",
        "--wait",
        "train.py",
        cwd=home,
        timeout=400,
    )
    folder = run_of(done)
    assert done.returncode == 0, diagnostics(folder, done)
    reports = []
    for rank in (0, 1):
        log = folder.attempt(1).log(rank).read_text(encoding="utf-8")
        reports += [
            json.loads(line.removeprefix("report "))
            for line in log.splitlines()
            if line.startswith("report ")
        ]
    assert [(each["rank"], each["world"], each["sum"]) for each in reports] == [
        (0, 2, 3.0),
        (1, 2, 3.0),
    ]
    assert reports[0]["weight"] == reports[1]["weight"], (
        "the gradients were averaged over the nodes"
    )
