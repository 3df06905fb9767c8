"""Staging on one node: copies equal their source, packs and the cache are used, and errors say what is wrong."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import EnvironmentProblem, UsageError
from paceline.staging import cache, manifest
from paceline.staging.cache import cached_items
from paceline.staging.copy import helpers, small_files, transfer
from paceline.staging.copy.progress import Progress, show_progress
from paceline.staging.copy.transfer import Stopped, Transfer
from paceline.staging.folders import choose_base, make_private_folder, private_path
from paceline.staging.manifest import (
    GROUP_BYTES,
    GROUP_FILES,
    SMALL,
    FileEntry,
    FileGroup,
    Manifest,
    scan,
)
from paceline.staging.pack_store import Packs, make_packs
from paceline.staging.stager import Stager, scan_items
from tests.slurm.runs import Completed
from tests.staging.trees import ODD, Node, content, make_tree, manifests, request


def test_a_copy_is_like_its_source_with_and_without_a_pack(base: Path, node: Node) -> None:
    source = make_tree(base / "sets" / "a b")
    (base / "weights").write_bytes(b"w" * (SMALL + 1))
    wanted = request(base, "sets/a b", "weights", verify="checksum")
    data, _ = node.stage(wanted)
    assert content(data / "sets" / "a b") == content(source)
    assert (data / "sets" / "a b" / ODD).read_bytes() == b"odd"
    assert (data / "weights").read_bytes() == b"w" * (SMALL + 1)
    assert len(list(wanted.packs.glob("*.pack"))) == 1
    without, _ = node.stage(request(base, "sets/a b/class 0"))  # too few files for a pack
    assert content(without / "sets" / "a b" / "class 0") == content(source / "class 0")
    assert len(list(wanted.packs.glob("*.pack"))) == 1


def test_later_jobs_read_the_pack_and_not_the_files(
    base: Path, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_tree(base / "set")
    wanted = request(base, "set")
    first, _ = node.stage(wanted)
    read = []
    real = small_files.SmallFileCopier._read
    monkeypatch.setattr(
        small_files.SmallFileCopier,
        "_read",
        lambda self, files: read.extend(files) or real(self, files),
    )
    second, _ = node.stage(wanted)
    assert not read
    assert content(first / "set") == content(second / "set") == content(source)
    (source / ODD).write_bytes(b"changed")  # another content, another pack
    third, _ = node.stage(wanted)
    assert len(read) == len(scan(source).small())
    assert content(third / "set") == content(source)


@pytest.fixture
def tree(base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enough small files for helpers; one name is not UTF-8."""
    monkeypatch.setattr(helpers, "FILES_PER_HELPER", 200)
    source = make_tree(base / "set", small=600)
    (source / os.fsdecode(b"no text \xff")).write_bytes(b"odd too")
    return source


