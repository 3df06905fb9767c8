"""Packs: the small files of an item in one file on scratch, written once and read by every later
job.

`.staged/<key>.json` is the manifest (with checksums of the packed files, if the job that packed
them verifies),
`.staged/<key>.pack` holds the contents one after the other. Both are renamed into place, so an
existing pack is complete. `.staged/<source>.last` names the pack that was last used for a source.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.contract.files.shared_folders import open_own_file, open_without_waiting
from paceline.contract.run_folder import write_atomically
from paceline.errors import EnvironmentProblem
from paceline.staging.copy.transfer import ItemCopy, Transfer
from paceline.staging.manifest import Manifest

UNUSED = 30 * 86400.0  # seconds after which an unused pack is removed
ABANDONED = 2 * 86400.0  # the same for an unfinished one


@dataclass(frozen=True)
class Packs:
    """The packs of a project."""

    folder: Path

    def manifest_path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def pack_path(self, key: str) -> Path:
        return self.folder / f"{key}.pack"

    def has(self, key: str) -> bool:
        """Return whether there is a pack of ours. Nobody else's is used: a pack's name does not
        cover its content.
        """
        return _is_ours(self.manifest_path(key)) and _is_ours(self.pack_path(key))

    def read(self, key: str) -> tuple[Manifest, dict[str, int]]:
        """Return the manifest and checksums that the head agent wrote: other nodes need not scan
        the files.
        """
        path = self.manifest_path(key)
        try:
            manifest, checksums, _ = self._read(key)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise EnvironmentProblem(
                f"[data] stage: Cannot read {path}: {error}.",
                hint="The scratch folder must be on a path that all nodes share.",
            ) from None
        if manifest.key != key:
            raise EnvironmentProblem(
                f"[data] stage: The content of {path} does not match its name.",
                hint="Remove the file.",
            )
        return manifest, checksums

    def read_last(self, source: str) -> Manifest | None:
        """Return the manifest of the pack last used for a source; None if there is none that we
        have written.
        """
        key, is_ours = _read_text(self._last_path(source))
        if not is_ours or not re.fullmatch("[0-9a-f]{32}", key):
            return None
        manifest, _, is_ours = self._read(key)
        return manifest if is_ours else None

    def _read(self, key: str) -> tuple[Manifest, dict[str, int], bool]:
        text, is_ours = _read_text(self.manifest_path(key))
        value = json.loads(text)
        manifest = Manifest.from_values(value["manifest"])
        if is_ours:
            vars(manifest)["key"] = key  # no need to compute it: nobody else has written the file
        return manifest, value["checksums"] if is_ours else {}, is_ours

    def set_last(self, manifest: Manifest) -> None:
        """Record that this pack was used: the next job prefetches it."""
        path = self._last_path(manifest.source)
        with suppress(OSError, ValueError):
            if _read_text(path) == (manifest.key, True):
                return
        with suppress(OSError):
            write_atomically(path, manifest.key, mode=0o600)

    def clear_last(self, source: str) -> None:
        """Record that the pack last used for a source is out of date."""
        with suppress(OSError):
            self._last_path(source).unlink()

    def open(self, key: str) -> int | None:
        """Return a descriptor of a complete pack; None if there is none."""
        if not self.has(key):
            return None
        with suppress(OSError):
            os.utime(self.manifest_path(key))  # a used pack is not pruned
        with suppress(OSError):
            return open_own_file(self.pack_path(key))
        return None

    def remove(self, key: str) -> None:
        """Remove a pack that does not have the content of its source. Jobs that are reading it
        keep it open.
        """
        for path in (self.pack_path(key), self.manifest_path(key)):
            with suppress(OSError):
                path.unlink()

    def create(self, key: str) -> NewPack:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._prune()
        # A name that nobody can guess, and no file but a new one: others may write to the folder
        # too.
        path = self.folder / f".{key}.{os.urandom(8).hex()}.partial"
        return NewPack(
            path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        )

    def publish(
        self, manifest: Manifest, checksums: dict[str, int], pack: NewPack | None = None
    ) -> None:
        """Make a manifest, and its pack if there is one, visible to all nodes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if pack is not None:
            os.replace(pack.path, self.pack_path(manifest.key))
        text = f'{{"manifest": {manifest.to_json()}, "checksums": {json.dumps(checksums)}}}'
        write_atomically(self.manifest_path(manifest.key), text, mode=0o600)
        if pack is not None:
            self.set_last(manifest)

    def _last_path(self, source: str) -> Path:
        return self.folder / f"{hashlib.sha256(os.fsencode(source)).hexdigest()[:32]}.last"

    def _prune(self) -> None:
        """Remove packs that have not been used for long, and unfinished ones."""
        now = time.time()
        for entry in os.scandir(self.folder):
            path = Path(entry.path)
            with suppress(OSError):
                # Using a pack touches its manifest.
                touched = path.with_suffix(".json") if path.suffix == ".pack" else path
                age = now - (touched if touched.exists() else path).stat().st_mtime
                if age > (ABANDONED if path.suffix == ".partial" else UNUSED):
                    path.unlink()


@dataclass(frozen=True)
class NewPack:
    """A pack that is being written."""

    path: Path
    descriptor: int

    def close(self) -> None:
        os.close(self.descriptor)
        self.path.unlink(missing_ok=True)  # `publish` has renamed it


def make_packs(manifests: Iterable[Manifest], packs: Packs, transfer: Transfer) -> int:
    """Pack small files before any job needs them. Returns how many packs were made."""
    unpacked = [
        manifest for manifest in manifests if manifest.needs_pack and not packs.has(manifest.key)
    ]
    transfer.total = sum(file.size for manifest in unpacked for file in manifest.small())
    for manifest in unpacked:
        try:
            with closing(packs.create(manifest.key)) as pack:
                copy = ItemCopy(
                    manifest,
                    None,
                    transfer=transfer,
                    fresh=True,
                    pack=pack.descriptor,
                    pack_is_new=True,
                    checksum=True,
                )
                with closing(copy):
                    transfer.run(copy.small_tasks())
                if copy.pack_problem:
                    raise OSError(0, copy.pack_problem, str(pack.path))
                packs.publish(manifest, copy.checksums, pack)
        except OSError as error:
            raise EnvironmentProblem(
                f"Cannot pack {manifest.source!r}: {error.filename}: {error.strerror}.",
                hint="The scratch folder needs free space for a second copy of the small files.",
            ) from None
    return len(unpacked)


def _read_text(path: Path) -> tuple[str, bool]:
    """Return a file's text, and whether the file is ours: others' files may name any path."""
    with open(open_without_waiting(path), encoding="ascii") as file:
        return file.read(), os.fstat(file.fileno()).st_uid == os.geteuid()


def _is_ours(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
