"""The command that enters a container, run by bash; a fake engine prints its arguments.

Real containers are entered by tests/debian13, which needs more than every machine has.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import SpecError
from paceline.launch.environment.activation import NO_ENGINE
from paceline.spec.run_path import RunPath
from tests.golden.cases import plan

IMAGE = {"environment.kind": "container", "environment.image": "/shared/torch.sif"}


def enter(
    folder: Path,
    keys: dict[str, Any],
    *,
    engines: tuple[str, ...] = ("apptainer",),
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Call `paceline_inside python3 "a b"` as a node would; the fake engine prints one argument per line."""
    programs = folder / "bin"
    programs.mkdir(parents=True)
    for name in engines:
        (programs / name).write_text('#!/bin/sh\nprintf "%s\\n" "$0" "$@"\n')
        (programs / name).chmod(0o755)
    made = plan({**IMAGE, **keys}, run_path=RunPath(folder / "scratch", "vision", "base", "one"))
    (folder / "inside.sh").write_text(
        "\n".join([*made.environment.container, 'paceline_inside "$@"\n'])
    )
    return subprocess.run(
        ["/bin/bash", str(folder / "inside.sh"), "python3", "a b"],
        env={"PATH": str(programs), "HOME": str(folder), "HOSTNAME": "node7", **variables},
        text=True,
        capture_output=True,
    )


def argv_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("requested", "available", "expected"),
    [
        ("apptainer", ("apptainer", "singularity"), "apptainer"),
        ("apptainer", ("singularity",), "singularity"),
        ("singularity", ("apptainer", "singularity"), "singularity"),
        ("singularity", ("apptainer",), "apptainer"),
    ],
)
def test_the_available_engine_is_used(
    requested: str, available: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    argv = argv_of(enter(tmp_path, {"environment.engine": requested}, engines=available))
    assert argv[:2] == [str(tmp_path / "bin" / expected), "exec"]
    assert argv[-3:] == ["/shared/torch.sif", "python3", "a b"]


def test_a_missing_engine_is_an_error(tmp_path: Path) -> None:
    done = enter(tmp_path, {}, engines=())
    assert done.returncode == NO_ENGINE
    assert "neither apptainer nor singularity on node7" in done.stderr


def test_existing_folders_are_mounted(tmp_path: Path) -> None:
    """Those of all nodes, those of this node, and of a folder that is yet to be made the one above it."""
    (tmp_path / "scratch" / "vision").mkdir(parents=True)
    (tmp_path / "disk of node7").mkdir()
    (tmp_path / "job tmp").mkdir()
    argv = argv_of(
        enter(
            tmp_path,
            {
                "data.folder": f"{tmp_path}/disk of ${{NODE}}/not/yet",
                "data.stage": [f"{tmp_path}/gone"],
            },
            NODE="node7",
            SLURM_TMPDIR=str(tmp_path / "job tmp"),
            TMPDIR="/no/such/folder",
        )
    )
    shown = [argv[at + 1] for at, arg in enumerate(argv) if arg == "--bind"]
    expected = [tmp_path / "scratch" / "vision", tmp_path / "disk of node7", tmp_path / "job tmp"]
    assert shown == [f"{path}:{path}" for path in expected]


def test_a_folder_missing_on_the_nodes_is_an_error(tmp_path: Path) -> None:
    done = enter(tmp_path, {"data.folder": "/local/$NOBODY/x"})
    assert done.returncode != 0
    assert "NOBODY" in done.stderr


def test_the_data_folder_is_quoted_for_bash(tmp_path: Path) -> None:
    """Variables apart: what looks like a command is none."""
    (tmp_path / 'a "b" $(touch c) `d`').mkdir()
    argv = argv_of(enter(tmp_path, {"data.folder": f'{tmp_path}/a "b" $(touch c) `d`'}))
    path = f'{tmp_path}/a "b" $(touch c) `d`'
    assert f"{path}:{path}" in argv
    assert not list(tmp_path.glob("**/c"))


def test_options_and_binds_of_the_user(tmp_path: Path) -> None:
    keys = {
        "environment.engine_options": ["--no-home"],
        "environment.binds": ["/data sets", "/models:/m:ro"],
    }
    argv = argv_of(enter(tmp_path, keys))
    last = [
        "--no-home",
        "--bind",
        "/data sets:/data sets",
        "--bind",
        "/models:/m:ro",
        "/shared/torch.sif",
    ]
    assert argv[-8:-2] == last


def test_a_relative_image_path_is_relative_to_the_project(tmp_path: Path) -> None:
    argv = argv_of(enter(tmp_path, {"environment.image": "images/torch.sif"}))
    assert argv[-3] == "/home/ann/vision/images/torch.sif"


def test_pyxis_leaves_names_of_images_alone() -> None:
    keys = {"environment.kind": "container", "environment.engine": "pyxis"}
    assert "--container-image=ubuntu " in plan({**keys, "environment.image": "ubuntu"}).script
    file = plan({**keys, "environment.image": "torch.sqsh"}).script
    assert "--container-image=/home/ann/vision/torch.sqsh " in file
    with pytest.raises(SpecError, match="pyxis"):
        plan({**keys, "environment.image": "ubuntu", "launch.style": "mpirun"})
