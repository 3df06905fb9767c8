"""The working directory of a submitted run: what it holds, what stays after the run, and what a script may do in it."""

from __future__ import annotations

import compileall
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.agent.workers import bootstrap
from paceline.contract.launch_spec import LaunchSpec
from paceline.errors import LaunchError
from paceline.staging.working_directory import PARTIAL, WorkingDirectory


@pytest.fixture
def live(tmp_path: Path) -> Path:
    """A project with data that the snapshot does not have."""
    project = tmp_path / "home" / "project"
    for name in ("data/x.bin", "package/weights.bin", "../datasets/y.bin"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(name)
    return project


@pytest.fixture
def work(tmp_path: Path, live: Path) -> WorkingDirectory:
    code = tmp_path / "run" / "code"
    for name in (
        "train.py",
        "config.yaml",
        "package/part.py",
        "package/__pycache__/part.pyc",
        "results/old.csv",
    ):
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        (code / name).write_text(f"# {name}" if name == "train.py" else f"snapshot of {name}")
    (code / "train.py").chmod(0o755)
    (code / "inside").symlink_to("package/part.py")
    (code / "outside").symlink_to("../datasets/y.bin")
    links = ["data", "package/weights.bin", "../datasets"]
    path = tmp_path / "run" / "work" / "project"
    found = WorkingDirectory.of(
        LaunchSpec(
            "r",
            "train.py",
            [],
            source=str(path),
            work={"code": str(code), "project": str(live), "links": links},
        )
    )
    assert found is not None
    return found


def names(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def test_fill_write_and_prune(work: WorkingDirectory, live: Path, tmp_path: Path) -> None:
    path = Path(work.path)
    work.fill(f"{work.path}/package")
    assert names(path) == {
        "train.py",
        "config.yaml",
        "package/part.py",
        "results/old.csv",
        "inside",
        "outside",
        "data",
        "package/weights.bin",
    }
    assert os.access(path / "train.py", os.X_OK)
    assert (path / "inside").read_text() == "snapshot of package/part.py"
    assert (
        (path / "outside").read_text()
        == (path / "../datasets/y.bin").read_text()
        == "../datasets/y.bin"
    )
    assert (path / "data/x.bin").read_text() == "data/x.bin"

    # A script writes new files, appends to one of the snapshot, replaces a link, and writes into a linked folder.
    (path / "out/deep").mkdir(parents=True)
    (path / "out/deep/model.pt").write_text("model")
    (path / "package/new.txt").write_text("new")
    with open(path / "results/old.csv", "a") as file:
        file.write(", more")
    os.utime(path / "inside", (1, 1))  # written again, with the same content
    (path / "package/weights.bin").unlink()
    (path / "package/weights.bin").write_text("mine")
    (path / "data/cache").write_text("cache")
    (path / "config.yaml").unlink()
    compileall.compile_file(path / "train.py", quiet=1)
    (path / "../beside").mkdir()
    assert (live / "data/cache").exists()
    assert (tmp_path / "run/code/results/old.csv").read_text() == "snapshot of results/old.csv"

    work.fill(work.path)  # a requeued run continues with what it has written
    assert (path / "results/old.csv").read_text() == "snapshot of results/old.csv, more"
    assert (path / "config.yaml").exists()
    work.prune()
    written = {
        "out/deep/model.pt",
        "package/new.txt",
        "package/part.py",
        "package/weights.bin",
        "results/old.csv",
    }
    assert names(path) == written
    assert (path / "../beside").is_dir()
    assert not (tmp_path / "run/code/__pycache__").exists(), "runs share no byte code"
    assert names(live) == {"data/x.bin", "data/cache", "package/weights.bin"}


def test_nothing_goes_through_a_link(work: WorkingDirectory, live: Path, tmp_path: Path) -> None:
    """Not through the script's, nor through one of an earlier submission that used a folder in place."""
    shutil.copytree(work.code, live, dirs_exist_ok=True, symlinks=True)
    before, path = names(live), Path(work.path)
    work.fill(work.path)
    for name in ("package", "results"):
        shutil.rmtree(path / name)
        (path / name).symlink_to(live / name)
    (live / "results/old.csv").rename(live / "results/other.csv")
    work.fill(work.path)
    assert not (live / "results/old.csv").exists()
    (live / "results/other.csv").rename(live / "results/old.csv")
    work.remove_links()
    work.prune()
    assert names(live) == before
    assert (path / "package").is_symlink()
    shutil.rmtree(path)
    path.symlink_to(live)
    work.fill(work.path)
    work.prune()
    assert names(live) == before


def test_runs_share_no_byte_code(work: WorkingDirectory, tmp_path: Path) -> None:
    """Two trials write a module of the same size in the same second: the byte code of one fits the other's."""
    other = replace(work, path=str(tmp_path / "other/work/project"))
    printed = []
    for folder, value in ((work, "0.1"), (other, "0.9")):
        folder.fill(folder.path)
        Path(folder.path, "made.py").write_text(f"lr = {value}")
        os.utime(Path(folder.path, "made.py"), (1, 1))
        command = [sys.executable, "-c", "import made; print(made.lr)"]
        environ = {
            name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
        }
        printed.append(
            subprocess.check_output(command, cwd=folder.path, text=True, env=environ).strip()
        )
        assert list(Path(folder.path).glob("__pycache__/made*"))
    assert printed == ["0.1", "0.9"]


def test_links_in_folders_that_the_snapshot_lacks(
    work: WorkingDirectory, live: Path, tmp_path: Path
) -> None:
    """Such a folder has the runs, so it is not linked itself."""
    for name in ("out/old/x", "out/y"):
        (live / name).parent.mkdir(parents=True, exist_ok=True)
        (live / name).write_text("")
    work = replace(work, links=work.links | {"out/old/x", "out/y"})
    path = Path(work.path)
    work.fill(work.path)
    assert (path / "out/old/x").is_symlink()
    (path / "out/new").write_text("")
    work.prune()
    assert names(path) == {"out/new"}
    assert not (path / "out/old").exists()
    assert (live / "out/old/x").exists()


def test_a_start_after_a_script_or_a_kill_left_something_odd(work: WorkingDirectory) -> None:
    path = Path(work.path)
    work.fill(work.path)
    for name in ("package", "results"):
        shutil.rmtree(path / name)
        (path / name).write_text("a file where a folder was")
    (path / "config.yaml").rename(path / f"config.yaml{PARTIAL}")  # killed in the middle of a copy
    (path / "train.py").unlink()
    (path / "train.py").mkdir()
    work.fill(work.path)
    assert not (path / f"config.yaml{PARTIAL}").exists()


def test_links_of_the_snapshot_point_to_copies(
    work: WorkingDirectory, live: Path, tmp_path: Path
) -> None:
    code, path = Path(work.code), Path(work.path)
    (tmp_path / "alias").symlink_to(live)
    targets = {
        "absolute": live / "package/part.py",
        "package/aliased": tmp_path / "alias/config.yaml",
        "package/around": Path("../../project/config.yaml"),
        "ignored": live / "data/x.bin",
        "far": Path("/etc/hosts"),
    }
    for name, target in targets.items():
        (code / name).symlink_to(target)
    replace(work, project=str(tmp_path / "alias")).fill(work.path)
    assert os.readlink(path / "absolute") == "package/part.py"
    assert (
        os.readlink(path / "package/aliased")
        == os.readlink(path / "package/around")
        == "../config.yaml"
    )
    assert (
        (path / "outside").resolve()
        == (path / "../datasets/y.bin").resolve()
        == live.parent / "datasets/y.bin"
    )
    assert os.readlink(path / "far") == "/etc/hosts"
    assert (path / "ignored").resolve() == live / "data/x.bin"


def test_a_rank_does_not_start_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bootstrap, "WORKING_DIRECTORY_TIMEOUT", 0.0)
    spec = LaunchSpec("run", "train.py", [], cwd=str(tmp_path / "gone"))
    bootstrap._enter_working_directory(spec)
    with pytest.raises(FileNotFoundError):
        bootstrap._enter_working_directory(replace(spec, work={"project": "/project"}))


def test_an_unusable_folder_is_an_error_with_its_reason(
    work: WorkingDirectory, tmp_path: Path
) -> None:
    (tmp_path / "run/work").write_text("a file")
    with pytest.raises(LaunchError, match=r"Cannot fill the working directory .*/work") as caught:
        work.fill(work.path)
    assert "--workdir project" in caught.value.hint
    assert "quota" not in caught.value.hint


def test_packages_installed_from_the_project_come_from_its_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pip install -e` leaves a path in sys.path, or a finder with a mapping."""
    project, copy = tmp_path / "project", tmp_path / "copy"
    for root in (project, copy):
        (root / "src/inside").mkdir(parents=True)
    (project / ".venv/lib").mkdir(parents=True)
    (copy / ".venv").symlink_to(project / ".venv")
    (tmp_path / "finder_of_a_package.py").write_text(
        f"MAPPING = {{'inside': {str(project / 'src/inside')!r}, 'other': '/elsewhere'}}\nclass Finder:\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    finder = __import__("finder_of_a_package")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, finder.Finder])
    monkeypatch.setattr(
        sys,
        "path",
        [str(project / "src"), str(project / ".venv/lib"), str(project / "gone"), "/usr/lib"],
    )
    bootstrap._import_from_copy(str(project), str(copy))
    assert sys.path == [
        str(copy / "src"),
        str(project / ".venv/lib"),
        str(project / "gone"),
        "/usr/lib",
    ]
    mapping = finder.MAPPING
    assert mapping == {"inside": str(copy / "src/inside"), "other": "/elsewhere"}


def test_git_works_in_it(work: WorkingDirectory, live: Path) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for args in (["init", "-q"], ["add", "data"], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *args], cwd=live, check=True, capture_output=True)
    linked = WorkingDirectory(work.path, work.code, work.project, work.links | {".git"})
    linked.fill(work.path)
    heads = {
        subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=path, check=True, capture_output=True
        ).stdout
        for path in (live, work.path)
    }
    assert len(heads) == 1
