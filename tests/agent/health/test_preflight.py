"""Facts about a node, and the check of all nodes."""

from __future__ import annotations

import platform
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from paceline.agent.health import preflight
from paceline.agent.launcher_placement import find_placement
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import JobStartFolder


def launch_spec(**more: Any) -> LaunchSpec:
    return LaunchSpec(
        run_id="r", program="x", args=[], **{"nodes": 2, "nproc": 2, "gpus": 2, **more}
    )


def facts(host: str, **more: Any) -> dict[str, Any]:
    """Return the facts of a healthy node, with changes."""
    return {
        "host": host,
        "node": 0,
        "ranks": [0, 1],
        "visible_gpus": 2,
        "slurm_gpus": 2,
        "gpu_devices": 0,
        "gpu_driver": None,
        "cpus": 8,
        "python": "3.11.2",
        "torch": "2.13.0",
        "nccl": None,
        **more,
    }


# what is wrong with node b, changes to the launch spec -> whether it is fatal, and the text
TABLE: dict[str, tuple[dict[str, Any], dict[str, Any], bool, str]] = {
    "Slurm granted fewer": ({"slurm_gpus": 1}, {}, True, "granted 1 of the 2"),
    "fewer are visible": (
        {"visible_gpus": 0, "slurm_gpus": None},
        {},
        True,
        "0 of the 2 GPUs requested are visible",
    ),
    "no source reports any": (
        {"visible_gpus": None, "slurm_gpus": None},
        {},
        True,
        "0 of the 2 GPUs",
    ),
    "another torch": (
        {"torch": "2.6.0"},
        {},
        True,
        "torch is 2.6.0, but 2.13.0 on the other nodes",
    ),
    "no torch": ({"torch": None}, {}, True, "torch is missing"),
    "another python": ({"python": "3.10.1"}, {}, False, "python is 3.10.1"),
    "a rank's agent sees fewer than those elsewhere": (
        {"ranks": [1], "visible_gpus": 1},
        {"style": "srun"},
        True,
        "1 of the 2 GPUs",
    ),
    "a rank's agent sees no GPU": (
        {"ranks": [1], "visible_gpus": 0},
        {"style": "srun"},
        True,
        "0 of the 2 GPUs",
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_a_bad_node_is_named(case: str, tmp_path: Path) -> None:
    bad, changes, fatal, text = TABLE[case]
    roster = [facts("a"), facts("b", **bad), facts("c")]
    problems = preflight.find_problems(launch_spec(nodes=3, **changes), roster)
    assert [(each.host, each.fatal) for each in problems] == [("b", fatal)]
    assert text in problems[0].text
    assert preflight.unfit_nodes(problems) == (["b"] if fatal else [])
    job_start = JobStartFolder(tmp_path / "job_start")
    preflight.exclude_nodes(job_start, preflight.unfit_nodes(problems))
    assert job_start.excluded_nodes.exists() is fatal


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({}, {}),
        ({"gpus": 0}, {"visible_gpus": 0, "slurm_gpus": None}),
        ({"style": "srun"}, {"ranks": [1], "visible_gpus": 1}),  # one GPU bound to each rank
        ({"style": "srun", "one_gpu_per_rank": True}, {"ranks": [0], "visible_gpus": 1}),
        ({}, {"visible_gpus": None}),  # only Slurm says
        # only the device files say
        ({}, {"visible_gpus": None, "slurm_gpus": None, "gpu_devices": 2}),
    ],
)
def test_healthy_nodes(changes: dict[str, Any], more: dict[str, Any]) -> None:
    assert (
        preflight.find_problems(launch_spec(**changes), [facts("a", **more), facts("b", **more)])
        == []
    )


def test_missing_device_files() -> None:
    roster = [facts("a", gpu_devices=2), facts("b", gpu_devices=1)]
    assert [each.host for each in preflight.find_problems(launch_spec(), roster)] == ["b"]


def test_a_node_is_excluded_once_and_exclusions_add_up(tmp_path: Path) -> None:
    job_start = JobStartFolder(tmp_path / "job_start")
    preflight.exclude_nodes(job_start, ["c"])
    preflight.exclude_nodes(job_start, ["b", "c"])
    assert job_start.excluded_nodes.read_text() == "b\nc\n"
    twice = [facts("b", slurm_gpus=0), facts("b", slurm_gpus=0), facts("a")]
    assert len(preflight.find_problems(launch_spec(), twice)) == 1


def test_facts_about_this_node() -> None:
    """Collected in a process of its own, because torch must not be imported."""
    program = (
        "import os, sys, json\n"
        "from paceline.contract.launch_spec import LaunchSpec\n"
        "from paceline.agent import launcher_placement\n"
        "from paceline.agent.health import preflight\n"
        "here = launcher_placement.find_placement(LaunchSpec(run_id='r', program='x', args=[], nproc=2), os.environ)\n"
        "found = preflight.collect_facts(here, os.environ)\n"
        "assert 'torch' not in sys.modules\n"
        "print(json.dumps(found))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], text=True, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    import json

    found = json.loads(done.stdout)
    assert found["torch"] == version("torch")
    assert found["python"] == platform.python_version()
    assert found["host"] == socket.gethostname()
    assert found["ranks"] == [0, 1]


@pytest.mark.parametrize(
    ("devices", "count"),
    [("0,1,2", 3), ("", 0), ("-1", 0), ("0,-1,2", 1), ("GPU-1a2b,GPU-3c4d", 2), ("NoDevFiles", 0)],
)
def test_visible_gpus(devices: str, count: int) -> None:
    placement = find_placement(launch_spec(nodes=1), {})
    environ = {"CUDA_VISIBLE_DEVICES": devices}
    assert preflight.collect_facts(placement, environ)["visible_gpus"] == count
    assert preflight.collect_facts(placement, {})["visible_gpus"] is None
