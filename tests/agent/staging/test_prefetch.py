"""Transfer ahead: the last pack is unpacked while its source is looked at, and counts only if nothing has changed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.agent.staging import packs, prefetch
from paceline.agent.staging.copy import helpers, small_files, transfer
from paceline.agent.staging.manifest import scan
from paceline.agent.staging.packs import Packs
from paceline.agent.staging.stage import Stager, Worker, look
from paceline.errors import EnvironmentProblem
from tests.agent.staging.trees import ODD, Node, content, plant, wish


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
    begun = stager.scouts.begun["set"]
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
    stager.scouts.begun["set"]._thread.join()  # all of it has been unpacked by then
    stager.stage(look(asked, stager.packs))
    assert content(stager.data / "set") == content(source)
    assert is_all_there(stager)
    again = node.stager(asked)
    again.begin()
    newer = look(asked, again.packs)[0].manifest
    assert again.scouts.begun["set"].manifest == newer
    again.scouts.give_up()
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


def test_a_stop_ends_it(base: Path, node: Node, placed: list[str]) -> None:
    plant(base / "set", large=0)
    asked = wish(base, "set")
    node.stage(asked)
    placed.clear()
    stager = node.stager(asked)
    stager.copying.stop.set()
    worker = Worker(stager)
    worker.start()
    worker.end()
    assert worker.stopped
    assert not placed
    assert not stager.staged.files


def test_a_pack_that_is_cut_short_is_an_error_though_its_manifest_is_true(base: Path, node: Node) -> None:
    plant(base / "set", large=0)
    asked = wish(base, "set")
    node.stage(asked)
    os.truncate(next(asked.packs.glob("*.pack")), 1000)
    with pytest.raises(EnvironmentProblem, match="cut short"):
        node.stage(asked)


def test_items_take_turns_and_one_that_changed_does_not_disturb_the_other(
    base: Path, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = plant(base / "one"), plant(base / "two", small=200)
    asked = wish(base, "one", "two")
    node.stage(asked)
    rename(two)
    at_work: list[str] = []
    most: list[int] = []
    real = transfer.ItemCopy.small_tasks

    def small_tasks(self: transfer.ItemCopy) -> list[transfer.Task]:
        at_work.append(self.target)
        most.append(len(at_work))
        tasks = real(self)
        return [*tasks, lambda: time.sleep(0.2), lambda: at_work.remove(self.target)]

    monkeypatch.setattr(transfer, "workers", lambda: 1)
    monkeypatch.setattr(transfer.ItemCopy, "small_tasks", small_tasks)
    data, stager = node.stage(asked)
    assert content(data / "one") == content(one)
    assert content(data / "two") == content(two)
    assert is_all_there(stager)
    assert most[:2] == [1, 1]


def test_helpers_unpack_ahead(base: Path, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helpers, "WORTH_IT", 200)
    source = plant(base / "set", small=600)
    asked = wish(base, "set")
    node.stage(asked)
    placed: list[helpers.Helper] = []
    real = helpers.Helper.place
    monkeypatch.setattr(helpers.Helper, "place", lambda self, group: placed.append(self) or real(self, group))
    data, _ = node.stage(asked)
    assert content(data / "set") == content(source)
    assert placed
    assert all(helper.process.returncode == 0 for helper in placed)


def test_too_little_room_is_said_as_if_nobody_had_begun(
    base: Path, little_disk: Path, tmp_path: Path
) -> None:
    """One item has a pack and fits; both do not."""
    source = plant(base / "set", small=500, large=0)
    Node(tmp_path / "large disk").stage(wish(base, "set"))
    (base / "more").write_bytes(bytes(3_500_000))
    node = Node(little_disk)
    asked = wish(base, "set", "more")
    stager = node.stager(asked)
    stager.begin()
    stager.scouts.begun["set"]._thread.join()
    planned = look(asked, stager.packs)
    needed = sum(each.manifest.needed for each in planned) / 1e6
    with pytest.raises(EnvironmentProblem, match=rf"needs {needed:.1f} MB, and .* has 4\.\d MB free"):
        stager.stage(planned)
    assert not list(stager.data.iterdir())
    data, _ = node.stage(wish(base, "set"))
    assert content(data / "set") == content(source)


def test_what_does_not_go_away_is_said(base: Path, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    source = plant(base / "set")
    asked = wish(base, "set")
    node.stage(asked)
    rename(source)
    monkeypatch.setattr(prefetch, "remove_tree", lambda _: False)
    with pytest.raises(EnvironmentProblem, match="from an older pack, and cannot be removed"):
        node.stage(asked)


def test_a_pack_that_is_no_longer_true_is_tried_once(base: Path, node: Node) -> None:
    source = plant(base / "set")
    asked = wish(base, "set")
    node.stage(asked)
    for path in source.rglob("*.bin"):
        path.unlink()  # too few are left for another pack
    node.stage(asked)
    stager = node.stager(asked)
    stager.begin()
    assert not stager.scouts.begun


def test_a_pack_in_use_is_not_old(base: Path, node: Node) -> None:
    plant(base / "a")
    plant(base / "b")
    node.stage(wish(base, "a"))
    store = Packs(wish(base).packs)
    for path in store.folder.iterdir():
        os.utime(path, (0, 0))
    data, _ = node.stage(wish(base, "b", "a"))  # to pack b, packs that nobody uses are removed
    assert (data / "a").is_dir()
    assert len(list(store.folder.glob("*.pack"))) == 2


def test_what_another_user_wrote_is_not_believed_ahead(
    base: Path, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = plant(base / "set")
    asked = wish(base, "set")
    node.stage(asked)
    monkeypatch.setattr(packs.os, "geteuid", lambda: 4242)
    stager = node.stager(asked)
    stager.begin()
    assert not stager.scouts.begun
    # Nodes that were told its name by the head see that it is what the head has found.
    key = scan(source).key
    assert stager.packs.read(key)[0] == scan(source)
    other = "0" * 32
    stager.packs.manifest(key).rename(stager.packs.manifest(other))
    with pytest.raises(EnvironmentProblem, match="is not what its name says"):
        stager.packs.read(other)


@pytest.mark.parametrize("damage", ["manifest", "shape", "pack", "last", "pipe", "room", "kept"])
def test_where_it_cannot_be_done_all_is_done_in_its_turn(
    damage: str, base: Path, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = plant(base / "set")
    asked = wish(base, "set")
    node.stage(asked)
    (last,) = asked.packs.glob("*.last")
    if damage == "manifest":
        next(asked.packs.glob("*.json")).write_text('{"manifest": [1, 2')
    elif damage == "shape":
        text = '{"manifest": ["x", [], [["file", "size", 0, 0]], [], 0, 0], "sums": {}}'
        next(asked.packs.glob("*.json")).write_text(text)
    elif damage == "pack":
        next(asked.packs.glob("*.pack")).unlink()
    elif damage == "last":
        last.write_text("../somewhere else")
    elif damage == "pipe":
        last.unlink()
        os.mkfifo(last)
    elif damage == "room":
        monkeypatch.setattr(prefetch, "check_free_space", _no_room)
    else:
        asked = wish(base, "set", keep=3600)
    stager = node.stager(asked)
    stager.begin()
    assert not stager.scouts.begun
    stager.stage(look(asked, stager.packs))
    assert content((stager.data / "set").resolve()) == content(source)
    for lock in stager.locks:
        lock.close()


def _no_room(*_: object, **__: object) -> None:
    raise EnvironmentProblem("too little")


def test_parts_of_a_copying_count_above_and_end_with_it() -> None:
    above = transfer.Transfer()
    part = transfer.Transfer(above)
    part.count(5)
    assert (above.done, part.done) == (5, 5)
    part.stop.set()
    assert not above.is_over
    other = transfer.Transfer(above)
    above.stop.set()
    assert other.is_over
