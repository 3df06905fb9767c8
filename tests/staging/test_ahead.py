"""Copying ahead: the last pack is unpacked while its source is looked at, and counts only if nothing has changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.errors import EnvironmentProblem
from paceline.node.staging import ahead, copying, small_files
from paceline.node.staging.staging import Stager, Worker, look
from tests.staging.trees import ODD, Node, content, plant, wish


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """<scratch>/<project>"""
    return tmp_path / "scratch" / "project"


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "disk")


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where small files were placed, a group each."""
    found: list[str] = []
    real = small_files.SmallFiles.place

    def place(self: small_files.SmallFiles, *group: object, **where: object) -> object:
        found.append(self.target)
        return real(self, *group, **where)  # type: ignore[arg-type]

    monkeypatch.setattr(small_files.SmallFiles, "place", place)
    return found


def is_all_there(stager: Stager) -> bool:
    return stager.copying.done == stager.copying.total > 0


def test_a_pack_that_is_still_true_is_unpacked_once_and_large_files_follow(
    base: Path, node: Node, placed: list[str]
) -> None:
    source = plant(base / "set", large=2)
    asked = wish(base, "set", verify="checksum")
    node.stage(asked)
    placed.clear()
    stager = node.stager(asked)
    stager.begin()
    begun = stager._ahead["set"]
    begun._thread.join()  # before anybody has looked
    assert len(placed) == 1
    there = {name for name in content(stager.data / "set") if name.startswith("large")}
    assert not there
    stager.stage(look(asked, stager.packs))
    assert content(stager.data / "set") == content(source)
    assert len(placed) == 1
    assert is_all_there(stager)
    assert stager.staged.files == len(begun.manifest.files)


def rewrite(source: Path) -> None:
    (source / ODD).write_bytes(b"new")


def rename(source: Path) -> None:
    (source / ODD).rename(source / "even")


def remove(source: Path) -> None:
    (source / "class 0" / "0000.bin").unlink()


def mode(source: Path) -> None:
    (source / "script.sh").chmod(0o700)


@pytest.mark.parametrize("change", [rewrite, rename, remove, mode])
def test_nothing_is_left_of_a_pack_that_is_no_longer_true(
    change: Callable[[Path], None], base: Path, node: Node
) -> None:
    source = plant(base / "set")
    asked = wish(base, "set")
    node.stage(asked)
    change(source)
    stager = node.stager(asked)
    stager.begin()
    stager._ahead["set"]._thread.join()  # all of it has been unpacked by then
    stager.stage(look(asked, stager.packs))
    assert content(stager.data / "set") == content(source)
    assert is_all_there(stager)
    again = node.stager(asked)
    again.begin()
    assert again._ahead["set"].manifest == look(asked, again.packs)[0].manifest  # the newer pack is known now
    again.close()
    assert not os.path.lexists(again.data / "set")


def test_a_source_that_is_gone_leaves_nothing(base: Path, node: Node) -> None:
    source = plant(base / "set")
    asked = wish(base, "set")
    node.stage(asked)
    source.rename(base / "elsewhere")
    stager = node.stager(asked)
    worker = Worker(stager)
    worker.start()
    worker._thread.join()
    assert isinstance(worker.problem, EnvironmentProblem)
    assert "there is no" in worker.problem.message
    assert not list(stager.data.iterdir())


def test_a_stop_ends_it(base: Path, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(base / "set")
    asked = wish(base, "set")
    node.stage(asked)
    stager = node.stager(asked)
    stager.copying.stop.set()
    worker = Worker(stager)
    worker.start()
    worker.end()
    assert worker.stopped
    assert not stager.staged.files


def test_what_another_user_wrote_is_not_believed_ahead(
    base: Path, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(base / "set")
    asked = wish(base, "set")
    node.stage(asked)
    monkeypatch.setattr(ahead.os, "geteuid", lambda: 4242)
    stager = node.stager(asked)
    stager.begin()
    assert not stager._ahead


@pytest.mark.parametrize("damage", ["manifest", "pack", "last", "room", "kept"])
def test_where_it_cannot_be_done_all_is_done_in_its_turn(
    damage: str, base: Path, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = plant(base / "set")
    asked = wish(base, "set")
    node.stage(asked)
    if damage == "manifest":
        next(asked.packs.glob("*.json")).write_text('{"manifest": [1, 2')
    elif damage == "pack":
        next(asked.packs.glob("*.pack")).unlink()
    elif damage == "last":
        next(asked.packs.glob("*.last")).write_text("nothing of that name")
    elif damage == "room":
        monkeypatch.setattr(ahead, "check_space", _no_room)
    else:
        asked = wish(base, "set", keep=3600)
    stager = node.stager(asked)
    stager.begin()
    assert not stager._ahead
    stager.stage(look(asked, stager.packs))
    assert content((stager.data / "set").resolve()) == content(source)
    for lock in stager.locks:
        lock.close()


def _no_room(*_: object, **__: object) -> None:
    raise EnvironmentProblem("too little")


def test_parts_of_a_copying_count_above_and_end_with_it() -> None:
    above = copying.Copying()
    part = copying.Copying(above)
    part.count(5)
    assert (above.done, part.done) == (5, 5)
    part.stop.set()
    assert not above.is_over
    other = copying.Copying(above)
    above.stop.set()
    assert other.is_over
