"""Code snapshots: their contents, sharing of equal ones, and that none is left incomplete."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline.errors import EnvironmentProblem
from paceline.launch.code_snapshot import CodeIdentity, Snapshot, identify_code, list_code

MB = 2**20


def git(folder: Path, *args: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *identity, *args], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with tracked, changed, deleted, new, ignored and secret files."""
    folder = tmp_path / "a project"
    (folder / "package").mkdir(parents=True)
    for name in ("train.py", "package/model.py", "package/changed.py", "deleted.py"):
        (folder / name).write_text(f"# {name}\n")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / ".gitignore").write_text("data/\n*.ckpt\n")
    (folder / "link").symlink_to("package/model.py")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "all")
    (folder / "package" / "changed.py").write_text("# changed since\n")
    (folder / "deleted.py").unlink()
    (folder / "new é.py").write_text("# new\n")
    (folder / ".env").write_text("TOKEN=secret\n")
    (folder / ".env.example").write_text("TOKEN=\n")
    (folder / "data").mkdir()
    (folder / "data" / "big.bin").write_bytes(b"0" * 4 * MB)
    return folder


def snapshot(
    project: Path, store: Path, *, limit: int = MB, exclude: tuple[str, ...] = ()
) -> Snapshot:
    return list_code(project, limit=limit, exclude=exclude, exclude_paths=[store.parent]).store(
        store
    )


def contents(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if not path.is_dir() or path.is_symlink()
    }


EXPECTED = {
    "train.py",
    "package/model.py",
    "package/changed.py",
    "run.sh",
    ".gitignore",
    "link",
    "new é.py",
    ".env.example",
}


def test_contains_the_current_code_without_secrets(project: Path, tmp_path: Path) -> None:
    taken = snapshot(project, tmp_path / "scratch" / "store")
    assert contents(taken.path) == EXPECTED
    assert len(taken.names) == len(EXPECTED)
    assert list_code(project, limit=MB).skipped_secrets == (".env",)
    assert (taken.path / "package" / "changed.py").read_text() == "# changed since\n"
    assert os.readlink(taken.path / "link") == "package/model.py"
    assert os.access(taken.path / "run.sh", os.X_OK)
    assert not os.access(taken.path / "train.py", os.X_OK)


def test_equal_code_is_shared_and_changed_code_is_not(project: Path, tmp_path: Path) -> None:
    store = tmp_path / "scratch" / "store"
    first = snapshot(project, store)
    os.utime(project / "train.py", (1, 1))
    assert snapshot(project, store).path == first.path
    paths = {first.path}
    (project / "train.py").write_text("# other\n")
    paths.add(snapshot(project, store).path)
    (project / "train.py").chmod(0o755)
    paths.add(snapshot(project, store).path)
    (project / "link").unlink()
    (project / "link").symlink_to("train.py")
    paths.add(snapshot(project, store).path)
    assert len(paths) == 4
    assert {path.name for path in store.iterdir()} == {path.name for path in paths}


def test_without_git_clutter_is_excluded(tmp_path: Path) -> None:
    project = tmp_path / "plain"
    for name in (
        "train.py",
        "src/a.py",
        "__pycache__/a.pyc",
        "env/pyvenv.cfg",
        "env/lib/x.py",
        "runs/p/log",
        "id_rsa",
    ):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("x")
    taken = snapshot(project, project / "out" / "store")
    assert contents(taken.path) == {"train.py", "src/a.py"}
    again = snapshot(project, project / "out" / "store")
    assert again.path == taken.path, (
        "the store is inside the project, but must not be copied into itself"
    )


def test_exclude_patterns(project: Path, tmp_path: Path) -> None:
    taken = snapshot(project, tmp_path / "scratch" / "store", exclude=("package", "*.sh"))
    assert contents(taken.path) == EXPECTED - {"package/model.py", "package/changed.py", "run.sh"}


def test_too_large_error_names_what_is_largest(project: Path, tmp_path: Path) -> None:
    (project / "weights.bin").write_bytes(b"0" * 2 * MB)
    with pytest.raises(
        EnvironmentProblem, match=r"2\.1 MB in .* Most is in weights\.bin"
    ) as caught:
        snapshot(project, tmp_path / "scratch" / "store")
    assert ".gitignore" in caught.value.hint
    assert "--no-snapshot" in caught.value.hint
    assert not (tmp_path / "scratch").exists()


def test_submodules_are_copied(project: Path, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "inside.py").write_text("x")
    git(inner, "init", "-q")
    git(inner, "add", ".")
    git(inner, "commit", "-q", "-m", "x")
    git(
        project,
        "-c",
        "protocol.file.allow=always",
        "submodule",
        "add",
        "-q",
        str(inner),
        "vendored",
    )
    assert "vendored/inside.py" in contents(snapshot(project, tmp_path / "scratch" / "store").path)


