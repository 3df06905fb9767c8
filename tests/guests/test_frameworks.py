"""Accelerate and Lightning on several ranks of one machine, in the styles named after them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Paceline = Callable[..., "subprocess.CompletedProcess[str]"]

TRAINER = """\
import json
import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

torch.manual_seed(0)
net = Net()
trainer = lightning.Trainer(
    accelerator="cpu", devices=1, num_nodes=2, max_epochs=2, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(net, DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4))
report = {"rank": trainer.global_rank, "world": trainer.world_size, "node": trainer.node_rank}
report["sum"] = float(trainer.strategy.reduce(torch.tensor(trainer.global_rank + 1.0), reduce_op="sum"))
report |= {"steps": trainer.global_step, "weight": net.layer.weight.sum().item()}
print("report " + json.dumps(report), flush=True)
"""


@pytest.mark.slow  # tests/slurm/test_frameworks.py trains with Accelerate
def test_the_self_test_of_accelerate(paceline: Paceline, tmp_path: Path) -> None:
    module = "accelerate.test_utils.scripts.test_script"
    done = paceline(
        "run", "--style", "accelerate", "--cpu", "--nproc", "2", "-m", module, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Num processes: 2" in done.stdout, "two single processes would pass as well"
    assert "independently" not in done.stderr


def test_the_trainer_of_lightning_on_two_nodes(paceline: Paceline, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINER)
    done = paceline(
        "run",
        "--style",
        "lightning",
        "--cpu",
        "--nodes",
        "2",
        "--nproc",
        "1",
        "--tee",
        "all",
        "train.py",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.partition("report ")[2] for line in done.stdout.splitlines() if "report " in line]
    reports = sorted(map(json.loads, lines), key=lambda report: report["rank"])
    assert [(each["rank"], each["world"], each["node"], each["steps"]) for each in reports] == [
        (0, 2, 0, 8),
        (1, 2, 1, 8),
    ]
    assert reports[0]["weight"] == pytest.approx(reports[1]["weight"]), (
        "the gradients were averaged over the nodes"
    )
    assert "independently" not in done.stderr


def test_what_show_says_of_a_script_that_is_not_distributed(
    paceline: Paceline, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("print('hello')\n")
    done = paceline("run", "--cpu", "--nproc", "2", "train.py", cwd=tmp_path, check=True)
    assert "2 processes run this script independently" in done.stderr
    shown = paceline("show", cwd=tmp_path, check=True).stdout
    assert "2 independent processes (fork style)" in shown
    assert "running" in shown
    assert "starting 100%" not in shown
