"""Ranks that run a script independently: the run says so, and never of scripts that may form a group."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.agent.health.separate_copies import runs_copies
from paceline.contract.launch_spec import LaunchSpec
from tests.agent.conftest import Launch, Launched

INDEPENDENT = "2 processes run this script independently"
TRAIN = """
import os
import torch
from helper import model
opt = torch.optim.SGD(model.parameters(), 0.1)
model(torch.randn(1, 2)).sum().backward()
opt.step()
"""
HELPER = "import numpy as np\nimport torch\nmodel = torch.nn.Linear(2, 2)\n"


def independent_events(started: Launched) -> list[dict[str, Any]]:
    lines = (started.run.events / "agent-0.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == "independent"]


def test_a_run_of_copies_is_reported(launch: Launch) -> None:
    started = launch("print('hello')")
    assert started.wait() == 0, started.err()
    assert started.err().count(INDEPENDENT) == 1
    assert "--nproc 1" in started.err()
    assert "init_process_group" in started.err()
    assert [event["processes"] for event in independent_events(started)] == [2]


def test_the_spawn_style_with_a_script_that_spawns_nothing(launch: Launch) -> None:
    started = launch("print('hello')", style="spawn")
    assert started.wait() == 0, started.err()
    assert "1 process runs this script, not 2" in started.err()


@pytest.mark.parametrize(
    "line",
    [
        "",
        "os.environ['TOKENIZERS_PARALLELISM'] = 'false'",
        "from torchvision import models",
        "from tqdm.auto import tqdm",
        "import helper.more",
    ],
)
def test_copies(tmp_path: Path, line: str) -> None:
    assert copies(tmp_path, line)


@pytest.mark.parametrize(
    "line",
    [
        "os.environ['RANK']",
        "os.environ.get('LOCAL_RANK', -1)",
        "os.getenv('WORLD_SIZE')",
        "os.environ['MASTER_ADDR']",
        "os.environ.get('SLURM_PROCID')",
        "os.path.expandvars('${RANK}')",
        "torch.distributed.init_process_group('gloo')",
        "import torch.distributed as dist",
        "import torch.multiprocessing as mp; mp.spawn(print, nprocs=2)",
        "import subprocess; subprocess.run(['sh', '-c', 'train'])",
        "pid = os.fork()",
        "os.execv('/bin/true', ['true'])",
        "from mpi4py import MPI",
        "import paceline",
        "import accelerate",
        "from transformers import Trainer",
        "import a_library_that_shards_data",
    ],
)
def test_scripts_that_may_know_of_their_ranks(tmp_path: Path, line: str) -> None:
    assert not copies(tmp_path, line)
    assert not copies(tmp_path, "", helper=f"import os, torch\n{line}\n{HELPER}")


def copies(folder: Path, line: str, *, helper: str = HELPER, **fields: Any) -> bool:
    (folder / "helper.py").write_text(helper)
    (folder / "train.py").write_text(f"{TRAIN}\n{line}\n")
    spec = LaunchSpec(
        "run", str(folder / "train.py"), [], cwd=str(folder), **{"nproc": 2, **fields}
    )
    return runs_copies(spec)


def test_one_rank_and_programs_that_mpirun_starts_are_no_copies(tmp_path: Path) -> None:
    assert not copies(tmp_path, "", nproc=1)
    assert not copies(tmp_path, "", style="mpirun")
    assert not runs_copies(LaunchSpec("run", str(tmp_path / "none.py"), [], nproc=2))
