"""The examples of Lightning: they learn, stop in the middle, and resume to the same weights."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples.framework_ranks import run_framework
from tests.examples.ranks import EXAMPLES
from tests.forked_ranks import Ranks

ARGS = ["--cpu", "--samples", "960", "--epochs", "6"]  # 15 steps each


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_trainer_saves_on_sigterm_and_resumes_exactly(ranks: Ranks, tmp_path: Path) -> None:
    whole, parts = ([*ARGS, "--folder", str(tmp_path / name)] for name in ("whole", "parts"))
    stopped = ranks(
        run_framework, 2, "lightning", "train", [parts], 40, signal.SIGTERM, timeout=300
    )
    assert [code for ((code, _),) in stopped] == [None, None], "the exit code is 0"
    assert "accuracy" not in stopped[0][0][1]
    larger = ["--samples", "100", "--batch-size", "64"]  # a batch than a rank has samples
    runs = [larger, parts, whole]
    first, second = ranks(run_framework, 2, "lightning", "train", runs, timeout=300)
    (refused, _), (resumed, printed), (expected, _) = first
    assert refused == second[0][0] == 2
    assert resumed == expected == second[1][0] > 0.9
    assert printed.startswith("resumed at step 40\nepoch 3: step 45\n")
    ends = [
        torch.load(tmp_path / name / "last.ckpt", weights_only=True) for name in ("whole", "parts")
    ]
    assert [end["global_step"] for end in ends] == [90, 90]
    assert same(ends[0]["state_dict"], ends[1]["state_dict"])


@pytest.mark.slow
def test_fabric_saves_and_resumes_exactly(ranks: Ranks, tmp_path: Path) -> None:
    whole, parts = ([*ARGS, "--folder", str(tmp_path / name)] for name in ("whole", "parts"))
    stopped = ranks(run_framework, 2, "lightning", "train_fabric", [parts], 40, timeout=300)
    assert [code for ((code, _),) in stopped] == [75, 75]
    ((resumed, printed), (expected, _)), _ = ranks(
        run_framework, 2, "lightning", "train_fabric", [parts, whole], timeout=300
    )
    assert resumed == expected > 0.9
    assert printed.startswith("resumed at step 40\nepoch 3: ")
    ends = [
        torch.load(tmp_path / name / "fabric.ckpt", weights_only=True)
        for name in ("whole", "parts")
    ]
    assert same(ends[0]["model"], ends[1]["model"])


def fit_with_requeue() -> Any:
    """Return the handler of SIGUSR1 that a rank has while it trains with Lightning's own requeue."""
    import lightning
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # as in every rank
    found = []

    class Look(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            found.append(
                (
                    trainer._signal_connector._has_already_handler(signal.SIGTERM),
                    signal.getsignal(10),
                )
            )

    names = {
        "NTASKS": "1",
        "PROCID": "0",
        "LOCALID": "0",
        "NODEID": "0",
        "JOB_ID": "7",
        "JOB_NAME": "train",
    }
    os.environ.update({f"SLURM_{name}": value for name, value in names.items()})
    trainer = lightning.Trainer(
        max_steps=1,
        accelerator="cpu",
        devices=1,
        plugins=[SLURMEnvironment(auto_requeue=True)],
        callbacks=[Look()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BoringModel())
    return found


@pytest.mark.slow
def test_lightning_does_not_requeue_the_job_itself(ranks: Ranks) -> None:
    """Not even with its Slurm plugin: ranks ignore SIGUSR1, and Lightning leaves that as it is."""
    assert ranks(fit_with_requeue, 1, timeout=300) == [[(True, signal.SIG_IGN)]]


def test_its_settings_are_valid(paceline: Any) -> None:
    done = paceline(
        "submit", "--dry-run", "--gpus", "8", "train.py", cwd=EXAMPLES / "lightning", check=True
    )
    assert "#SBATCH --time=01:00:00" in done.stdout