def test_a_submodule_that_is_not_initialised_has_no_code(project: Path, tmp_path: Path) -> None:
    commit = "0123456789012345678901234567890123456789"
    git(project, "update-index", "--add", "--cacheinfo", f"160000,{commit},vendored")
    (project / "vendored").mkdir()
    assert contents(snapshot(project, tmp_path / "scratch" / "store").path) == EXPECTED


@pytest.mark.parametrize("broken", [".", "vendored"])
def test_nothing_is_copied_if_git_cannot_say_what_it_ignores(project: Path, broken: str) -> None:
    (project / "vendored").mkdir()
    git(project / "vendored", "init", "-q")
    (project / "vendored" / "inside.py").write_text("x")
    (project / broken / ".git" / "index").write_text("garbage")
    with pytest.raises(EnvironmentProblem, match="git cannot list the files"):
        list_code(project, limit=10 * MB)


def test_gitignore_counts_without_a_repository(tmp_path: Path) -> None:
    for name in (
        "train.py",
        "package/model.py",
        "data/big.bin",
        "package/a.ckpt",
        "runs/x",
        "env/pyvenv.cfg",
        "env/b.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / ".gitignore").write_text("/data/\n")
    (tmp_path / "package" / ".gitignore").write_text("*.ckpt\n")
    (tmp_path / "link").symlink_to("package")
    assert {*list_code(tmp_path, limit=MB).sizes} == {
        ".gitignore",
        "link",
        "package/.gitignore",
        "package/model.py",
        "train.py",
    }


def test_the_home_folder_is_no_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("HOME", str(tmp_path))
        with pytest.raises(EnvironmentProblem, match="is your home folder, not a project"):
            list_code(tmp_path, limit=MB)
    with pytest.raises(EnvironmentProblem, match="/ is the root folder"):
        list_code(Path("/"), limit=MB)


def test_the_commit_and_whether_the_code_differs_from_it(tmp_path: Path) -> None:
    assert identify_code(tmp_path).commit is None
    (tmp_path / "train.py").write_text("x")
    git(tmp_path, "init", "-q")
    assert identify_code(tmp_path).commit is None
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "all")
    found = identify_code(tmp_path)
    assert (len(found.commit or ""), found.branch, found.changed) == (40, "main", False)
    (tmp_path / "new é.py").write_text("x")
    assert identify_code(tmp_path).changed is True
    (tmp_path / "new é.py").unlink()
    git(tmp_path, "checkout", "-q", "--detach")
    (tmp_path / "train.py").write_text("y")
    assert identify_code(tmp_path) == CodeIdentity(found.commit, None, True)


def test_concurrent_snapshots_make_one_copy(project: Path, tmp_path: Path) -> None:
    store = tmp_path / "scratch" / "store"
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda _: snapshot(project, store), range(16)))
    assert len({each.path for each in taken}) == 1
    assert [path.name for path in store.iterdir()] == [taken[0].path.name]
    assert contents(taken[0].path) == EXPECTED


def test_a_failed_copy_leaves_nothing(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    store = tmp_path / "scratch" / "store"
    with pytest.raises(OSError, match="No space left"):
        snapshot(project, store)
    assert list(store.iterdir()) == []


def test_a_damaged_copy_is_replaced_in_a_folder_of_a_group(project: Path, tmp_path: Path) -> None:
    store = tmp_path / "scratch" / "store"
    store.mkdir(parents=True)
    store.chmod(0o2770)  # folders made in it have the bit, too
    taken = snapshot(project, store).path
    unchanged = taken.stat().st_ino
    assert snapshot(project, store).path.stat().st_ino == unchanged
    (taken / "train.py").unlink()  # by a clean-up of old files
    assert snapshot(project, store).path == taken
    assert contents(taken) == EXPECTED


@pytest.mark.parametrize("place", ["link", "file"])
def test_what_takes_the_place_of_a_tracked_folder_is_copied_alone(
    project: Path, tmp_path: Path, place: str
) -> None:
    elsewhere = (project / "package").rename(tmp_path / "elsewhere")
    if place == "link":
        (project / "package").symlink_to(elsewhere)
    else:
        (project / "package").write_text("# a file\n")
    taken = snapshot(project, tmp_path / "scratch" / "store").path
    assert contents(taken) == {*EXPECTED, "package"} - {"package/model.py", "package/changed.py"}
    assert (elsewhere / "model.py").read_text() == "# package/model.py\n"


def test_the_output_of_this_command_is_no_code(project: Path) -> None:
    with (project / "run.sh").open("a") as output:
        kept = os.dup(1)
        try:
            os.dup2(output.fileno(), 1)
            assert "run.sh" not in list_code(project, limit=MB).sizes  # `paceline run ... > run.sh`
        finally:
            os.dup2(kept, 1)
            os.close(kept)
