"""`paceline init`: what Slurm says about a cluster becomes a profile that can be read."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline.cli.commands.init import describe_cluster, project_file
from paceline.slurm.partitions import NodeKind, Partition

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PARTITIONS = [
    Partition("cpu", is_default=True, kinds=[NodeKind(2, 64, 1000, {}, "idle")]),
    Partition("gpu", kinds=[NodeKind(2, 32, 1000, {"a100": 4}, "idle")]),
]


def test_jobs_go_to_a_partition_with_gpus() -> None:
    assert tomllib.loads(describe_cluster(PARTITIONS, "my.alps")) == {
        "profiles": {
            "my.alps": {
                "job": {
                    "partition": "gpu",
                    "gpus_per_node": 4,
                    "cpus_per_gpu": 8,
                    "time": "1-00:00:00",
                }
            }
        }
    }
    cpu = tomllib.loads(describe_cluster(PARTITIONS[:1], "alps"))["profiles"]["alps"]["job"]
    assert cpu == {"partition": "cpu", "time": "1-00:00:00"}


def test_the_file_has_what_this_shell_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my 'odd' project").mkdir()
    monkeypatch.chdir(tmp_path / "my 'odd' project")
    assert tomllib.loads(project_file({}))["project"] == {"name": "my -odd- project"}
    shell = {"SCRATCH": "/scratch/me", "VIRTUAL_ENV": "/my {venv}", "LOADEDMODULES": "gcc:cuda"}
    found = tomllib.loads(project_file(shell))
    assert found["project"]["scratch"] == "$SCRATCH/paceline"
    assert found["environment"] == {
        "kind": "venv",
        "path": "/my {venv}",
        "modules": ["gcc", "cuda"],
    }
