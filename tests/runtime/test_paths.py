"""Paths and names that a script reads from its run, with an agent and without."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import paceline
from paceline.contract.run_folder import RunFolder

Paceline = Callable[..., "subprocess.CompletedProcess[str]"]

TELL = """\
import json, os, sys
import paceline

NAMES = {
    "source_dir": "PACELINE_SOURCE_DIR", "project": "PACELINE_PROJECT", "experiment": "PACELINE_EXPERIMENT",
    "scratch_dir": "PACELINE_SCRATCH_DIR", "data_dir": "PACELINE_DATA", "checkpoints_dir": "PACELINE_CHECKPOINTS",
    "logs_dir": "PACELINE_LOGS",
}

def work():
    with paceline.session(cpu=True, report=False) as run:
        values = {name: str(getattr(run, name)) for name in NAMES}
        values["variables"] = {name: os.environ.get(variable, "None") for name, variable in NAMES.items()}
        values["existing"] = [name for name in NAMES if name.endswith("_dir") and os.path.isdir(values[name])]
        with open(f"values-{run.rank}.json", "w") as file:
            json.dump(values, file)

if __name__ == "__main__":
    paceline.spawn(work) if sys.argv[1:] == ["spawn"] else work()
"""


def test_without_an_agent(tmp_path: Path) -> None:
    (tmp_path / "my project").mkdir()
    script = tmp_path / "my project" / "train.py"
    script.write_text(TELL)
    subprocess.run([sys.executable, str(script)], cwd=tmp_path, check=True)
    values = json.loads((tmp_path / "values-0.json").read_text())
    assert values.pop("variables") == dict.fromkeys(values.keys() - {"existing"}, "None")
    assert values == {
        "source_dir": str(script.parent),
        "project": "my project",
        "experiment": "default",
        "scratch_dir": "None",
        "data_dir": "None",
        "checkpoints_dir": "None",
        "logs_dir": "None",
        "existing": ["source_dir"],
    }


def test_paths_from_variables_without_an_agent(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PACELINE_SCRATCH", "/s")
        environment.setenv("PACELINE_DATA", "/d")
        with paceline.session(cpu=True, report=False, progress=False, folder=tmp_path) as run:
            assert (run.scratch_dir, run.data_dir) == (Path("/s"), Path("/d"))
            assert (run.checkpoints_dir, run.logs_dir) == (tmp_path / "checkpoints", None)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "style", ["fork", pytest.param("spawn", marks=SLOW), pytest.param("torchrun", marks=SLOW)]
)
def test_with_an_agent_paths_come_from_the_variables(
    style: str, paceline: Paceline, tmp_path: Path, scratch: Path
) -> None:
    (tmp_path / "data.txt").write_text("x")
    (tmp_path / "paceline.toml").write_text('[project]\nname = "vision"\n')
    (tmp_path / "train.py").write_text(TELL)
    done = paceline(
        "run",
        "--nproc",
        "2",
        "--cpu",
        "--style",
        style,
        "--experiment",
        "tiny",
        "--data",
        str(tmp_path / "data.txt"),
        "train.py",
        style,
    )
    assert done.returncode == 0, done.stderr
    (run_json,) = scratch.glob("*/*/*/run.json")
    folder = RunFolder(run_json.parent)
    for rank in (0, 1):
        values = json.loads((tmp_path / f"values-{rank}.json").read_text())
        existing = values.pop("existing")
        assert values.pop("variables") == values
        # The name of the node's own folder cannot be known in advance.
        data = values.pop("data_dir")
        assert data != "None"
        assert existing == ["source_dir", "scratch_dir", "data_dir", "checkpoints_dir", "logs_dir"]
        assert values == {
            "source_dir": str(tmp_path),
            "project": "vision",
            "experiment": "tiny",
            "scratch_dir": str(scratch),
            "checkpoints_dir": str(folder.checkpoints),
            "logs_dir": str(folder.attempt(1).path),
        }
