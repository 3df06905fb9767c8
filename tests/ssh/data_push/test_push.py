"""What `data push` sends, counts and refuses: the real rsync, with a shell on this machine instead of ssh."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import cast

import pytest

from paceline.spec.clusters import Cluster
from paceline.ssh.connection import Answer, Connection
from paceline.ssh.data_push.rsync import Transfer, problem, push, require_rsync
from paceline.ssh.data_push.sent_data import find_data
from paceline.ssh.data_push.survey import survey

RSYNC = shutil.which("rsync") or ""
pytestmark = pytest.mark.skipif(not RSYNC, reason="install rsync")
SUMMARY = b"""
Number of files: 1,305 (reg: 1,202, dir: 100, link: 3)
Number of created files: 1,302 (reg: 1,200, dir: 100, link: 2)
Number of deleted files: 0
Number of regular files transferred: 1,201
Total file size: 12,345,678 bytes
Total transferred file size: 12,345,000 bytes
Literal data: 1.045.000 bytes
"""
SUMMARY_3_0 = (
    b"Number of files: 4\nNumber of files transferred: 2\nTotal transferred file size: 10 bytes\n"
)


class _Here:
    """A connection to this machine."""

    cluster = Cluster("alps", "alps")

    def shell(self) -> list[str]:
        return ["sh", "-c", 'shift; exec "$@"', "sh"]  # the first argument is the host

    def is_open(self) -> bool:
        return True

    def call(self, script: str, *, content: bytes = b"") -> Answer:
        done = subprocess.run(["sh", "-c", script], input=content, capture_output=True, check=False)
        return Answer(done.returncode, done.stdout, done.stderr.decode())


HERE = cast(Connection, _Here())


@pytest.fixture
def images(guard: None, tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    (folder / "train").mkdir(parents=True)
    (folder / "labels.csv").write_bytes(os.urandom(90_000))
    (folder / "train" / "1.png").write_bytes(os.urandom(10_000))
    (folder / "newest").symlink_to("train/1.png")
    return folder


def send(folder: Path, to: Path) -> tuple[int, int]:
    parts = survey(HERE, find_data(folder), to=str(to), rsync=RSYNC).parts
    done = [push(HERE, data, to=place, rsync=RSYNC, progress=False) for data, place in parts]
    return sum(each.files for each in done), sum(each.sent for each in done)


def test_only_what_was_transferred_is_counted(images: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    expected = survey(HERE, find_data(images), to=str(there), rsync=RSYNC)
    assert (expected.files, expected.size) == (3, 100_000)
    assert send(images, there) == (3, 100_000)
    assert send(images, there) == (0, 0)
    with (images / "labels.csv").open("ab") as file:
        file.write(b"more")
    assert survey(HERE, find_data(images), to=str(there), rsync=RSYNC).size == 90_004
    files, sent = send(images, there)
    assert files == 1
    assert 0 < sent < 20_000, "of a file that has changed, only the changes are sent"
    assert (there / "labels.csv").read_bytes() == (images / "labels.csv").read_bytes()


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
    done = Transfer(0, SUMMARY, "")
    assert (done.files, done.size, done.sent) == (1203, 12_345_000, 1_045_000)
    assert Transfer(0, SUMMARY_3_0, "").files == 2


def test_a_folder_that_is_a_link_there_is_sent_by_itself(images: Path, tmp_path: Path) -> None:
    """rsync 3.5 refuses to write through a link that leads out of the target, unless it is the target."""
    there, big = tmp_path / "there", tmp_path / "big"
    there.mkdir()
    big.mkdir()
    (there / "train").symlink_to(big)
    (images / "train" / "up").symlink_to("../labels.csv")  # from `big` it would lead elsewhere
    (images / "train" / "key.pem").write_text("secret")
    found = survey(HERE, find_data(images), to=str(there), rsync=RSYNC)
    send(images, there)
    assert os.readlink(there / "train") == str(big)
    assert (big / "1.png").read_bytes() == (images / "train" / "1.png").read_bytes()
    assert (there / "labels.csv").exists()
    assert not (big / "key.pem").exists()
    if require_rsync() >= (3, 5):
        assert found.through_links == [f"{there}/train"]
        assert found.outside == ["train/up"]
        assert not (big / "up").is_symlink()
    assert send(images, there) == (0, 0)


def test_a_link_of_another_user_is_named(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "team").symlink_to("real")
    errors = (
        "refusing to follow a symlink owned by an untrusted user; use --insecure-links locally\n"
        f'rsync: [Receiver] change_dir#1 "{tmp_path}/team/" failed: Too many levels of symbolic links (40)\n'
    )
    error = problem(HERE, Transfer(3, b"", errors))
    assert f"On alps, {tmp_path}/team leads through another user's link" in error.message
    assert f"{tmp_path}/real" in error.hint
