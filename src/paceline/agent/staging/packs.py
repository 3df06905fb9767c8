"""Packs: the small files of an item in one file on scratch, made once and read by every later job.

`.staged/<key>.json` is the manifest (with the sums of the packed files, if whoever packed them was asked to verify),
`.staged/<key>.pack` their contents one after the other. Both are renamed into place: a pack that is there is whole.
`.staged/<source>.last` says which one was used last for a source.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.agent.staging.manifest import Manifest
from paceline.contract.run_folder import write_atomically
from paceline.errors import EnvironmentProblem

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
            manifest, sums, _ = self._read(key)
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise EnvironmentProblem(
                f"[data] stage: cannot read {self.manifest(key)}: {problem}",
                hint="the scratch folder must be on a path that all nodes see",
            ) from None
        if manifest.key != key:
            raise EnvironmentProblem(
                f"[data] stage: {self.manifest(key)} is not what its name says", hint="remove it"
            )
        return manifest, sums

    def read_last(self, source: str) -> Manifest | None:
        """What the pack holds that was used last for a source; None where there is none that we have written."""
        key, is_ours = _read_text(self._last(source))
        if not is_ours or not re.fullmatch("[0-9a-f]{32}", key):
            return None
        manifest, _, is_ours = self._read(key)
        return manifest if is_ours else None

    def _read(self, key: str) -> tuple[Manifest, dict[str, int], bool]:
        text, is_ours = _read_text(self.manifest(key))
        value = json.loads(text)
        manifest = Manifest.of(value["manifest"])
        if is_ours:
            vars(manifest)["key"] = key  # need not be made again: nobody else has written it
        return manifest, value["sums"], is_ours

    def remember(self, manifest: Manifest) -> None:
        """This pack was used: it is the first to be tried next time."""
        with suppress(OSError, ValueError):
            if _read_text(self._last(manifest.source)) == (manifest.key, True):
                return
        with suppress(OSError):
            write_atomically(self._last(manifest.source), manifest.key, mode=0o600)

    def forget(self, source: str) -> None:
        """The pack that was used last is not what the source holds."""
        with suppress(OSError):
            self._last(source).unlink()

    def open(self, key: str) -> int | None:
        """A descriptor of a whole pack, or None where there is none."""
        if not self.is_packed(key):
            return None
        with suppress(OSError):
            os.utime(self.manifest(key))  # used again: it stays
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


def _read_text(path: Path) -> tuple[str, bool]:
    """A file's text, and whether it is a file of ours: what others have written may name any path."""
    # Not blocking: what stands there may be a pipe that nobody writes to.
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(number, encoding="ascii") as file:
        about = os.fstat(number)
        if not stat.S_ISREG(about.st_mode):
            raise ValueError("it is no file")
        return file.read(), about.st_uid == os.geteuid()


@dataclass(frozen=True)
class NewPack:
    """A pack in the making."""

    path: Path
    number: int

    def close(self) -> None:
        os.close(self.number)
        self.path.unlink(missing_ok=True)  # after `publish` it is no longer there
