"""Stage-in on one node: look, make room, copy or reuse, verify. Runs beside the agent's loop."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.agent.staging.cache import CachedItem, Lock, cached_item, cached_items, obtain
from paceline.agent.staging.copy.small_files import at
from paceline.agent.staging.copy.transfer import ItemCopy, Stopped, Transfer
from paceline.agent.staging.folders import check_free_space
from paceline.agent.staging.manifest import Manifest, scan
from paceline.agent.staging.packs import NewPack, Packs
from paceline.agent.staging.prefetch import Prefetcher
from paceline.agent.staging.request import StagingRequest, check_exists
from paceline.errors import EnvironmentProblem, PacelineError


@dataclass(frozen=True)
class ScannedItem:
    """An item that has been looked at."""

    name: str
    manifest: Manifest
    sums: dict[str, int] = field(default_factory=dict)


@dataclass
class Staged:
    files: int = 0
    size: int = 0  # bytes that were copied
    reused: int = 0  # bytes that were there already
    notes: list[str] = field(default_factory=list)


def look(wish: StagingRequest, packs: Packs) -> list[ScannedItem]:
    """What there is to stage."""
    check_exists(wish)
    planned = []
    for item in wish.items:
        manifest = scan(item.source)
        sums = packs.read(manifest.key)[1] if wish.checksum and packs.is_packed(manifest.key) else {}
        planned.append(ScannedItem(item.name, manifest, sums))
    return planned


def notes_on(planned: Sequence[ScannedItem]) -> list[str]:
    notes = []
    for each in planned:
        if each.manifest.outside:
            notes.append(
                f"{each.manifest.outside} links in {each.name!r} lead out of it: they stay links, "
                "and what they lead to is read where it is"
            )
        if each.manifest.skipped:
            notes.append(f"{each.manifest.skipped} sockets, pipes or devices in {each.name!r} are left out")
    return notes


def make_packs(planned: Sequence[ScannedItem], packs: Packs, copying: Transfer) -> int:
    """Pack small files ahead of any job; how many items were packed."""
    lacking = [each.manifest for each in planned if each.manifest.has_many_small]
    lacking = [manifest for manifest in lacking if not packs.is_packed(manifest.key)]
    copying.total = sum(each.size for manifest in lacking for each in manifest.small())
    for manifest in lacking:
        try:
            pack = packs.begin(manifest.key)
            try:
                copy = ItemCopy(
                    manifest, None, copying=copying, fresh=True, pack=pack.number, pack_is_new=True, sums=True
                )  # fmt: skip
                with closing(copy):
                    copying.run(copy.small_tasks())
                if copy.pack_problem:
                    raise OSError(0, copy.pack_problem, str(pack.path))
                packs.publish(manifest, copy.sums, pack)
            finally:
                pack.close()
        except OSError as problem:
            raise EnvironmentProblem(
                f"cannot pack {manifest.source!r}: {problem.filename}: {problem.strerror}",
                hint="there must be room on scratch for the small files once more",
            ) from None
    return len(lacking)


class Stager:
    """Puts planned items below `data`. With `keep` they lie in the private folder, and `data` has links to them."""

    def __init__(
        self, wish: StagingRequest, *, private: Path, data: Path, host: str, makes_packs: bool
    ) -> None:
        self.wish, self.private, self.data, self.host = wish, private, data, host
        self.makes_packs = makes_packs
        self.packs = Packs(wish.packs)
        self.copying = Transfer()
        self.locks: list[Lock] = []  # held as long as the data is used
        self.staged = Staged()
        self.scouts = Prefetcher(self.packs, private=private, data=data, above=self.copying)
        self._unpacked: set[str] = set()  # items whose small files are there already

    def begin(self) -> None:
        """Copy ahead what the last packs hold, while somebody looks at what there is."""
        if not self.wish.keep:
            for item in self.wish.items:
                self.scouts.begin(item)

    def stage(self, planned: Sequence[ScannedItem]) -> Staged:
        try:
            self.copying.total = sum(each.manifest.size for each in planned)
            if self.scouts.begun and not self._has_room_for_all(planned):
                self.scouts.give_up()  # so that what is said of it is the whole truth
            planned = [self._settled(each) for each in planned]
            self._make_room(planned)
            for each in planned:
                if self.wish.keep:
                    self._stage_kept(each)
                else:
                    self._stage_one(each, self.data / each.name, fresh=True)
        except OSError as problem:
            raise self._explained(problem) from None
        return self.staged

    def _settled(self, planned: ScannedItem) -> ScannedItem:
        manifest = self.scouts.settle(planned.name, planned.manifest)
        if manifest is None:
            return planned
        self._unpacked.add(planned.name)
        return replace(planned, manifest=manifest)

    def _has_room_for_all(self, planned: Sequence[ScannedItem]) -> bool:
        there = self.scouts.done  # asked first: rather too little than too much
        about = os.statvfs(self.private)
        return sum(each.manifest.needed for each in planned) <= there + about.f_bavail * about.f_frsize

    def _stage_kept(self, planned: ScannedItem) -> None:
        item, manifest = cached_item(self.private, planned.manifest.key), planned.manifest

        def fill(folder: Path, resumes: bool) -> None:
            self._stage_one(planned, inside(folder, manifest), fresh=not resumes)
            item.finish(keep=self.wish.keep, source=manifest.source, size=manifest.size)

        lock, reused = obtain(item, stage=fill, stopped=lambda: self.copying.is_over)
        self.locks.append(lock)
        if reused:
            self.staged.reused += manifest.size
            self.copying.count(manifest.size)
        link = self.data / planned.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(inside(item.content, manifest))

    def _stage_one(self, planned: ScannedItem, target: Path, *, fresh: bool) -> None:
        manifest, unpacked = planned.manifest, planned.name in self._unpacked
        pack, made = None, None
        if manifest.has_many_small and not unpacked:
            pack = self.packs.open(manifest.key)
            if pack is None and self.makes_packs:
                made = self._begin_pack(manifest)
        try:
            copy = ItemCopy(
                manifest, target, copying=self.copying, fresh=fresh, pack=made.number if made else pack,
                pack_is_new=made is not None, sums=self.wish.checksum,
            )  # fmt: skip
            with closing(copy):
                if not unpacked:
                    copy.frame()
                self.copying.run(copy.large_tasks() if unpacked else copy.tasks())
            if made is not None and not copy.pack_problem:
                self.packs.publish(manifest, copy.sums, made)
            elif made is not None:
                self._note_unpacked(copy.pack_problem)
            elif pack is not None or unpacked:
                self.packs.remember(manifest)
            if self.wish.checksum:
                self.copying.run(copy.verification({**planned.sums, **copy.sums}))
        finally:
            if pack is not None:
                os.close(pack)
            if made is not None:
                made.close()
        self.staged.files += len(manifest.files)
        self.staged.size += manifest.size

    def _begin_pack(self, manifest: Manifest) -> NewPack | None:
        try:
            return self.packs.begin(manifest.key)
        except OSError as problem:
            self._note_unpacked(problem.strerror or str(problem))
            return None

    def _note_unpacked(self, why: str) -> None:
        self.staged.notes.append(f"small files are not packed: {self.wish.packs}: {why}")

    def _make_room(self, planned: Sequence[ScannedItem]) -> None:
        """Kept data that nobody uses goes, the one unused for longest first, where there is no room otherwise."""
        missing = self._missing(planned)
        needed = sum(each.needed for each in missing)
        files = sum(len(each.files) for each in missing)
        for item in sorted(cached_items(self.private), key=_last_use):
            about = os.statvfs(self.private)
            if about.f_bavail * about.f_frsize >= needed:
                break
            if item.folder.name not in {each.manifest.key for each in planned}:
                item.remove()
        check_free_space(self.private, needed, files, host=self.host)

    def _missing(self, planned: Sequence[ScannedItem]) -> list[Manifest]:
        found = []
        for each in planned:
            manifest = each.manifest
            if each.name in self._unpacked:
                manifest = Manifest(manifest.source, [], manifest.large(), [])
            elif self.wish.keep:
                item = cached_item(self.private, manifest.key)
                if item.is_whole():
                    continue
                there = inside(item.partial if item.partial.exists() else item.content, manifest)
                files = [file for file in manifest.files if not os.path.exists(at(there, file.path))]
                manifest = Manifest(manifest.source, manifest.folders, files, manifest.links)
            found.append(manifest)
        return found

    def _explained(self, problem: OSError) -> PacelineError:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            return EnvironmentProblem(
                f"node {self.host}: {self.data} is full",
                hint="others write there too: try again, or set folder in [data] to a larger disk",
            )
        return EnvironmentProblem(
            f"node {self.host}: cannot stage {problem.filename!r}: {problem.strerror}",
            hint="check that the node sees it, and that you may read it",
        )


def inside(folder: Path, manifest: Manifest) -> Path:
    """Where an item lies in a folder of its own."""
    return folder / (os.path.basename(manifest.source) or "data")


def _last_use(item: CachedItem) -> float:
    try:
        return item.lock().path.stat().st_mtime
    except OSError:
        return 0.0


class Worker:
    """Something that takes long, in a thread: the agent goes on listening meanwhile."""

    def __init__(self, stager: Stager, planned: Sequence[ScannedItem] | None = None) -> None:
        """Without `planned` it looks for itself."""
        self.stager, self.planned = stager, planned
        self.looked = threading.Event()
        self.problem: PacelineError | None = None
        self.stopped = False
        self.is_done = False
        self._thread = threading.Thread(target=self._work, name="staging")

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Have it end soon, and wait for that."""
        self.stager.copying.stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _work(self) -> None:
        try:
            if self.planned is None:
                self.stager.begin()
                self.planned = look(self.stager.wish, self.stager.packs)
            self.looked.set()
            self.stager.stage(self.planned)
        except Stopped:
            self.stopped = True
        except PacelineError as problem:
            self.problem = problem
        except Exception as problem:  # a thread has nobody to raise to
            self.problem = EnvironmentProblem(f"staging failed: {type(problem).__name__}: {problem}")
        finally:
            try:
                self.stager.scouts.give_up()
            finally:
                self.is_done = True
