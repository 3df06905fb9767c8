"""Staging on one node: copies equal their source, packs and the cache are used, and errors say what is wrong."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import pytest

from paceline.contract.files import find_own_folder
from paceline.errors import EnvironmentProblem, UsageError
from paceline.staging import cache, copy, packs
from paceline.staging.cache import cached_items
from paceline.staging.cleanup import make_private_folder
from paceline.staging.copy import Stopped, Transfer
from paceline.staging.manifest import SMALL, FileEntry, scan
from paceline.staging.packs import Packs
from paceline.staging.request import choose_base
from paceline.staging.stager import scan_items
from tests.slurm.runs import Completed
from tests.staging.trees import ODD, Node, content, make_tree, request


def test_a_copy_is_like_its_source_with_and_without_a_pack(base: Path, node: Node) -> None:
    source = make_tree(base / "sets" / "a b")
    (base / "weights").write_bytes(b"w" * (SMALL + 1))
    wanted = request(base, "sets/a b", "weights")
    data, _ = node.stage(wanted)
    assert content(data / "sets" / "a b") == content(source)
    assert (data / "sets" / "a b" / ODD).read_bytes() == b"odd"
    assert (data / "weights").read_bytes() == b"w" * (SMALL + 1)
    assert len(list(wanted.packs.glob("*.tar"))) == 1
    without, _ = node.stage(request(base, "sets/a b/class 0"))  # too few files for a pack
    assert content(without / "sets" / "a b" / "class 0") == content(source / "class 0")
    assert len(list(wanted.packs.glob("*.tar"))) == 1


def test_later_jobs_read_the_pack_and_not_the_files(
    base: Path, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_tree(base / "set")
    wanted = request(base, "set")
    first, _ = node.stage(wanted)
    read: list[FileEntry] = []
    real = copy.read_files

    def counted(folder: str, files: Sequence[FileEntry]) -> list[bytes]:
        read.extend(files)
        return real(folder, files)

    for module in (copy, packs):
        monkeypatch.setattr(module, "read_files", counted)
    second, _ = node.stage(wanted)
    assert not read
    assert content(first / "set") == content(second / "set") == content(source)
    (source / ODD).write_bytes(b"changed")  # another content, another pack
    third, _ = node.stage(wanted)
    assert len(read) == len(scan(source).small)
    assert content(third / "set") == content(source)


def test_a_pack_is_a_tar_file(base: Path, node: Node, tmp_path: Path) -> None:
    """Anybody can look into it; names may be long, or not UTF-8."""
    source = make_tree(base / "set", large=0)
    (source / os.fsdecode(b"no text \xff")).write_bytes(b"odd too")
    (source / ("long " * 30)).write_bytes(b"long")
    (source / "class 0" / ("very long " * 20)).write_bytes(bytes(1000))
    wanted = request(base, "set")
    node.stage(wanted)
    data, _ = node.stage(wanted)
    assert content(data / "set") == content(source)
    (pack,) = wanted.packs.glob("*.tar")
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    subprocess.run(["tar", "-xf", pack, "-C", unpacked], check=True)
    for path in (path for path in source.rglob("*") if path.is_file()):
        copied = unpacked / path.relative_to(source)
        assert copied.read_bytes() == path.read_bytes()
        assert copied.stat().st_mode == path.stat().st_mode


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


def test_an_interrupted_copy_begins_again(
    base: Path, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_tree(base / "set", small=0, large=4)
    wanted = request(base, "set", keep=3600)
    real, copied = copy.copy_file, []

    def fails_late(source: str, target: BinaryIO, transfer: Transfer) -> os.stat_result:
        if len(copied) == 2:
            raise Stopped
        copied.append(source)
        return real(source, target, transfer)

    with monkeypatch.context() as patched:
        patched.setattr(copy, "THREADS", 1)
        patched.setattr(copy, "copy_file", fails_late)
        with pytest.raises(Stopped):
            node.stage(wanted)
    data, stager = node.stage(wanted)
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

    def fill(number: int) -> None:
        filled.append(number)
        began.set()
        assert may_continue.wait(60)
        shutil.copytree(source, item.target(str(source)))
        item.finish(keep=60, source=str(source))

    found: dict[int, bool] = {}

    def job(number: int) -> None:
        lock, found[number] = cache.acquire_item(
            item, fill=lambda: fill(number), check=lambda: None
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
        "paceline.staging.stager._free_space", lambda _: 10**12
    )  # another program fills it meanwhile
    with pytest.raises(EnvironmentProblem, match="is full"):
        node.stage(request(base, "one", keep=3600))
    stager.locks[0].close()


def test_a_source_that_changes_is_an_error(base: Path, node: Node) -> None:
    source = make_tree(base / "set")
    wanted = request(base, "set")
    planned = scan_items(wanted)
    (source / ODD).write_bytes(b"longer than it was")
    with pytest.raises(EnvironmentProblem, match="changed while it was being copied"):
        node.stage(wanted, planned)
    with pytest.raises(EnvironmentProblem, match="changed while it was being copied"):
        Packs(wanted.packs).write(planned[0].manifest, Transfer())
    assert not list(wanted.packs.iterdir())
    (source / ODD).unlink()
    with pytest.raises(EnvironmentProblem, match=r"cannot stage .*a name with spaces.*No such"):
        node.stage(wanted, planned)


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
    with pytest.raises(UsageError, match=r"\$NVME, which is not set here"):
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
    assert find_own_folder(tmp_path) == other
    with pytest.raises(EnvironmentProblem, match="Cannot create a folder"):
        make_private_folder(tmp_path / "file" / "below")


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
