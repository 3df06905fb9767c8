"""What `data push` sends, counts and refuses: the real rsync and tar, with a shell instead of ssh."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from paceline.errors import EnvironmentProblem
from paceline.ssh.rsync import Copied, Route, find_data
from tests.ssh.local_connection import HERE

RSYNC = shutil.which("rsync") or ""
pytestmark = pytest.mark.skipif(not RSYNC, reason="install rsync")
SUMMARY = """
Number of files: 1,305 (reg: 1,202, dir: 100, link: 3)
Number of created files: 1,302 (reg: 1,200, dir: 100, link: 2)
Number of deleted files: 0
Number of regular files transferred: 1,201
Total file size: 12,345,678 bytes
Total transferred file size: 12,345,000 bytes
Literal data: 1.045.000 bytes
"""
SUMMARY_3_0 = (
    "Number of files: 4\nNumber of files transferred: 2\nTotal transferred file size: 10 bytes\n"
)


@pytest.fixture
def images(guard: None, tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    (folder / "train").mkdir(parents=True)
    (folder / "labels.csv").write_bytes(os.urandom(90_000))
    (folder / "train" / "1.png").write_bytes(os.urandom(10_000))
    (folder / "newest").symlink_to("train/1.png")
    return folder


def survey(folder: Path, to: Path) -> tuple[int, int]:
    found = find_data(folder).send(HERE, to=str(to), rsync=RSYNC, dry_run=True)
    return found.files, found.size


def send(folder: Path, to: Path, rsync: str = RSYNC) -> None:
    find_data(folder).send(HERE, to=str(to), rsync=rsync)


def contents(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_only_what_was_transferred_is_counted(images: Path, tmp_path: Path) -> None:
    there = tmp_path / "the $(touch injected) 'place"
    there.mkdir()
    assert survey(images, there) == (3, 100_000)
    send(images, there)
    assert survey(images, there) == (0, 0)
    with (images / "labels.csv").open("ab") as file:
        file.write(b"more")
    assert survey(images, there) == (1, 90_004)
    send(images, there)
    assert contents(there) == contents(images)


@pytest.mark.parametrize("rsync", [RSYNC, ""])
def test_files_come_and_go_with_or_without_rsync(images: Path, tmp_path: Path, rsync: str) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    back.mkdir()
    send(images, there, rsync)
    assert contents(there) == contents(images)
    assert os.readlink(there / "newest") == "train/1.png"
    (images / "labels.csv").write_text("older")
    os.utime(images / "labels.csv", (1, 1))
    send(images, there, rsync)
    assert (there / "labels.csv").read_bytes() != b"older"
    names = ["labels.csv", "train/1.png", "is gone"]
    done = Route(HERE, back, str(there), rsync).pull(names)
    assert done.code != 0
    assert contents(back) == {name: contents(there)[name] for name in names[:2]}
    with pytest.raises(EnvironmentProblem, match="Files could not be copied"):
        Route(HERE, back, str(tmp_path / "nowhere"), rsync).pull(names)


def test_a_log_only_grows(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, text in ((here, "only the end: "), (there, "something else one\n")):
        folder.mkdir()
        (folder / "rank-0.log").write_text(text)
    Route(HERE, here, str(there), RSYNC).pull(["rank-0.log"], append=True)
    assert (here / "rank-0.log").read_text() == "only the end:  one\n"


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("data", "data"),
        ("data/", "data"),
        ("./data/.", "data"),
        ("data/train", "train"),
        ("images", "images"),
        ("images/..", "project"),
        ("data/..", "project"),
        (".", "project"),
        ("images/train/..", "images"),
        ("copy.csv", "copy.csv"),
    ],
)
def test_data_arrives_under_the_name_that_you_typed(
    images: Path, monkeypatch: pytest.MonkeyPatch, typed: str, name: str
) -> None:
    project = images.parent / "project"
    images.rename(images.parent / "moved")
    project.mkdir()
    (images.parent / "moved").rename(project / "images")
    (project / "data").symlink_to("images")
    (project / "copy.csv").symlink_to("images/labels.csv")
    monkeypatch.chdir(project)
    found = find_data(Path(typed))
    assert (found.name, found.path) == (name, Path(typed).resolve())


def test_the_summary_of_rsync() -> None:
    done = Copied(0, SUMMARY)
    assert (done.files, done.size) == (1203, 12_345_000)
    assert Copied(0, SUMMARY_3_0).files == 2


@pytest.mark.parametrize("rsync", [RSYNC, ""])
def test_a_single_file_may_get_another_name(images: Path, tmp_path: Path, rsync: str) -> None:
    send(images / "newest", tmp_path / "there" / "first.png", rsync)
    assert contents(tmp_path / "there") == {"first.png": (images / "train/1.png").read_bytes()}
