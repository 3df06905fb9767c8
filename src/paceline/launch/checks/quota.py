"""Check the quota where a run will write. Each kind of file system has its own command."""

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

_HINT = (
    "Remove what you no longer need (paceline clean), or choose another scratch folder: "
    "[project] scratch"
)


@dataclass(frozen=True)
class Mount:
    """The file system that a path is on."""

    device: str = ""
    point: str = ""
    kind: str = ""


def mount_of(path: Path, mounts: Path = MOUNTS) -> Mount:
    """Return the file system that a path is on; all fields are empty if unknown."""
    best = Mount()
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return best
    real = str(path.resolve())
    for line in lines:
        device, point, kind = (word.replace("\\040", " ") for word in line.split()[:3])
        if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= len(
            best.point
        ):
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
    expired: bool = False  # the grace period above the soft limit is over

    @property
    def limit(self) -> int:
        return self.hard or self.soft

    @property
    def level(self) -> str:
        if (self.hard and self.used >= self.hard) or (
            self.soft and self.used > self.soft and self.expired
        ):
            return PROBLEM
        passed = self.soft and self.used > self.soft
        return WARNING if passed or (self.limit and self.used > NEARLY_FULL * self.limit) else GOOD

    def __str__(self) -> str:
        if self.unit == "files":
            amount = f"{self.used:,} of {self.limit:,} files"
        else:
            amount = f"{self.used / 2**30:,.1f} of {self.limit / 2**30:,.1f} GB"
        late = ", and the grace period is over" if self.level == PROBLEM and self.expired else ""
        return f"{amount} of the {self.whose}'s quota{late}"


def check_quota(path: Path, mount: Mount | None = None) -> list[Finding]:
    """Return quotas that are nearly used up (warnings) or used up (problems: nothing more can be
    written).
    """
    mount = mount_of(path) if mount is None else mount
    query = _QUERIES.get(mount.kind, _query_system)
    limited = [usage for usage in query(path, mount) if usage.limit]
    if not limited:
        return []
    pressing = [usage for usage in limited if usage.level != GOOD]
    if not pressing:
        return [
            Finding("quota", GOOD, str(max(limited, key=lambda usage: usage.used / usage.limit)))
        ]
    return [
        Finding("quota", usage.level, f"{usage} are used on {mount.point}.", _HINT)
        for usage in pressing
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
    """Parse `lfs quota` and `quota -p`: a name, which may be on a line of its own, then eight
    fields.
    """
    found = []
    for row in _ROW.findall(text):
        used, soft, hard, grace, files, files_soft, files_hard, files_grace = row
        found += [
            Usage(
                whose, "bytes", int(used) << 10, int(soft) << 10, int(hard) << 10, _is_over(grace)
            ),
            Usage(
                whose, "files", int(files), int(files_soft), int(files_hard), _is_over(files_grace)
            ),
        ]
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
    parts = (*path.resolve().parts, "root", "")
    for line in _output("mmlsquota", "-Y").splitlines():
        fields = line.split(":")
        if fields[2:3] == ["HEADER"]:
            names = fields
            continue
        row = dict(zip(names, fields, strict=False))
        if (
            row.get("filesystemName") != Path(mount.device).name
            or row.get("filesetname", "") not in parts
        ):
            continue  # another file system, or a fileset that the path is not in
        whose = {"USR": "user", "GRP": "group"}.get(row.get("quotaType", ""), "fileset")
        for unit, prefix, shift in (("bytes", "block", 10), ("files", "files", 0)):
            used, soft, hard = (
                row.get(f"{prefix}{name}", "") for name in ("Usage", "Quota", "Limit")
            )
            if used.isdigit() and soft.isdigit() and hard.isdigit():
                over = row.get(f"{prefix}Grace") == "expired"
                found.append(
                    Usage(
                        whose,
                        unit,
                        int(used) << shift,
                        int(soft) << shift,
                        int(hard) << shift,
                        over,
                    )
                )
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
