"""Prefetch: the last pack is unpacked while its source is scanned, and counts only if nothing has changed."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.errors import EnvironmentProblem
from paceline.staging import pack_store, prefetch
from paceline.staging.copy import helpers, small_files, transfer
from paceline.staging.manifest import scan
from paceline.staging.pack_store import Packs
from paceline.staging.stager import Stager, StagingThread, scan_items
from tests.staging.trees import ODD, Node, content, make_tree, request


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The target of each group of small files that was copied."""
    found: list[str] = []
    real = small_files.SmallFileCopier.copy

    def copy(self: small_files.SmallFileCopier, *group: object, **where: object) -> object:
        found.append(self.target)
        return real(self, *group, **where)  # type: ignore[arg-type]

    monkeypatch.setattr(small_files.SmallFileCopier, "copy", copy)
    return found


def is_complete(stager: Stager) -> bool:
    return stager.transfer.done == stager.transfer.total > 0


def test_a_current_pack_is_unpacked_once_and_large_files_follow(
    base: Path, node: Node, copied: list[str]
) -> None:
    source = make_tree(base / "set", large=2)
    wanted = request(base, "set", verify="checksum")
    node.stage(wanted)
    copied.clear()
    stager = node.stager(wanted)
    stager.start_prefetch()
    unpacking = stager.prefetcher.started["set"]
    unpacking._thread.join()  # before the scan
    assert len(copied) == 1
    large_files = {name for name in content(stager.data / "set") if name.startswith("large")}
    assert not large_files
    stager.stage(scan_items(wanted, stager.packs))
    assert content(stager.data / "set") == content(source)
    assert len(copied) == 1
    assert is_complete(stager)
    assert stager.result.files == len(unpacking.manifest.files)


def rewrite(source: Path) -> None:
    (source / ODD).write_bytes(b"new")


def rename(source: Path) -> None:
    (source / ODD).rename(source / "even")


def remove(source: Path) -> None:
    (source / "class 0" / "0000.bin").unlink()


def mode(source: Path) -> None:
    (source / "script.sh").chmod(0o700)


@pytest.mark.parametrize("change", [rewrite, rename, remove, mode])
def test_nothing_is_left_of_an_outdated_pack(
    change: Callable[[Path], None], base: Path, node: Node
) -> None:
    source = make_tree(base / "set")
    wanted = request(base, "set")
    node.stage(wanted)
    change(source)
    stager = node.stager(wanted)
    stager.start_prefetch()
    stager.prefetcher.started["set"]._thread.join()  # all of it has been unpacked by then
    stager.stage(scan_items(wanted, stager.packs))
    assert content(stager.data / "set") == content(source)
    assert is_complete(stager)
    again = node.stager(wanted)
    again.start_prefetch()
    newer = scan_items(wanted, again.packs)[0].manifest
    assert again.prefetcher.started["set"].manifest == newer
    again.prefetcher.cancel()
    assert not os.path.lexists(again.data / "set")


def test_a_missing_source_leaves_nothing(base: Path, node: Node) -> None:
    source = make_tree(base / "set")
    wanted = request(base, "set")
    node.stage(wanted)
    source.rename(base / "elsewhere")
    stager = node.stager(wanted)
    thread = StagingThread(stager)
    thread.start()
    thread._thread.join()
    assert isinstance(thread.error, EnvironmentProblem)
    assert "does not exist" in thread.error.message
    assert not list(stager.data.iterdir())


def test_a_stop_ends_the_prefetch(base: Path, node: Node, copied: list[str]) -> None:
    make_tree(base / "set", large=0)
    wanted = request(base, "set")
    node.stage(wanted)
    copied.clear()
    stager = node.stager(wanted)
    stager.transfer.stop.set()
    thread = StagingThread(stager)
    thread.start()
    thread.stop()
    assert thread.stopped
    assert not copied
    assert not stager.result.files


def test_a_truncated_pack_is_an_error_though_its_manifest_is_current(
    base: Path, node: Node
) -> None:
    make_tree(base / "set", large=0)
    wanted = request(base, "set")
    node.stage(wanted)
    os.truncate(next(wanted.packs.glob("*.pack")), 1000)
    with pytest.raises(EnvironmentProblem, match="truncated"):
        node.stage(wanted)


