"""Which file system a run will write to, and its quota. Each kind has its own command."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.spec.findings import GOOD, PROBLEM, WARNING, Finding

NEARLY_FULL = 0.95  # of a limit
TIMEOUT = 10.0  # seconds for a file server to respond
MOUNTS = Path("/proc/mounts")
GPFS_BIN = "/usr/lpp/mmfs/bin"  # its commands are rarely on PATH


def nearest_existing(path: Path) -> Path:
    """Return a path, or the nearest folder above it that this user can see."""
    return next(each for each in (path, *path.parents) if os.path.exists(each))


@dataclass(frozen=True)
class Mount:
    """The file system that a path is on."""

    device: str = ""
    point: str = ""
    kind: str = ""


def mount_of(path: Path, mounts: Path = MOUNTS) -> Mount:
    """Return the file system that a path is on; all fields are empty if unknown."""
    best = Mount()
    text = mounts.read_text(encoding="utf-8", errors="replace") if mounts.exists() else ""
    real = f"{path.resolve()}/"
    for line in text.splitlines():
        device, point, kind = (word.replace("\\040", " ") for word in line.split()[:3])
        if real.startswith(point.rstrip("/") + "/") and len(point) >= len(best.point):
            best = Mount(device, point, kind)
    return best


def file_system(path: Path, mounts: Path = MOUNTS) -> str:
    """Return the type of the file system that a path is on; empty if unknown."""
    return mount_of(path, mounts).kind


@dataclass(frozen=True)
class Usage:
    """One quota: whose it is, what it counts (bytes or files), and how much is used. A limit of 0
    is none.
    """

    whose: str
    unit: str
    used: int
    soft: int
    hard: int
    is_over: bool = False  # the grace period above the soft limit has ended

    @property
    def limit(self) -> int:
        return self.hard or self.soft

    @property
    def level(self) -> str:
        is_above = 0 < self.soft < self.used
        if (0 < self.hard <= self.used) or (is_above and self.is_over):
            return PROBLEM
        return WARNING if is_above or self.used > NEARLY_FULL * self.limit else GOOD

    def __str__(self) -> str:
        amount = f"{self.used:,} of {self.limit:,} files"
        if self.unit == "bytes":
            amount = f"{self.used / 2**30:,.1f} of {self.limit / 2**30:,.1f} GB"
        late = ", and the grace period is over" if self.is_over else ""
        return f"{amount} of the {self.whose}'s quota{late}"


def check_quota(path: Path, mount: Mount | None = None) -> list[Finding]:
    """Return quotas that are nearly used up (warnings) or used up (problems: nothing more can be
    written).
    """
    mount = mount_of(path) if mount is None else mount
    query = _QUERIES.get(mount.kind, _query_system)
    limited = [usage for usage in query(path, mount) if usage.limit]
    limited.sort(key=lambda usage: usage.used / usage.limit)
    pressing = [usage for usage in limited if usage.level != GOOD]
    if not pressing:
        return [Finding("quota", GOOD, str(usage)) for usage in limited[-1:]]
    hint = (
        "Remove what you no longer need (paceline clean), or choose another scratch folder: "
        "[project] scratch"
    )
    return [
        Finding("quota", usage.level, f"{usage} are used on {mount.point}.", hint)
        for usage in reversed(pressing)
    ]


def _output(*argv: str) -> str:
    """Return what a command prints, or nothing if there is no such command. Some exit with 1 on a
    full quota.
    """
    environ = {**os.environ, "LC_ALL": "C", "PATH": f"{os.environ.get('PATH', '')}:{GPFS_BIN}"}
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            errors="replace",
            stdin=subprocess.DEVNULL,
            env=environ,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


# Used (with * if above the soft limit, in [] if Lustre is not sure), soft limit, hard limit, grace:
# first blocks of 1 KiB, then files.
_COUNTS = r"\[?(\d+)\]?\*?\s+(\d+)\s+(\d+)\s+(\S+)"
_ROW = re.compile(rf"(?<!\S){_COUNTS}\s+{_COUNTS}(?!\S)")


def _rows(text: str, whose: str) -> list[Usage]:
    """Parse `lfs quota` and `quota`: a name, which may be on a line of its own, then eight
    fields.
    """
    found = []
    for row in _ROW.findall(text):
        for unit, counts, shift in (("bytes", row[:4], 10), ("files", row[4:], 0)):
            used, soft, hard = (int(count) << shift for count in counts[:3])
            found.append(Usage(whose, unit, used, soft, hard, _is_over(counts[3])))
    return found


def _is_over(grace: str) -> bool:
    """Return whether the grace period is over: given as a word, or as the second at which it
    ends.
    """
    return grace in ("none", "expired") or (grace.isdigit() and 0 < int(grace) < time.time())


def _query_lustre(path: Path, mount: Mount) -> list[Usage]:
    owners = [("user", "-u", str(os.getuid())), ("group", "-g", str(path.stat().st_gid))]
    project = re.match(r"\s*(\d+)\s", _output("lfs", "project", "-d", str(path)))
    if project and project[1] != "0":
        owners.append(("project", "-p", project[1]))
    return [
        usage
        for name, flag, number in owners
        for usage in _rows(_output("lfs", "quota", "-q", flag, number, mount.point), name)
    ]


def _query_gpfs(path: Path, mount: Mount) -> list[Usage]:
    """Parse `mmlsquota -Y`, which names its fields in a header line; blocks are counted in KiB."""
    names: list[str] = []
    found = []
    for line in _output("mmlsquota", "-Y").splitlines():
        fields = line.split(":")
        if fields[2:3] == ["HEADER"]:
            names = fields
            continue
        row = dict(zip(names, fields, strict=False))
        fileset = row.get("filesetname", "")
        is_here = row.get("filesystemName") == Path(mount.device).name
        if not is_here or fileset not in (*path.resolve().parts, "root", ""):
            continue
        whose = {"USR": "user", "GRP": "group"}.get(row.get("quotaType", ""), "fileset")
        for unit, prefix, shift in (("bytes", "block", 10), ("files", "files", 0)):
            counts = [row.get(f"{prefix}{name}", "") for name in ("Usage", "Quota", "Limit")]
            if all(map(str.isdigit, counts)):
                used, soft, hard = (int(count) << shift for count in counts)
                is_over = row.get(f"{prefix}Grace") == "expired"
                found.append(Usage(whose, unit, used, soft, hard, is_over))
    return found


def _query_system(path: Path, mount: Mount) -> list[Usage]:
    """Query ext, XFS and NFS: `-p` prints the grace as a number, so that no row lacks a field;
    `-w` keeps one line.
    """
    return [
        usage
        for whose, flag in (("user", "-u"), ("group", "-g"))
        for usage in _rows(_output("quota", flag, "-p", "-w", "-f", mount.point), whose)
    ]


_QUERIES: dict[str, Callable[[Path, Mount], Sequence[Usage]]] = {
    "lustre": _query_lustre,
    "gpfs": _query_gpfs,
}
