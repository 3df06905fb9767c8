"""Is there still room by quota where a run will write? Each kind of file system has a command of its own."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.cluster.checks.finding import GOOD, PROBLEM, WARNING, Finding

NEARLY = 0.95  # of a limit
WITHIN = 10.0  # seconds for a file server to answer
MOUNTS = Path("/proc/mounts")
OF_GPFS = "/usr/lpp/mmfs/bin"  # where its commands are; seldom on PATH

_HINT = (
    "remove what is no longer needed (paceline clean), or choose another scratch folder: [project] scratch"
)


@dataclass(frozen=True)
class Mount:
    """What a path is on."""

    device: str = ""
    point: str = ""
    kind: str = ""


def mount_of(path: Path, mounts: Path = MOUNTS) -> Mount:
    """The file system that a path is on; all empty where nobody says."""
    best = Mount()
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return best
    real = str(path.resolve())
    for line in lines:
        device, point, kind = (word.replace("\\040", " ") for word in line.split()[:3])
        if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= len(best.point):
            best = Mount(device, point, kind)
    return best


@dataclass(frozen=True)
class Usage:
    """One quota: of whom, of what (bytes or files), and how much of it is used. A limit of 0 is none."""

    whose: str
    unit: str
    used: int
    soft: int
    hard: int
    expired: bool = False  # the time for which the soft limit may be passed is over

    @property
    def limit(self) -> int:
        return self.hard or self.soft

    @property
    def level(self) -> str:
        if (self.hard and self.used >= self.hard) or (self.soft and self.used > self.soft and self.expired):
            return PROBLEM
        passed = self.soft and self.used > self.soft
        return WARNING if passed or (self.limit and self.used > NEARLY * self.limit) else GOOD

    def __str__(self) -> str:
        if self.unit == "files":
            amount = f"{self.used:,} of {self.limit:,} files"
        else:
            amount = f"{self.used / 2**30:,.1f} of {self.limit / 2**30:,.1f} GB"
        late = ", and the time above the soft limit is over" if self.level == PROBLEM and self.expired else ""
        return f"{amount} of the {self.whose}'s quota{late}"


def check_quota(path: Path, mount: Mount | None = None) -> list[Finding]:
    """What is nearly used up (a warning) or used up (nothing more can be written: a problem) where `path` is."""
    mount = mount_of(path) if mount is None else mount
    ask = _ASK.get(mount.kind, _of_the_system)
    kept = [usage for usage in ask(path, mount) if usage.limit]
    if not kept:
        return []
    pressing = [usage for usage in kept if usage.level != GOOD]
    if not pressing:
        return [Finding("quota", GOOD, str(max(kept, key=lambda usage: usage.used / usage.limit)))]
    return [Finding("quota", usage.level, f"{mount.point}: {usage} are used", _HINT) for usage in pressing]


def _answer(*argv: str) -> str:
    """What a command prints; nothing where there is no such command. Some exit with 1 when a quota is used up."""
    environ = {**os.environ, "LC_ALL": "C", "PATH": f"{os.environ.get('PATH', '')}:{OF_GPFS}"}
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            timeout=WITHIN,
            errors="replace",
            stdin=subprocess.DEVNULL,
            env=environ,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


# Used (with * where it is above the soft limit, in [] where Lustre is not sure), soft limit, hard limit, grace:
# first blocks of 1 KiB, then files.
_COUNTS = r"\[?(\d+)\]?\*?\s+(\d+)\s+(\d+)\s+(\S+)"
_ROW = re.compile(rf"(?<!\S){_COUNTS}\s+{_COUNTS}(?!\S)")


def _rows(text: str, whose: str) -> list[Usage]:
    """Rows of `lfs quota` and `quota -p`: a name, which may stand on a line of its own, then eight fields."""
    found = []
    for row in _ROW.findall(text):
        used, soft, hard, grace, files, files_soft, files_hard, files_grace = row
        found += [
            Usage(whose, "bytes", int(used) << 10, int(soft) << 10, int(hard) << 10, _is_over(grace)),
            Usage(whose, "files", int(files), int(files_soft), int(files_hard), _is_over(files_grace)),
        ]
    return found


def _is_over(grace: str) -> bool:
    """Told of somebody above the soft limit: as a word, or as the second at which it ends."""
    return grace in ("none", "expired") or (grace.isdigit() and 0 < int(grace) < time.time())


def _of_lustre(path: Path, mount: Mount) -> list[Usage]:
    whom = [("user", "-u", str(os.getuid())), ("group", "-g", str(path.stat().st_gid))]
    project = re.match(r"\s*(\d+)\s", _answer("lfs", "project", "-d", str(path)))
    if project and project[1] != "0":
        whom.append(("project", "-p", project[1]))
    return [
        usage
        for name, flag, number in whom
        for usage in _rows(_answer("lfs", "quota", "-q", flag, number, mount.point), name)
    ]


def _of_gpfs(path: Path, mount: Mount) -> list[Usage]:
    """`-Y` names its fields in a line ahead; blocks are counted in KiB."""
    names: list[str] = []
    found = []
    parts = (*path.resolve().parts, "root", "")
    for line in _answer("mmlsquota", "-Y").splitlines():
        fields = line.split(":")
        if fields[2:3] == ["HEADER"]:
            names = fields
            continue
        row = dict(zip(names, fields, strict=False))
        if row.get("filesystemName") != Path(mount.device).name or row.get("filesetname", "") not in parts:
            continue  # another file system, or a part of this one that the path does not go through
        whose = {"USR": "user", "GRP": "group"}.get(row.get("quotaType", ""), "fileset")
        for unit, prefix, shift in (("bytes", "block", 10), ("files", "files", 0)):
            used, soft, hard = (row.get(f"{prefix}{name}", "") for name in ("Usage", "Quota", "Limit"))
            if used.isdigit() and soft.isdigit() and hard.isdigit():
                over = row.get(f"{prefix}Grace") == "expired"
                found.append(
                    Usage(whose, unit, int(used) << shift, int(soft) << shift, int(hard) << shift, over)
                )
    return found


def _of_the_system(path: Path, mount: Mount) -> list[Usage]:
    """ext, XFS and NFS: `-p` makes the grace a number, so that no row lacks a field; `-w` keeps it on one line."""
    return [
        usage
        for whose, flag in (("user", "-u"), ("group", "-g"))
        for usage in _rows(_answer("quota", flag, "-p", "-w", "-f", mount.point), whose)
    ]


_ASK: dict[str, Callable[[Path, Mount], Sequence[Usage]]] = {"lustre": _of_lustre, "gpfs": _of_gpfs}