def test_items_take_turns_and_one_that_changed_does_not_disturb_the_other(
    base: Path, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = make_tree(base / "one"), make_tree(base / "two", small=200)
    wanted = request(base, "one", "two")
    node.stage(wanted)
    rename(two)
    at_work: list[str] = []
    at_once: list[int] = []
    real = transfer.ItemCopy.small_tasks

    def small_tasks(self: transfer.ItemCopy) -> list[transfer.Task]:
        at_work.append(self.target)
        at_once.append(len(at_work))
        tasks = real(self)
        return [*tasks, lambda: time.sleep(0.2), lambda: at_work.remove(self.target)]

    monkeypatch.setattr(transfer, "count_threads", lambda: 1)
    monkeypatch.setattr(transfer.ItemCopy, "small_tasks", small_tasks)
    data, stager = node.stage(wanted)
    assert content(data / "one") == content(one)
    assert content(data / "two") == content(two)
    assert is_complete(stager)
    assert at_once[:2] == [1, 1]


def test_helpers_prefetch(base: Path, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helpers, "FILES_PER_HELPER", 200)
    source = make_tree(base / "set", small=600)
    wanted = request(base, "set")
    node.stage(wanted)
    copied: list[helpers.Helper] = []
    real = helpers.Helper.copy
    monkeypatch.setattr(
        helpers.Helper, "copy", lambda self, group: copied.append(self) or real(self, group)
    )
    data, _ = node.stage(wanted)
    assert content(data / "set") == content(source)
    assert copied
    assert all(helper.process.returncode == 0 for helper in copied)


def test_too_little_space_is_reported_as_without_a_prefetch(
    base: Path, little_disk: Path, tmp_path: Path
) -> None:
    """One item has a pack and fits; both do not."""
    source = make_tree(base / "set", small=500, large=0)
    Node(tmp_path / "large disk").stage(request(base, "set"))
    (base / "more").write_bytes(bytes(3_500_000))
    node = Node(little_disk)
    wanted = request(base, "set", "more")
    stager = node.stager(wanted)
    stager.start_prefetch()
    stager.prefetcher.started["set"]._thread.join()
    planned = scan_items(wanted, stager.packs)
    needed = sum(each.manifest.disk_usage for each in planned) / 1e6
    with pytest.raises(
        EnvironmentProblem, match=rf"needs {needed:.1f} MB, but .* has 4\.\d MB free"
    ):
        stager.stage(planned)
    assert not list(stager.data.iterdir())
    data, _ = node.stage(request(base, "set"))
    assert content(data / "set") == content(source)


def test_a_prefetch_that_cannot_be_removed_is_an_error(
    base: Path, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_tree(base / "set")
    wanted = request(base, "set")
    node.stage(wanted)
    rename(source)
    monkeypatch.setattr(prefetch, "remove_tree", lambda _: False)
    with pytest.raises(EnvironmentProblem, match=r"Cannot remove .* outdated pack"):
        node.stage(wanted)


def test_an_outdated_pack_is_tried_once(base: Path, node: Node) -> None:
    source = make_tree(base / "set")
    wanted = request(base, "set")
    node.stage(wanted)
    for path in source.rglob("*.bin"):
        path.unlink()  # too few are left for another pack
    node.stage(wanted)
    stager = node.stager(wanted)
    stager.start_prefetch()
    assert not stager.prefetcher.started


def test_a_pack_in_use_is_not_old(base: Path, node: Node) -> None:
    make_tree(base / "a")
    make_tree(base / "b")
    node.stage(request(base, "a"))
    store = Packs(request(base).packs)
    for path in store.folder.iterdir():
        os.utime(path, (0, 0))
    data, _ = node.stage(request(base, "b", "a"))  # to pack b, packs that nobody uses are removed
    assert (data / "a").is_dir()
    assert len(list(store.folder.glob("*.pack"))) == 2


def test_files_of_another_user_are_not_prefetched(
    base: Path, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_tree(base / "set")
    wanted = request(base, "set")
    node.stage(wanted)
    monkeypatch.setattr(pack_store.os, "geteuid", lambda: 4242)
    stager = node.stager(wanted)
    stager.start_prefetch()
    assert not stager.prefetcher.started
    # Nodes that got its key from the head agent verify its content.
    key = scan(source).key
    assert stager.packs.read(key)[0] == scan(source)
    other = "0" * 32
    stager.packs.manifest_path(key).rename(stager.packs.manifest_path(other))
    with pytest.raises(EnvironmentProblem, match="does not match its name"):
        stager.packs.read(other)


@pytest.mark.parametrize("damage", ["manifest", "shape", "pack", "last", "pipe", "space", "cache"])
def test_without_a_usable_pack_the_item_is_copied_as_usual(
    damage: str, base: Path, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_tree(base / "set")
    wanted = request(base, "set")
    node.stage(wanted)
    (last,) = wanted.packs.glob("*.last")
    if damage == "manifest":
        next(wanted.packs.glob("*.json")).write_text('{"manifest": [1, 2')
    elif damage == "shape":
        text = '{"manifest": ["x", [], [["file", "size", 0, 0]], [], 0, 0], "checksums": {}}'
        next(wanted.packs.glob("*.json")).write_text(text)
    elif damage == "pack":
        next(wanted.packs.glob("*.pack")).unlink()
    elif damage == "last":
        last.write_text("../somewhere else")
    elif damage == "pipe":
        last.unlink()
        os.mkfifo(last)
    elif damage == "space":
        monkeypatch.setattr(prefetch, "check_free_space", _no_space)
    else:
        wanted = request(base, "set", keep=3600)
    stager = node.stager(wanted)
    stager.start_prefetch()
    assert not stager.prefetcher.started
    stager.stage(scan_items(wanted, stager.packs))
    assert content((stager.data / "set").resolve()) == content(source)
    for lock in stager.locks:
        lock.close()


def _no_space(*_: object, **__: object) -> None:
    raise EnvironmentProblem("too little")


def test_a_transfer_counts_towards_its_parent_and_stops_with_it() -> None:
    parent = transfer.Transfer()
    part = transfer.Transfer(parent)
    part.add(5)
    assert (parent.done, part.done) == (5, 5)
    part.stop.set()
    assert not parent.is_stopped
    other = transfer.Transfer(parent)
    parent.stop.set()
    assert other.is_stopped


def test_a_new_pack_is_not_written_through_a_link_of_others(tmp_path: Path) -> None:
    store = Packs(tmp_path / "packs")
    store.folder.mkdir()
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (store.folder / f".key.{socket.gethostname()}.{os.getpid()}.partial").symlink_to(victim)
    os.close(store.create("key").descriptor)
    assert victim.read_text() == "mine"
