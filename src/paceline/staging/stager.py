"""Stage items on one node: scan, make space, copy or reuse, verify. Runs in a thread beside the
agent's loop.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from paceline.errors import EnvironmentProblem, PacelineError
from paceline.staging.cache import Lock, acquire_item, cached_item, cached_items
from paceline.staging.copy.small_files import join
from paceline.staging.copy.transfer import (
    CopyDiffers,
    ItemCopy,
    Stopped,
    Transfer,
    compute_checksum,
)
from paceline.staging.folders import check_free_space, check_limit, free_space, remove_tree
from paceline.staging.manifest import FileEntry, Manifest, scan
from paceline.staging.pack_store import NewPack, Packs
from paceline.staging.prefetch import Prefetcher
from paceline.staging.request import StagingRequest, check_sources


@dataclass(frozen=True)
class ScannedItem:
    """An item and what it holds."""

    name: str
    manifest: Manifest
    checksums: dict[str, int] = field(default_factory=dict)


@dataclass
class StagingResult:
    """What was staged."""

    files: int = 0
    size: int = 0  # bytes copied
    reused: int = 0  # bytes found in the cache
    notes: list[str] = field(default_factory=list)


def scan_items(
    request: StagingRequest, packs: Packs, transfer: Transfer | None = None
) -> list[ScannedItem]:
    """Scan everything that is to be staged."""
    check_sources(request)
    scanned = []
    for item in request.items:
        manifest = scan(item.source)
        has_pack = request.checksum and packs.has(manifest.key)
        checksums = _check_pack(manifest, packs, Transfer(transfer)) if has_pack else {}
        scanned.append(ScannedItem(item.name, manifest, checksums))
    return scanned


def _check_pack(manifest: Manifest, packs: Packs, transfer: Transfer) -> dict[str, int]:
    """Return the checksums of the packed files, as their source is now. A pack that has others is
    removed.
    """
    checksums: dict[str, int] = {}

    def read(file: FileEntry) -> None:
        checksums[file.path] = compute_checksum(join(manifest.source, file.path), transfer)

    transfer.run([partial(read, file) for file in manifest.small()])
    try:
        known = packs.read(manifest.key)[1]
    except EnvironmentProblem:
        packs.remove(manifest.key)
        return checksums
    if known and known != checksums:
        packs.remove(manifest.key)
    elif not known:
        with suppress(OSError):
            packs.publish(manifest, checksums)  # other nodes need not read the source then
    return checksums


def scan_notes(items: Sequence[ScannedItem]) -> list[str]:
    """Return notes on links and files that are not staged as they are."""
    notes = []
    for item in items:
        if item.manifest.outside_links:
            notes.append(
                f"{item.manifest.outside_links} links in {item.name!r} point outside it: they "
                "stay links, and runs "
                "read their targets in place"
            )
        if item.manifest.special_files:
            notes.append(
                f"{item.manifest.special_files} sockets, pipes or devices in {item.name!r} are "
                "skipped"
            )
    return notes


class Stager:
    """Copies scanned items below `data`. With `keep` they go into the cache, and `data` has links
    to them.
    """

    def __init__(
        self, request: StagingRequest, *, private: Path, data: Path, host: str, makes_packs: bool
    ) -> None:
        self.request, self.private, self.data, self.host = request, private, data, host
        self.makes_packs = makes_packs
        self.packs = Packs(request.packs)
        self.transfer = Transfer()
        self.locks: list[Lock] = []  # held as long as the cached data is used
        self.result = StagingResult()
        self.prefetcher = Prefetcher(self.packs, private=private, data=data, transfer=self.transfer)
        self._prefetched: set[str] = set()  # items whose small files are on the node already

    def start_prefetch(self) -> None:
        """Unpack the last packs while the items are being scanned."""
        if not self.request.keep:
            for item in self.request.items:
                self.prefetcher.start(item)

    def stage(self, items: Sequence[ScannedItem]) -> StagingResult:
        try:
            self.transfer.total = sum(item.manifest.size for item in items)
            check_limit(self.request.limit, sum(item.manifest.disk_usage for item in items))
            if self.prefetcher.started and not self._all_fit(items):
                self.prefetcher.cancel()  # so that the error reports the true free space
            items = [self._accept_prefetch(item) for item in items]
            self._make_space(items)
            for item in items:
                if self.request.keep:
                    self._stage_cached(item)
                else:
                    self._stage_item(item, self.data / item.name, fresh=True)
        except OSError as error:
            raise self._explain(error) from None
        return self.result

    def _accept_prefetch(self, item: ScannedItem) -> ScannedItem:
        manifest = self.prefetcher.accept(item.name, item.manifest)
        if manifest is None:
            return item
        self._prefetched.add(item.name)
        return replace(item, manifest=manifest)

    def _all_fit(self, items: Sequence[ScannedItem]) -> bool:
        # read before the free space: it must not be overestimated
        prefetched = self.prefetcher.done
        return sum(item.manifest.disk_usage for item in items) <= prefetched + free_space(
            self.private
        )

    def _stage_cached(self, item: ScannedItem) -> None:
        cached, manifest = cached_item(self.private, item.manifest.key), item.manifest

        def fill(folder: Path, resumes: bool) -> None:
            self._stage_item(item, _path_in(folder, manifest), fresh=not resumes)
            cached.finish(keep=self.request.keep, source=manifest.source, size=manifest.size)

        def acquire() -> tuple[Lock, bool]:
            return acquire_item(cached, stage=fill, is_stopped=lambda: self.transfer.is_stopped)

        lock, is_reused = acquire()
        if is_reused and self.request.checksum:
            try:
                self._verify(item, _path_in(cached.content, manifest))
            except CopyDiffers:
                lock.close()
                if not cached.remove():  # another job uses it
                    raise
                self.result.notes.append(
                    f"the cached copy of {manifest.source!r} was damaged, and is replaced"
                )
                lock, is_reused = acquire()
        self.locks.append(lock)
        if is_reused:
            self.result.reused += manifest.size
            self.transfer.add(manifest.size)
        link = self.data / item.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(_path_in(cached.content, manifest))

    def _verify(
        self, item: ScannedItem, target: Path, checksums: dict[str, int] | None = None
    ) -> None:
        """Compare copies with their sources; `checksums` are those that this job has computed
        while it read them.
        """
        transfer = Transfer(self.transfer)  # an error here need not be the end
        copy = ItemCopy(item.manifest, target, transfer=transfer, fresh=False)
        transfer.run(copy.verify_tasks({**item.checksums, **(checksums or {})}))

    def _stage_item(self, item: ScannedItem, target: Path, *, fresh: bool) -> None:
        """Copy an item. If its pack turns out to be damaged, remove the pack and copy the
        source.
        """
        try:
            self._copy_item(item, target, fresh=fresh)
        except CopyDiffers:
            if not item.manifest.needs_pack or not remove_tree(target):
                raise
            self.packs.remove(item.manifest.key)
            self._prefetched.discard(item.name)
            self.result.notes.append(
                f"the pack of {item.manifest.source!r} was damaged, and is replaced"
            )
            self._copy_item(item, target, fresh=True)
        self.result.files += len(item.manifest.files)
        self.result.size += item.manifest.size

    def _copy_item(self, item: ScannedItem, target: Path, *, fresh: bool) -> None:
        manifest, is_prefetched = item.manifest, item.name in self._prefetched
        pack, new_pack = None, None
        if manifest.needs_pack and not is_prefetched:
            pack = self.packs.open(manifest.key)
            if pack is None and self.makes_packs:
                new_pack = self._create_pack(manifest)
        try:
            copy = ItemCopy(
                manifest,
                target,
                transfer=self.transfer,
                fresh=fresh,
                pack=new_pack.descriptor if new_pack else pack,
                pack_is_new=new_pack is not None,
                checksum=self.request.checksum,
            )
            with closing(copy):
                if not is_prefetched:
                    copy.make_folders_and_links()
                self.transfer.run(copy.large_tasks() if is_prefetched else copy.tasks())
            if new_pack is not None and not copy.pack_problem:
                self.packs.publish(manifest, copy.checksums, new_pack)
            elif new_pack is not None:
                self._note_not_packed(copy.pack_problem)
            elif pack is not None or is_prefetched:
                self.packs.set_last(manifest)
            if self.request.checksum:
                self._verify(item, target, copy.checksums)
        finally:
            if pack is not None:
                os.close(pack)
            if new_pack is not None:
                new_pack.close()

    def _create_pack(self, manifest: Manifest) -> NewPack | None:
        try:
            return self.packs.create(manifest.key)
        except OSError as error:
            self._note_not_packed(error.strerror or str(error))
            return None

    def _note_not_packed(self, why: str) -> None:
        self.result.notes.append(f"small files are not packed: {self.request.packs}: {why}")

    def _make_space(self, items: Sequence[ScannedItem]) -> None:
        """Remove unused data from the cache, least recently used first, until everything fits."""
        missing = self._missing(items)
        needed = sum(manifest.disk_usage for manifest in missing)
        files = sum(len(manifest.files) for manifest in missing)
        keys = {item.manifest.key for item in items}
        for cached in sorted(cached_items(self.private), key=lambda cached: cached.last_use()):
            if free_space(self.private) >= needed:
                break
            if cached.folder.name not in keys:
                cached.remove()
        check_free_space(self.private, needed, files, host=self.host)

    def _missing(self, items: Sequence[ScannedItem]) -> list[Manifest]:
        """Return what is not on the node yet."""
        missing = []
        for item in items:
            manifest = item.manifest
            if item.name in self._prefetched:
                manifest = replace(manifest, folders=[], files=manifest.large(), links=[])
            elif self.request.keep:
                cached = cached_item(self.private, manifest.key)
                if cached.is_complete():
                    continue
                folder = _path_in(
                    cached.partial if cached.partial.exists() else cached.content, manifest
                )
                files = [
                    file for file in manifest.files if not os.path.exists(join(folder, file.path))
                ]
                manifest = replace(manifest, files=files)
            missing.append(manifest)
        return missing

    def _explain(self, error: OSError) -> PacelineError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return EnvironmentProblem(
                f"Node {self.host}: the disk of {self.data} is full.",
                hint="Other programs write there too: try again, or set folder in [data] to a "
                "larger disk.",
            )
        return EnvironmentProblem(
            f"Node {self.host}: cannot stage {error.filename!r}: {error.strerror}.",
            hint="Check that the path exists on the node, and that you may read it.",
        )


def _path_in(folder: Path, manifest: Manifest) -> Path:
    """Return the path of an item in its own folder of the cache."""
    return folder / (os.path.basename(manifest.source) or "data")


class StagingThread:
    """Stages in a thread, so that the agent can keep listening. Scans first unless the items are
    given.
    """

    def __init__(self, stager: Stager, items: Sequence[ScannedItem] | None = None) -> None:
        self.stager, self.items = stager, items
        self.scanned = threading.Event()
        self.error: PacelineError | None = None
        self.stopped = False
        self.is_done = False
        self._thread = threading.Thread(target=self._run, name="staging")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for it."""
        self.stager.transfer.stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            if self.items is None:
                self.stager.start_prefetch()
                self.items = scan_items(
                    self.stager.request, self.stager.packs, self.stager.transfer
                )
            self.scanned.set()
            self.stager.stage(self.items)
        except Stopped:
            self.stopped = True
        except PacelineError as error:
            self.error = error
        except Exception as error:  # nobody would see it in a thread
            self.error = EnvironmentProblem(f"Staging failed: {type(error).__name__}: {error}.")
        finally:
            try:
                self.stager.prefetcher.cancel()
            finally:
                self.is_done = True
