"""Code on the login node: what a command gets is what the laptop has, and what a job has written stays."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.contract.env import ON_CLUSTER
from paceline.contract.files.sent_code import FILE, KEPT, SentCode, keep_sent
from paceline.ssh.code_push.project_code import Parcel, describe_files, write_contents
from paceline.ssh.remote import entry
from paceline.ssh.remote.code_store import CodeStore


@pytest.fixture
def laptop(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "sub").mkdir(parents=True)
    (folder / "results.csv").write_text("loss\n")
    (folder / "sub" / "config.json").write_text("[1]")
    (folder / "tool.sh").write_text("#!/bin/sh\n")
    (folder / "tool.sh").chmod(0o755)
    (folder / "link").symlink_to("results.csv")
    return folder


@pytest.fixture(autouse=True)
def on_cluster(guard: None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ON_CLUSTER, "alps")
        yield


def code_of(laptop: Path) -> SentCode:
    names = ["link", "results.csv", "sub/config.json", "tool.sh"]
    return SentCode("project", describe_files(laptop, names))


def send(laptop: Path, store: CodeStore, *, own: bool = False) -> Path:
    """Do what a command does, and return the project's folder in the store."""
    code = code_of(laptop)
    folder = None if own else store.find(code)
    if folder is None:
        stream, missing = io.BytesIO(), store.missing(code)
        write_contents(Parcel(laptop, code), missing, stream)
        stream.seek(0)
        store.receive(stream, missing)
        folder = store.build(code, own=own)
    return folder


def assert_equal(laptop: Path, folder: Path) -> None:
    files = code_of(laptop).files
    assert describe_files(folder, files) == files


@pytest.mark.parametrize("own", [True, False])
def test_a_folder_in_which_a_job_works_is_left_alone(
    laptop: Path, tmp_path: Path, own: bool
) -> None:
    store = CodeStore(tmp_path)
    folder = send(laptop, store, own=own)
    keep_sent(folder)
    assert_equal(laptop, folder)
    assert os.access(folder / "tool.sh", os.X_OK)
    with (folder / "results.csv").open("a") as file:  # a job may write here
        file.write("0.5\n")
    (folder / "sub" / "config.json").write_text("[2]")  # as long as before
    (folder / "model.pt").touch()
    shared = send(laptop, store)
    assert shared != folder
    assert_equal(laptop, shared)
    assert send(laptop, store) == shared
    keep_sent(folder)  # of the next trial
    assert (folder / "results.csv").read_text() == "loss\n0.5\n"
    assert (folder / "sub" / "config.json").read_text() == "[2]"
    assert (folder / "model.pt").exists()
    assert not list(tmp_path.rglob(".*partial*"))


def test_a_folder_of_its_own_is_nobody_elses(laptop: Path, tmp_path: Path) -> None:
    store = CodeStore(tmp_path)
    folders = [send(laptop, store, own=True), send(laptop, store, own=True), send(laptop, store)]
    assert len(set(folders)) == 3
    assert send(laptop, store) == folders[2]


def test_a_folder_that_has_lost_files_stays_beside_the_new_one(
    laptop: Path, tmp_path: Path
) -> None:
    store = CodeStore(tmp_path)
    old = send(laptop, store)
    (old / "results.csv").unlink()
    (old / "notes.txt").write_text("mine")
    assert_equal(laptop, send(laptop, store))
    assert (old / "notes.txt").read_text() == "mine"


def test_only_what_an_interrupted_command_has_left_is_removed(tmp_path: Path) -> None:
    kept, left = tmp_path / "code" / ".partial-1", tmp_path / "code" / ".partial-2"
    for folder in (kept, left):
        folder.mkdir(parents=True)
    (kept / KEPT).touch()
    for folder in (kept, left):
        os.utime(folder, (time.time() - 86_400,) * 2)
    entry._remove_old(tmp_path)
    assert os.listdir(tmp_path / "code") == [".partial-1"]


@pytest.mark.parametrize(
    ("folder_age", "file_age", "stays"),
    [(2, 0, True), (30, 1, True), (2, 2, True), (30, 25, False)],
)
def test_what_a_long_export_writes_stays(
    tmp_path: Path, folder_age: int, file_age: int, *, stays: bool
) -> None:
    """A file that grows does not change its folder."""
    folder, now = tmp_path / "output-1", time.time()
    folder.mkdir()
    (folder / "model.safetensors").touch()
    os.utime(folder / "model.safetensors", (now - file_age * 3600,) * 2)
    os.utime(folder, (now - folder_age * 3600,) * 2)
    entry._remove_old(tmp_path)
    assert folder.exists() == stays


@pytest.mark.parametrize("name", ["results.csv", "tool.sh", "sub/config.json"])
def test_content_that_was_changed_there_is_sent_again(
    laptop: Path, tmp_path: Path, name: str
) -> None:
    store = CodeStore(tmp_path)
    folder = send(laptop, store)
    status = (folder / name).stat()
    assert status.st_nlink == 2  # in the store, too
    (folder / name).chmod(0o700 if name == "tool.sh" else 0o600)
    (folder / name).write_bytes(bytes(reversed((folder / name).read_bytes())))
    os.utime(folder / name, ns=(status.st_atime_ns, status.st_mtime_ns))
    changed = (folder / name).read_bytes()
    assert list(store.missing(code_of(laptop)).values()) == [name]
    assert_equal(laptop, send(laptop, store))
    assert_equal(laptop, send(laptop, store, own=True))
    assert (folder / name).read_bytes() == changed  # whoever has changed it keeps it


def test_a_changed_copy_link_or_list_is_not_used(laptop: Path, tmp_path: Path) -> None:
    store = CodeStore(tmp_path)
    folder = send(laptop, store)
    (folder / "link").unlink()
    (folder / "link").symlink_to("tool.sh")
    second = send(laptop, store)
    assert_equal(laptop, second)
    (second / "results.csv").unlink()
    (second / "results.csv").write_text("abcd\n")  # as editors do: another file of the same size
    third = send(laptop, store)
    assert_equal(laptop, third)
    assert store.missing(code_of(laptop)) == {}
    (third.parent / FILE).write_text("{}")
    assert_equal(laptop, send(laptop, store))
    assert len({folder, second, third, send(laptop, store)}) == 4


def test_what_is_no_file_is_not_used(laptop: Path, tmp_path: Path) -> None:
    store = CodeStore(tmp_path)
    folder = send(laptop, store)
    (folder / "results.csv").unlink()
    os.mkfifo(folder / "results.csv")
    assert_equal(laptop, send(laptop, store))
