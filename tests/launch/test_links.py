"""What a run's working directory links to: everything in the project that its snapshot leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import EnvironmentProblem, UsageError
from paceline.launch import links
from paceline.launch.links import check_args, find_links


def make(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    return folder


CODE = (
    "train.py",
    "data/prepare.py",
    "pkg/a.py",
    "pkg/__init__.py",
    "checkpoints/.gitkeep",
    "docs/sub/README.md",
)


def test_links_to_what_the_snapshot_leaves_out(tmp_path: Path) -> None:
    project = make(
        tmp_path / "home/project",
        *CODE,
        ".env",
        ".venv/bin/python",
        "data/train.bin",
        "data/raw/1.jpg",
        "pkg/__pycache__/a",
        "checkpoints/1.pt",
        "docs/sub/image.png",
        "runs/p/default/1/run.json",
        "big/store/p/default/2/run.json",
        "big/x",
    )
    make(tmp_path / "home", "datasets/y", ".bashrc", ".git/HEAD", "scratch/p/default/3/run.json")
    runs = [project / "runs", project / "big/store", tmp_path / "home/scratch"]
    found = find_links(project, CODE, run_folders=runs)
    assert sorted(found.names) == [
        "../.git",
        "../datasets",
        ".env",
        ".venv",
        "big/x",
        "checkpoints",
        "data/raw",
        "data/train.bin",
        "docs",
    ]
    assert (found.in_place, found.notes) == ([], [])


def test_no_link_leads_to_the_runs(tmp_path: Path) -> None:
    project = make(tmp_path / "home/project", *CODE, "checkpoints/old.pt")
    (tmp_path / "disk/runs").mkdir(parents=True)
    (project / "output").symlink_to("../../disk/runs")
    (project / "disk").symlink_to("../../disk")
    found = find_links(
        project, CODE, run_folders=[project / "checkpoints/paceline", project / "output"]
    )
    assert sorted(found.names) == ["checkpoints/old.pt", "disk", "docs"]


def test_a_folder_with_very_many_files_is_linked_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "MAX_LINKS", 3)
    project = make(
        tmp_path / "home/project",
        *CODE,
        *(f"data/{number}.jpg" for number in range(4)),
        "data/deep/x",
        "other/x",
    )
    found = find_links(project, CODE, run_folders=[])
    assert sorted(found.names) == ["checkpoints", "data", "docs", "other"]
    assert found.in_place == ["data"]
    assert "data has more than 3 files" in found.notes[0]
    make(project, *(f"slurm-{number}.out" for number in range(4)))
    found = find_links(project, CODE, run_folders=[])
    assert "other" in found.names
    assert not any(name.startswith("slurm") for name in found.names)
    assert "the job has its folders, but not these files" in found.notes[0]
    make(tmp_path, "home/other/x")
    monkeypatch.setattr(links, "MAX_SIBLINGS", 0)
    found = find_links(project, CODE, run_folders=[project / "data/deep"])
    assert "data" not in found.names, "it holds the runs"
    assert not any(name.startswith("..") for name in found.names)
    assert "under ../x" in found.notes[-1]
    monkeypatch.setattr(links, "MAX_TOTAL", 2)
    with pytest.raises(EnvironmentProblem, match="More than 2 files"):
        find_links(project, CODE, run_folders=[])


def test_arguments_that_the_job_could_not_find(tmp_path: Path) -> None:
    project = make(tmp_path / "home/project", *CODE, "data/train.bin", "runs/p/1/x.pt")
    make(tmp_path, "far/x", "home/datasets/y")
    known = find_links(project, CODE, run_folders=[project / "runs"]).names

    def check(*args: str, cwd: Path = project) -> None:
        check_args(args, cwd=cwd, project=project, code=CODE, links=known)

    check(
        "--data=data/train.bin",
        "data/prepare.py",
        "./pkg",
        "../datasets/y",
        "a/b",
        "--x",
        "/etc/hosts",
        "docs/sub",
        "..",
    )
    check("../data/train.bin", "../../datasets", cwd=project / "pkg")
    for arg, cwd in (
        ("--init=runs/p/1/x.pt", project),
        ("../../far", project),
        ("../../../far/x", project / "pkg"),
    ):
        with pytest.raises(UsageError, match="The job will not find") as caught:
            check(arg, cwd=cwd)
        assert str(tmp_path) in caught.value.hint
