"""Stage items on one node: scan, make space, pack, copy or reuse."""

from __future__ import annotations

import errno
import os
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from paceline.contract.files import show_size
from paceline.errors import EnvironmentProblem, PacelineError
from paceline.staging.cache import Lock, acquire_item, cached_item, cached_items
from paceline.staging.copy import Transfer, copy_item
from paceline.staging.manifest import Manifest, scan
from paceline.staging.packs import Packs
from paceline.staging.request import StagingRequest, check_sources


@dataclass(frozen=True)
class ScannedItem:
    """An item and what it holds."""

    name: str
    manifest: Manifest

    def notes(self) -> list[str]:
        """Return a note on links whose targets are not staged."""
        if not (count := self.manifest.outside_links):
            return []
        return [
            f"{count} links in {self.name!r} point outside it: they stay links, and runs read "
            "their targets in place"
        ]


@dataclass
class StagingResult:
    """What was staged."""

    files: int = 0
    size: int = 0  # bytes copied
    reused: int = 0  # bytes found in the cache
    notes: list[str] = field(default_factory=list)

    def summary(self, seconds: float) -> str:
        parts = []
        if self.files:
            rate = f"{show_size(self.size)}, {show_size(self.size / seconds)}/s"
            parts.append(f"{self.files} files ({rate}) copied")
        if self.reused:
            parts.append(f"{show_size(self.reused)} reused")
        return ", ".join(parts) or "nothing"


def scan_items(request: StagingRequest) -> list[ScannedItem]:
    """Scan everything that is to be staged."""
    check_sources(request)
    return [ScannedItem(item.name, scan(item.source)) for item in request.items]


class Stager:
    """Copies scanned items below `data`. With `keep` they go into the cache, and `data` has links
    to them.
    """

    def __init__(
        self, request: StagingRequest, *, private: Path, data: Path, host: str, transfer: Transfer
    ) -> None:
        self.request, self.private, self.data, self.host = request, private, data, host
        self.transfer = transfer
        self.packs = Packs(request.packs)
        self.locks: list[Lock] = []  # held as long as the cached data is used
        self.items: list[ScannedItem] = []
        self.prepared = threading.Event()  # the items are known, and packed
        self.result = StagingResult()

    def stage(self, items: list[ScannedItem] | None = None) -> StagingResult:
        """Stage these items. The head agent has none yet: it scans and packs first."""
        try:
            is_head = items is None
            self.items = scan_items(self.request) if items is None else items
            self._make_space()
            if is_head:
                self.pack()
            self.prepared.set()
            self.transfer.total += sum(item.manifest.size for item in self.items)
            for item in self.items:
                if self.request.keep:
                    self._stage_cached(item)
                else:
                    self._copy(item, self.data / item.name)
        except OSError as error:
            raise self._explain(error) from None
        return self.result

    def close(self) -> None:
        """Let other jobs remove what this one has used."""
        for lock in self.locks:
            lock.close()

    def pack(self) -> None:
        """Write the packs that are missing, and a list of what is not packed, for other nodes.

        Packs are for later jobs too: if there is no space for them, this job goes on.
        """
        for item in self.items:
            manifest, packs = item.manifest, self.packs
            self.result.notes += item.notes()
            try:
                if manifest.needs_pack and not packs.has(manifest):
                    self.transfer.total += sum(file.size for file in manifest.small)
                    packs.write(manifest, self.transfer)
                else:  # a list that is there may be of another version, or damaged
                    packs.publish(manifest)
            except OSError as error:
                note = f"small files are not packed: {packs.folder}: {error.strerror}"
                self.result.notes.append(note)
                with suppress(OSError):  # for the other nodes
                    packs.publish(manifest)

    def _stage_cached(self, item: ScannedItem) -> None:
        manifest = item.manifest
        cached = cached_item(self.private, manifest.key)
        target = cached.target(manifest.source)

        def fill() -> None:
            self._copy(item, target)
            cached.finish(keep=self.request.keep, source=manifest.source)

        lock, is_reused = acquire_item(cached, fill=fill, check=self.transfer.check)
        self.locks.append(lock)
        if is_reused:
            self.result.reused += manifest.size
            self.transfer.add(manifest.size)
        link = self.data / item.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)

    def _copy(self, item: ScannedItem, target: Path) -> None:
        manifest = item.manifest
        with self.packs.open(manifest) as read:
            copy_item(manifest, target, transfer=self.transfer, read=read)
        self.result.files += len(manifest.files)
        self.result.size += manifest.size

    def _make_space(self) -> None:
        """Check that everything fits, and remove unused data from the cache if necessary, least
        recently used first.
        """
        total = sum(item.manifest.disk_usage for item in self.items)
        if self.request.limit and total > self.request.limit:
            raise EnvironmentProblem(
                f"The data needs {show_size(total)}, but this site allows "
                f"{show_size(self.request.limit)} of staged data per node.",
                hint="Stage less. The limit is stage_size in [limits] of /etc/paceline/site.toml.",
            )
        in_cache = cached_items(self.private)
        complete = {cached.path.name for cached in in_cache if cached.is_complete}
        keys = {item.manifest.key for item in self.items}
        needed = total
        if self.request.keep:
            missing = (item.manifest for item in self.items if item.manifest.key not in complete)
            needed = sum(manifest.disk_usage for manifest in missing)
        for cached in sorted(in_cache, key=lambda cached: cached.last_use()):
            is_needed = cached.path.name in keys & complete
            if _free_space(self.private) < needed and not is_needed:
                cached.remove()
        free = _free_space(self.private)
        if needed > free:
            raise EnvironmentProblem(
                f"Node {self.host}: the data needs {show_size(needed)}, but {self.private} has "
                f"{show_size(free)} free.",
                hint="Stage less, set folder in [data] to a larger disk, or free space with "
                "`paceline clean`.",
            )

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


def _free_space(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize
