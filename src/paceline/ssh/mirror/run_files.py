"""Which files of a run are mirrored, and which paths are valid.

Both sides apply these rules: neither trusts the other. Code, checkpoints, environments and
everything else in a run folder are never sent this way.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.contract.files.shared_folders import open_without_waiting

# replaced as a whole; appended to; appended to, and perhaps huge
RECORD, GROWING, LOG = "record", "growing", "log"
MAX_RECORD = 4 << 20  # bytes; a larger one is left out
MAX_LOGS = 10_000  # logs of ranks and nodes of one run, and the files with their times
HEAD_BYTES, TAIL_BYTES = 256, 64  # of a file that tell whether it is still the same one

_JOB_START = "stop|verdict|unsaved|process|requeue|agent|no-scontrol|requeue-failed|notified|excluded-nodes|node-lost"
_KINDS = (
    (
        RECORD,
        r"(?:run|launch|config|fitness|trial|result|sweep)\.json|job|job\.sbatch|requeues|cancelled|pruned|grant",
    ),
    (RECORD, rf"job-starts/[\w-]{{1,100}}/(?:{_JOB_START}|head)"),
    (
        RECORD,
        r"attempt-\d{1,9}/(?:start|verdict|failure\.json|error-\d{1,9}\.json|stacks-\d{1,9}\.txt)",
    ),
    (RECORD, r"checkpoints/step-\d{1,18}/complete\.json"),
    (RECORD, r"chosen/(?:\d{1,9}(?:-study)?\.json|exhausted)"),
    (
        GROWING,
        r"(?:metrics|reports|points|jobs)\.jsonl|optuna\.journal|(?:events|system)/[\w.-]{1,100}\.jsonl",
    ),
    (GROWING, r"attempt-\d{1,9}/(?:rank|node)-\d{1,9}\.times"),
    (LOG, r"attempt-\d{1,9}/(?:rank|node)-\d{1,9}\.log|slurm\.log"),
)
_PATTERNS = tuple((kind, re.compile(pattern, re.ASCII)) for kind, pattern in _KINDS)
_FOLDERS = re.compile(r"events|system|chosen|attempt-\d{1,9}", re.ASCII)
_NESTED = ("job-starts", "checkpoints")
_RANK_LOG = re.compile(r"attempt-(\d{1,9})/(?:rank|node)-(\d{1,9})\.(?:log|times)", re.ASCII)
_CLAIM = re.compile(r"[\w-]{1,100}", re.ASCII)


def kind_of(path: str) -> str | None:
    """Return what kind of file of a run this is; None if it is not mirrored."""
    return next((kind for kind, pattern in _PATTERNS if pattern.fullmatch(path)), None)


def is_of_log(path: str) -> bool:
    """Return whether this is a log, or the times of its lines."""
    return path.endswith(".times") or kind_of(path) == LOG


def is_claim(number: int, name: str) -> bool:
    return 0 < number < 1_000_000 and _CLAIM.fullmatch(name) is not None


def list_files(folder: Path) -> dict[str, os.stat_result]:
    """Return the files of a run that are mirrored. Links and everything that is not a regular file are left out.

    If there are too many logs of ranks, those of the newest attempts and the first ranks count.
    """
    entries = {path: entry for path, entry in _all_entries(folder) if kind_of(path) is not None}
    logs = {path: match for path in entries if (match := _RANK_LOG.fullmatch(path))}
    if len(logs) > MAX_LOGS:
        for path in sorted(logs, key=lambda path: (-int(logs[path][1]), int(logs[path][2])))[
            MAX_LOGS:
        ]:
            del entries[path]
    found: dict[str, os.stat_result] = {}
    for path, entry in entries.items():
        try:
            if entry.is_file(follow_symlinks=False):
                found[path] = entry.stat(follow_symlinks=False)
        except OSError:
            pass  # it has just gone
    return found


def _all_entries(folder: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield what is in a run folder and in its folders, by path."""
    for entry in _entries(folder):
        if not entry.is_dir(follow_symlinks=False):
            yield entry.name, entry
        elif _FOLDERS.fullmatch(entry.name):
            yield from ((f"{entry.name}/{each.name}", each) for each in _entries(entry.path))
        elif entry.name in _NESTED:
            for inner in _entries(entry.path):
                if inner.is_dir(follow_symlinks=False):
                    path = f"{entry.name}/{inner.name}"
                    yield from ((f"{path}/{each.name}", each) for each in _entries(inner.path))


def _entries(folder: Path | str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError:
        return


def list_claims(folder: Path) -> dict[int, str]:
    """Return the links of `claims`: the job starts that had the run folder, by number."""
    found = {}
    for entry in _entries(folder / "claims"):
        try:
            number, name = int(entry.name), os.readlink(entry.path)
        except (OSError, ValueError):
            continue
        if is_claim(number, name):
            found[number] = name
    return found


@dataclass(frozen=True)
class Copy:
    """What the mirror has of a file, by the mirrored file itself."""

    size: int
    modified: int  # in nanoseconds
    head: int  # the checksum of its first bytes
    tail: int  # and of its last ones
    skipped: int = 0  # bytes at its beginning that were not sent

    def to_row(self) -> list[int]:
        return [self.size, self.modified, self.head, self.tail, self.skipped]

    def is_part_of(self, descriptor: int, size: int) -> bool:
        """Return whether an open file begins with what the mirror has."""
        return self.size <= size and fingerprint(descriptor, self.size, self.skipped) == (
            self.head,
            self.tail,
        )


def fingerprint(descriptor: int, size: int, skipped: int = 0) -> tuple[int, int]:
    """Return the checksums of the first and the last bytes of the first `size` bytes of a file."""
    known = max(0, size - skipped)
    last = min(TAIL_BYTES, known)
    head, tail = (
        os.pread(descriptor, min(HEAD_BYTES, known), skipped),
        os.pread(descriptor, last, size - last),
    )
    return zlib.crc32(head), zlib.crc32(tail)


def describe_copy(path: Path, skipped: int = 0) -> Copy | None:
    """Return what the mirror has of a file; None if it has nothing."""
    try:
        descriptor = open_without_waiting(path)
    except OSError:
        return None
    try:
        known = os.fstat(descriptor)
        return Copy(
            known.st_size,
            known.st_mtime_ns,
            *fingerprint(descriptor, known.st_size, skipped),
            skipped,
        )
    finally:
        os.close(descriptor)
