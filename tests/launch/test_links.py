"""What a run's working directory links to: everything in the project that its snapshot leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import EnvironmentProblem, UsageError
from paceline.launch import submission as links_module
from paceline.launch.submission import check_args, find_links


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
    assert sorted(found) == [
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


def test_no_link_leads_to_the_runs(tmp_path: Path) -> None:
    project = make(tmp_path / "home/project", *CODE, "checkpoints/old.pt")
    (tmp_path / "disk/runs").mkdir(parents=True)
    (project / "output").symlink_to("../../disk/runs")
    (project / "disk").symlink_to("../../disk")
    found = find_links(
        project, CODE, run_folders=[project / "checkpoints/paceline", project / "output"]
    )
    assert sorted(found) == ["checkpoints/old.pt", "disk", "docs"]


def test_too_many_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = make(tmp_path / "home/project", *CODE, "data/1.jpg", "data/2.jpg", "other/x")
    make(tmp_path, "home/beside/x", "home/data/x")
    links = ["../beside", "../data", "checkpoints", "data/1.jpg", "data/2.jpg", "docs", "other"]
    assert sorted(find_links(project, CODE, run_folders=[])) == links
    monkeypatch.setattr(links_module, "MAX_SIBLINGS", 1)
    assert sorted(find_links(project, CODE, run_folders=[])) == links[2:]
    monkeypatch.setattr(links_module, "MAX_LINKS", 4)
    with pytest.raises(EnvironmentProblem, match="More than 4 files") as caught:
        find_links(project, CODE, run_folders=[])
    assert "--workdir project" in caught.value.hint


def test_arguments_that_the_job_could_not_find(tmp_path: Path) -> None:
    project = make(tmp_path / "home/project", *CODE, "data/train.bin", "runs/p/1/x.pt")
    make(tmp_path, "far/x", "home/datasets/y")
    known = find_links(project, CODE, run_folders=[project / "runs"])

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