def test_helpers_copy_pack_and_unpack(
    tree: Path, base: Path, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed = []
    real = helpers.Helper.copy
    monkeypatch.setattr(
        helpers.Helper, "copy", lambda self, group: placed.append(self) or real(self, group)
    )
    wanted = request(base, "set", verify="checksum")
    for _ in ("packed on the way", "out of the pack"):
        placed.clear()
        data, _ = node.stage(wanted)
        assert content(data / "set") == content(tree)
        assert placed
        assert all(helper.process.returncode == 0 for helper in placed)
    packs = Packs(base / "elsewhere")
    assert make_packs(manifests(wanted, packs), packs, Transfer()) == 1
    (made,), (expected,) = packs.folder.glob("*.pack"), wanted.packs.glob("*.pack")
    assert made.read_bytes() == expected.read_bytes()


def test_errors_in_helpers_are_reported(
    tree: Path, base: Path, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = request(base, "set")
    stager = Stager(
        wanted, private=node.private, data=node.private / "data", host="here", makes_packs=True
    )
    planned = scan_items(wanted, stager.packs)
    (tree / ODD).write_bytes(b"longer than it was")
    with pytest.raises(EnvironmentProblem, match="changed while it was being staged"):
        stager.stage(planned)
    (tree / ODD).unlink()
    (tree / ODD).symlink_to("nowhere")
    with pytest.raises(
        EnvironmentProblem, match=r"cannot stage .*a name with spaces.*No such file"
    ):
        Stager(
            wanted, private=node.private, data=node.private / "again", host="here", makes_packs=True
        ).stage(planned)
    real = helpers.Helper.copy

    def killed(self: helpers.Helper, group: FileGroup) -> tuple[dict[str, int], str]:
        self.process.kill()
        return real(self, group)

    monkeypatch.setattr(helpers.Helper, "copy", killed)
    with pytest.raises(EnvironmentProblem, match="was killed"):
        node.stage(wanted)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_helpers_leave_signals_to_the_agent(number: signal.Signals, tmp_path: Path) -> None:
    """Even while they start: a scheduler may send a stop request then."""
    for folder in ("from", "to"):
        (tmp_path / folder).mkdir()
    (tmp_path / "from" / "file").write_text("text")
    helper = helpers.Helper(
        small_files.SmallFileCopier(str(tmp_path / "from"), str(tmp_path / "to"))
    )
    try:
        helper.process.send_signal(number)
        assert helper.copy(FileGroup(0, 4, (FileEntry("file", 4, 0, 0o644, 0),))) == ({}, "")
    finally:
        helper.close()
    assert (tmp_path / "to" / "file").read_text() == "text"


def test_packs_can_be_made_before_a_job(base: Path, node: Node) -> None:
    source = make_tree(base / "set")
    wanted = request(base, "set", verify="checksum")
    packs = Packs(wanted.packs)
    assert make_packs(manifests(wanted, packs), packs, Transfer()) == 1
    assert make_packs(manifests(wanted, packs), packs, Transfer()) == 0
    data, _ = node.stage(wanted, makes_packs=False)
    assert content(data / "set") == content(source)


def flip_a_bit(path: Path) -> None:
    damaged = bytearray(path.read_bytes())
    damaged[1000] ^= 1
    path.write_bytes(damaged)


@pytest.mark.parametrize("makes_packs", [True, False])
@pytest.mark.parametrize("prefetches", [True, False])
def test_checksums_find_a_bad_pack_and_replace_it(
    base: Path, node: Node, makes_packs: bool, prefetches: bool
) -> None:
    source = make_tree(base / "set")
    wanted = request(base, "set", verify="checksum")
    node.stage(wanted)
    flip_a_bit(next(wanted.packs.glob("*.pack")))
    stager = node.stager(wanted, makes_packs=makes_packs)
    if prefetches:
        stager.start_prefetch()
    stager.stage(scan_items(wanted, stager.packs))
    assert content(stager.data / "set") == content(source)
    assert any("was damaged" in note for note in stager.result.notes)
    assert stager.packs.has(scan(source).key) == makes_packs
    assert not any("was damaged" in note for note in node.stage(wanted)[1].result.notes)


def change_in_secret(path: Path) -> None:
    """Change a file and restore its size and modification time, as some programs do."""
    before = path.stat()
    path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("keep", [0, 3600])
def test_a_change_that_keeps_size_and_time_is_found(base: Path, node: Node, keep: float) -> None:
    source = make_tree(base / "set")
    wanted = request(base, "set", keep=keep) if keep else request(base, "set")
    for lock in node.stage(wanted)[1].locks:
        lock.close()
    for path in (path for path in source.rglob("*") if path.is_file() and not path.is_symlink()):
        change_in_secret(path)
    data, stager = node.stage(wanted)
    assert content((data / "set").resolve()) == content(source)
    for lock in stager.locks:
        lock.close()


def test_checksums_come_from_the_source_and_not_from_the_pack(base: Path, node: Node) -> None:
    """Even if a file system reports nothing of the change."""
    source = make_tree(base / "set")
    wanted = request(base, "set", verify="checksum")
    packs = Packs(wanted.packs)
    make_packs(manifests(wanted, packs), packs, Transfer())
    old = scan(source).key
    change_in_secret(
        next(
            path for path in source.rglob("*") if path.is_file() and 0 < path.stat().st_size < SMALL
        )
    )
    for path in wanted.packs.glob(f"{old}.*"):
        path.rename(path.with_stem(scan(source).key))
    data, _ = node.stage(wanted)
    assert content(data / "set") == content(source)


def test_checksums_find_a_bad_copy_in_the_cache(base: Path, node: Node) -> None:
    source = make_tree(base / "set")
    wanted = request(base, "set", verify="checksum", keep=3600)
    data, stager = node.stage(wanted)
    copy = next(
        path
        for path in (data / "set").resolve().rglob("*")
        if path.is_file() and path.stat().st_size > SMALL
    )
    change_in_secret(copy)
    with pytest.raises(EnvironmentProblem, match="differs from its source"):  # it is in use
        node.stage(wanted)
    for lock in stager.locks:
        lock.close()
    data, stager = node.stage(wanted)
    assert content((data / "set").resolve()) == content(source)
    for lock in stager.locks:
        lock.close()


def test_files_with_holes_are_counted_and_copied_by_their_blocks(base: Path, node: Node) -> None:
    source = base / "set"
    source.mkdir(parents=True)
    with open(source / "sparse", "wb") as file:
        file.write(b"start")
        file.seek(300 << 20)
        file.write(b"middle")
        file.truncate(800 << 20)
    if (source / "sparse").stat().st_blocks * 512 > 1 << 20:
        pytest.skip("this file system has no holes")
    (source / "empty").touch()
    os.truncate(source / "empty", 100 << 20)
    assert scan(source).disk_usage < 1 << 20
    data, stager = node.stage(request(base, "set"))
    for name in ("sparse", "empty"):
        copy, original = (data / "set" / name).stat(), (source / name).stat()
        assert (copy.st_size, copy.st_mtime_ns) == (original.st_size, original.st_mtime_ns)
        assert copy.st_blocks * 512 < 1 << 20
    with open(data / "set" / "sparse", "rb") as file:
        assert file.read(6) == b"start\0"
        file.seek(300 << 20)
        assert file.read(7) == b"middle\0"
    assert stager.transfer.done == stager.transfer.total == 900 << 20


def test_large_files_arrive_in_pieces(
    base: Path, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PIECE", 100_000)
    source = make_tree(base / "set", small=3, large=4)
    data, _ = node.stage(request(base, "set"))
    assert content(data / "set") == content(source)
    # File systems that cannot copy inside the kernel, or not from one to the other.
    for ways in (
        [_refuse],
        [transfer._by_sendfile],
        [_refuse, transfer._by_sendfile],
        [_refuse, _refuse],
    ):
        monkeypatch.setattr(transfer, "_IN_KERNEL", ways)
        data, _ = node.stage(request(base, "set"))
        assert content(data / "set") == content(source)


def _refuse(*_: int) -> int:
    raise OSError(errno.EXDEV, "Invalid cross-device link")


def test_links_stay_links(base: Path, node: Node, tmp_path: Path) -> None:
    source = make_tree(base / "set", small=2)
    outside = tmp_path / "elsewhere"
    outside.write_text("shared")
    (source / "near").symlink_to(source / "script.sh")  # in full, but inside
    (source / "class 0" / "up").symlink_to("../script.sh")
    (source / "far").symlink_to(os.path.relpath(outside, source))  # relative, but outside
    (source / "broken").symlink_to("nowhere")
    (base / "alias").symlink_to(source)
    data, _ = node.stage(request(base, "alias"))
    copy = data / "alias"
    assert not copy.is_symlink()
    assert copy.joinpath("near").resolve() == copy.resolve() / "script.sh"
    assert copy.joinpath("class 0", "up").resolve() == copy.resolve() / "script.sh"
    assert copy.joinpath("far").resolve() == outside
    assert os.readlink(copy / "broken") == "nowhere"
    assert scan(base / "alias").outside_links == 1


def test_cached_data_is_reused_and_expires(base: Path, node: Node) -> None:
    source = make_tree(base / "set")
    wanted = request(base, "set", keep=3600)
    first, stager = node.stage(wanted)
    assert content(first / "set") == content(source)
    second, again = node.stage(wanted)
    assert (again.result.size, again.result.reused) == (0, scan(source).size)
    assert (first / "set").resolve() == (second / "set").resolve()
    (cached,) = cached_items(node.private)
    assert not cached.is_expired(time.time())
    assert cached.is_expired(time.time() + 4000)
    assert not cached.remove()  # two runs use it
    for lock in [*stager.locks, *again.locks]:
        lock.close()
    assert cached.remove()
    assert not cached_items(node.private)
    assert not list((node.private / "cache").iterdir())


def test_an_interrupted_copy_is_resumed(
    base: Path, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_tree(base / "set", small=0, large=4)
    wanted = request(base, "set", keep=3600)
    real, pieces = transfer.ItemCopy._copy_piece, []

    def fails_late(self: transfer.ItemCopy, entry: FileEntry, start: int) -> None:
        if len(pieces) == 3:
            raise Stopped
        real(self, entry, start)
        pieces.append(entry.path)

    with monkeypatch.context() as patched:
        patched.setattr(transfer, "count_threads", lambda: 1)
        patched.setattr(transfer.ItemCopy, "_copy_piece", fails_late)
        with pytest.raises(Stopped):
            node.stage(wanted)
    done = list(pieces)
    monkeypatch.setattr(
        transfer.ItemCopy,
        "_copy_piece",
        lambda self, entry, start: (pieces.append(entry.path), real(self, entry, start)),
    )
    data, stager = node.stage(wanted)
    assert sorted(pieces[len(done) :]) == sorted({f"large-{n}" for n in range(4)} - set(done))
    assert content(data / "set") == content(source)
    for lock in stager.locks:
        lock.close()


def test_cached_data_without_its_record_is_finished(
    base: Path, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the record is missing: the disk was full, or the job was killed."""
    source = make_tree(base / "set")
    wanted = request(base, "set", keep=3600)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(cache, "write_atomically", full)
        with pytest.raises(EnvironmentProblem, match="is full"):
            node.stage(wanted)
    data, stager = node.stage(wanted)
    assert content(data / "set") == content(source)
    for lock in stager.locks:
        lock.close()


def test_two_jobs_stage_the_same_data_once(base: Path, node: Node) -> None:
    source = make_tree(base / "set")
    item = cache.cached_item(node.private, "k" * 32)
    began, may_continue = threading.Event(), threading.Event()
    filled: list[int] = []

    def fill(number: int, folder: Path) -> None:
        filled.append(number)
        began.set()
        assert may_continue.wait(60)
        shutil.copytree(source, folder / "set")
        item.finish(keep=60, source=str(source), size=1)

    found: dict[int, bool] = {}

    def job(number: int) -> None:
        lock, found[number] = cache.acquire_item(
            item, stage=lambda folder, _: fill(number, folder), is_stopped=lambda: False
        )
        lock.close()

    threads = [threading.Thread(target=job, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    assert began.wait(60)
    may_continue.set()
    for thread in threads:
        thread.join(60)
    assert len(filled) == 1
    assert sorted(found.values()) == [False, True, True]


def test_a_disk_that_is_too_small_is_an_error_before_copying(base: Path, little_disk: Path) -> None:
    base.mkdir(parents=True)
    (base / "set").write_bytes(bytes(5_000_000))
    node = Node(little_disk)
    with pytest.raises(
        EnvironmentProblem, match=r"Node here: the data needs 5\.0 MB, but .* has 4\.\d MB free"
    ):
        node.stage(request(base, "set"))
    assert not list(node.private.rglob("set"))


def test_data_above_the_limit_of_the_site_is_an_error_before_copying(
    base: Path, node: Node
) -> None:
    base.mkdir(parents=True, exist_ok=True)
    (base / "large").write_bytes(b"x" * 100_000)
    data, _ = node.stage(request(base, "large", limit=200_000))
    assert (data / "large").stat().st_size == 100_000
    with pytest.raises(
        EnvironmentProblem, match=r"this site allows 50\.0 kB of staged data per node"
    ):
        node.stage(request(base, "large", limit=50_000))


def test_cached_data_makes_space_and_a_full_disk_is_an_error(
    base: Path, little_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base.mkdir(parents=True)
    for name in ("one", "two"):
        (base / name).write_bytes(bytes(3_000_000))
    node = Node(little_disk)
    _, stager = node.stage(request(base, "one", keep=3600))
    with pytest.raises(EnvironmentProblem, match=r"needs 3\.0 MB"):  # in use
        node.stage(request(base, "two", keep=3600))
    stager.locks[0].close()
    _, stager = node.stage(request(base, "two", keep=3600))  # now the other one is removed
    assert [item.read_record()[1] for item in cached_items(node.private)] == [str(base / "two")]
    monkeypatch.setattr(
        "paceline.staging.stager.check_free_space", lambda *_, **__: None
    )  # another program fills it meanwhile
    with pytest.raises(EnvironmentProblem, match="is full"):
        node.stage(request(base, "one", keep=3600))
    stager.locks[0].close()


def test_a_source_that_changes_is_an_error(base: Path, node: Node) -> None:
    source = make_tree(base / "set")
    stager = Stager(
        request(base, "set"),
        private=node.private,
        data=node.private / "data",
        host="here",
        makes_packs=True,
    )
    planned = scan_items(stager.request, stager.packs)
    (source / ODD).write_bytes(b"longer than it was")
    with pytest.raises(EnvironmentProblem, match="changed while it was being staged"):
        stager.stage(planned)
    assert not list(stager.packs.folder.iterdir())


def test_invalid_paths_are_rejected(base: Path, node: Node, tmp_path: Path) -> None:
    (base / "a").mkdir(parents=True)
    with pytest.raises(EnvironmentProblem, match=r"'.*nowhere' does not exist"):
        node.stage(request(base, "a", "nowhere"))
    with pytest.raises(UsageError, match="would both become 'a'"):
        request(base, "a", str(tmp_path / "a"))
    for stage in ("../b", ".."):
        with pytest.raises(UsageError, match=r"without \.\."):
            request(base, stage)
    with pytest.raises(UsageError, match=r"\$NOWHERE, which is not set"):
        request(base, "$NOWHERE/a")
    for collect in ("/etc/passwd", "../x", ""):
        with pytest.raises(UsageError, match="collect"):
            request(base, collect=[collect])
    names = [
        item.name
        for item in request(base, "a", "a/b", str(base / "c/d"), "/x/e", "~/f", "q$x").items
    ]
    assert names == ["a", "c/d", "e", "f", "q$x"]


def test_the_folder_on_the_node(tmp_path: Path) -> None:
    own, tmp = tmp_path / "job-77", tmp_path / "tmp"
    own.mkdir()
    tmp.mkdir()
    environ = {"SLURM_TMPDIR": str(own), "TMPDIR": str(tmp), "SLURM_JOB_ID": "77"}
    assert choose_base(request(tmp_path), environ) == own
    assert choose_base(request(tmp_path, keep=60), environ) == tmp  # never in the job's own
    assert choose_base(request(tmp_path, keep=60), {**environ, "TMPDIR": str(own)}) == Path("/tmp")
    assert choose_base(request(tmp_path, folder="/nvme/$SLURM_JOB_ID"), environ) == Path("/nvme/77")
    with pytest.raises(UsageError, match=r"\$NVME, which is not set on this node"):
        choose_base(request(tmp_path, folder="$NVME/x"), environ)
    with pytest.raises(UsageError, match="removed with the job"):
        choose_base(request(tmp_path, folder=f"{own}/x", keep=60), environ)


def test_a_private_folder_is_private(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    made = make_private_folder(tmp_path)
    assert made.stat().st_mode & 0o777 == 0o700
    made.chmod(0o755)
    assert make_private_folder(tmp_path).stat().st_mode & 0o777 == 0o700
    made.rmdir()
    made.symlink_to(tmp_path)  # another user was faster
    other = make_private_folder(tmp_path)
    assert other != made
    assert other.stat().st_mode & 0o777 == 0o700
    assert make_private_folder(tmp_path) == other
    assert private_path(tmp_path) == other
    with pytest.raises(EnvironmentProblem, match="Cannot create a folder"):
        make_private_folder(tmp_path / "file" / "below")


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, SMALL), max_size=60), st.integers(1, 700))
def test_groups_cover_the_pack(sizes: list[int], repeated: int) -> None:
    files = [
        FileEntry(f"{n:05d}", size, 0, 0o644, 0)
        for n, size in enumerate(sizes * (1 + repeated // 300))
    ]
    groups = list(Manifest("/s", [""], files, []).groups())
    assert [each for group in groups for each in group.files] == files
    offset = 0
    for group in groups:
        assert group.offset == offset
        assert group.size == sum(each.size for each in group.files) <= GROUP_BYTES
        assert 0 < len(group.files) <= GROUP_FILES
        offset += group.size


def test_the_first_error_stops_all_threads() -> None:
    copy, ran = Transfer(), []

    def fails() -> None:
        ran.append(1)
        raise ValueError("this one")

    with pytest.raises(ValueError, match="this one"):
        copy.run([fails] * 500)
    assert len(ran) <= transfer.count_threads()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_shown(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr("paceline.staging.copy.progress.time.monotonic", lambda: now[0])
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal, raising=False)
    lines: list[str] = []
    line, copy = Progress(lines.append), Transfer()
    copy.total = 4_000_000
    copy.add(1_000_000)
    line.show("staging data", copy)  # too soon
    now[0] += 10.0
    line.show("staging data", copy)
    line.clear()
    shown = capsys.readouterr().err
    text = "25% of 4.0 MB, 100.0 kB/s, 30 s left"
    if is_terminal:
        assert f"\r\033[Kpaceline: staging data {'#' * 6}{'.' * 18} {text}" in shown
        assert shown.count("staging data") == 1
    assert lines == ([] if is_terminal else [f"staging data: {text}"])


def test_one_thread_and_several_find_the_same_files(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_tree(base / "set")
    (source / "class 0" / "deep" / "er").mkdir(parents=True)
    (source / "class 0" / "deep" / "er" / "file").write_text("text")
    alone = scan(source)
    calls: list[int] = []
    monkeypatch.setattr(manifest._Latency, "is_high", property(lambda _: not calls.append(1)))
    together = scan(source)
    assert calls
    assert together == alone
    assert together.key == alone.key
    assert Manifest.from_values(json.loads(alone.to_json())) == alone


def test_data_stage_packs_before_any_job(base: Path, paceline: Callable[..., Completed]) -> None:
    source = make_tree(base / "set")
    project = base.parent.parent / "project"
    project.mkdir()
    output = paceline("data", "stage", "set", cwd=project, check=True).stdout
    assert "set: 103 files (102 small)" in output
    assert f"packed 1 of them into {base / '.staged'}" in output
    assert (
        "nothing left to pack"
        in paceline("data", "stage", str(source), cwd=project, check=True).stdout
    )
    gone = paceline("data", "stage", "sets", cwd=project)
    assert gone.returncode
    assert "does not exist" in gone.stderr
    assert not paceline("data", "stage", cwd=project).stdout


def test_progress_is_shown_while_a_transfer_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.staging.copy.progress.LOG_INTERVAL", 0.0)
    lines: list[str] = []
    transfer = Transfer()
    with show_progress("packing", transfer, say=lines.append):
        transfer.total = 4_000_000
        transfer.add(1_000_000)
        deadline = time.monotonic() + 60
        while not lines:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert lines[0].startswith("packing: 25% of 4.0 MB")
