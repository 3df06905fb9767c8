"""Packs: the small files of an item in one file on scratch, made once and read by every later job.

`.staged/<key>.json` is the manifest with the sums of the packed files, `.staged/<key>.pack` their contents one after
the other. Both are renamed into place: a pack that is there is whole. `.staged/<source>.last` says which one was used
last for a source.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.contract import write_atomically
from paceline.errors import EnvironmentProblem
from paceline.node.staging.manifest import Manifest

UNUSED = 30 * 86400.0  # seconds after which a pack that no job has used is removed
ABANDONED = 2 * 86400.0  # the same for one that nobody finished


@dataclass(frozen=True)
class Packs:
    folder: Path

    def manifest(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def pack(self, key: str) -> Path:
        return self.folder / f"{key}.pack"

    def is_packed(self, key: str) -> bool:
        return self.manifest(key).exists() and self.pack(key).exists()

    def read(self, key: str) -> tuple[Manifest, dict[str, int]]:
        """What the head found, for the other nodes: they need not look at every file themselves."""
        try:
            value = json.loads(self.manifest(key).read_text(encoding="ascii"))
            manifest = Manifest.of(value["manifest"])
            vars(manifest)["key"] = key  # as it was then: the file is named by it
            return manifest, value["sums"]
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise EnvironmentProblem(
                f"[data] stage: cannot read {self.manifest(key)}: {problem}",
                hint="the scratch folder must be on a path that all nodes see",
            ) from None

    def last(self, source: str) -> str:
        """The key of the pack that was used last for a source; empty where there is none."""
        try:
            key = self._last(source).read_text(encoding="ascii")
        except (OSError, ValueError):
            return ""
        return key if re.fullmatch("[0-9a-f]{32}", key) else ""

    def remember(self, manifest: Manifest) -> None:
        """Say that this pack was used."""
        with suppress(OSError):
            os.utime(self.manifest(manifest.key))  # it stays for another while
        if self.last(manifest.source) != manifest.key:
            with suppress(OSError):
                write_atomically(self._last(manifest.source), manifest.key, mode=0o600)

    def open(self, key: str) -> int | None:
        """A descriptor of a whole pack, or None where there is none."""
        if not self.is_packed(key):
            return None
        with suppress(OSError):
            return os.open(self.pack(key), os.O_RDONLY | os.O_CLOEXEC)
        return None

    def begin(self, key: str) -> NewPack:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._prune()
        path = self.folder / f".{key}.{socket.gethostname()}.{os.getpid()}.partial"
        return NewPack(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))

    def publish(self, manifest: Manifest, sums: dict[str, int], made: NewPack | None = None) -> None:
        """Make a manifest, and the pack that goes with it, known to all nodes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if made is not None:
            os.replace(made.path, self.pack(manifest.key))
        text = f'{{"manifest": {manifest.text}, "sums": {json.dumps(sums)}}}'
        write_atomically(self.manifest(manifest.key), text, mode=0o600)
        if made is not None:
            self.remember(manifest)

    def _last(self, source: str) -> Path:
        return self.folder / f"{hashlib.sha256(os.fsencode(source)).hexdigest()[:32]}.last"

    def _prune(self) -> None:
        """Remove packs that have not been used for long, and what somebody left half made."""
        now = time.time()
        for entry in os.scandir(self.folder):
            is_partial = entry.name.endswith(".partial")
            with suppress(OSError):
                used = (
                    Path(entry.path).with_suffix(".json")
                    if entry.name.endswith(".pack")
                    else Path(entry.path)
                )
                age = now - (used if used.exists() else Path(entry.path)).stat().st_mtime
                if age > (ABANDONED if is_partial else UNUSED):
                    os.unlink(entry.path)


@dataclass(frozen=True)
class NewPack:
    """A pack in the making."""

    path: Path
    number: int

    def close(self) -> None:
        os.close(self.number)
        self.path.unlink(missing_ok=True)  # after `publish` it is no longer there
