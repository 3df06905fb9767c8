"""Mirrors on the laptop: the oldest runs go once all of them take too much, and mirrors that nobody uses go whole."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from paceline.ssh.mirror import cleanup
from paceline.ssh.mirror.cleanup import clean_mirrors
from paceline.ssh.mirror.mirror_folder import STATE, Mirror

DAY = 86_400
SIZE = 1 << 20


@pytest.fixture
def mirrors(tmp_path: Path) -> Path:
    return tmp_path / "mirror"


def add(mirrors: Path, cluster: str, run: str, days: float, *, hole: int = 0) -> Path:
    """Mirror a run that has changed so many days ago; the cluster was heard of just now."""
    mirror = Mirror(mirrors / cluster / "0123456789ab")
    mirror.create()
    (mirror.base / STATE).write_text("{}")
    folder = mirror.folder / "project" / "default" / run
    (folder / "attempt-1").mkdir(parents=True)
    log = folder / "attempt-1" / "rank-0.log"
    with log.open("wb") as file:
        file.truncate(hole)
        file.seek(hole)
        file.write(os.urandom(SIZE))
    then = time.time() - days * DAY
    os.utime(log, (then, then))
    return folder


def again(mirrors: Path, limit: int) -> None:
    (mirrors / cleanup.STAMP).unlink(missing_ok=True)
    clean_mirrors(mirrors, limit=limit)


def test_the_oldest_runs_of_all_clusters_go_first(mirrors: Path) -> None:
    oldest, newest = add(mirrors, "alps", "a", 30), add(mirrors, "alps", "b", 2)
    # a log of which the mirror has the end alone
    middle = add(mirrors, "cedar", "c", 20, hole=1 << 34)
    again(mirrors, 4 * SIZE)
    assert oldest.exists()
    again(mirrors, 5 * SIZE // 2)
    assert [run.exists() for run in (oldest, middle, newest)] == [False, True, True]
    again(mirrors, SIZE)
    assert [run.exists() for run in (oldest, middle, newest)] == [False, False, True]
    assert {path.name for path in (mirrors / "alps" / "0123456789ab").iterdir()} == {
        "runs",
        "lock",
        STATE,
    }


def test_runs_that_have_just_changed_stay(mirrors: Path) -> None:
    runs = [add(mirrors, "alps", "a", 0.5), add(mirrors, "alps", "b", 0)]
    again(mirrors, 1)
    assert all(run.exists() for run in runs)


def test_a_mirror_that_nobody_uses_goes_whole(mirrors: Path) -> None:
    run, other = add(mirrors, "alps", "a", 0.5), add(mirrors, "cedar", "b", 400)
    base = mirrors / "alps" / "0123456789ab"
    then = time.time() - 91 * DAY
    for path in (base / STATE, base):
        os.utime(path, (then, then))
    Mirror(base).create()  # a command that uses it now
    again(mirrors, 1 << 40)
    assert run.exists()
    os.utime(base, (then, then))
    again(mirrors, 1 << 40)
    assert not run.exists()
    assert not base.exists()
    assert other.exists()


def test_it_happens_once_a_day_and_removes_what_was_left_half_removed(mirrors: Path) -> None:
    run = add(mirrors, "alps", "a", 5)
    left = mirrors / "alps" / "0123456789ab" / f"{cleanup.GONE}1"
    left.mkdir()
    clean_mirrors(mirrors, limit=1 << 40)
    assert not left.exists()
    clean_mirrors(mirrors, limit=0)
    assert run.exists()
    then = time.time() - 2 * DAY
    os.utime(mirrors / cleanup.STAMP, (then, then))
    clean_mirrors(mirrors, limit=0)
    assert not run.exists()


def test_links_are_not_followed(mirrors: Path, tmp_path: Path) -> None:
    add(mirrors, "alps", "a", 5)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    (mirrors / "alps" / "link").symlink_to(outside)
    (mirrors / "alps" / "0123456789ab" / "runs" / "project" / "default" / "z").symlink_to(outside)
    again(mirrors, 0)
    assert (outside / "precious").exists()


def test_no_mirrors(mirrors: Path) -> None:
    clean_mirrors(mirrors)
    assert not mirrors.exists()
