"""Check the disk that a run will write to, and the nodes should see.

Only the file system itself knows about permissions and quotas, so the check writes there.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from paceline.spec.findings import GOOD, PROBLEM, WARNING, Finding

LITTLE_SPACE, NO_SPACE = 2 * 2**30, 64 * 2**20
TEST_WRITE = 2**20  # bytes
MOUNTS = Path("/proc/mounts")
ELSEWHERE = "choose another folder with [project] scratch or PACELINE_SCRATCH."


def nearest_existing(path: Path) -> Path:
    """Return a path, or the nearest folder above it that this user can see."""
    return next(each for each in (path, *path.parents) if os.path.exists(each))


def file_system(path: Path, mounts: Path = MOUNTS) -> str:
    """Return the type of the file system that a path is on; empty if unknown."""
    best = kind_there = ""
    text = mounts.read_text(encoding="utf-8", errors="replace") if mounts.exists() else ""
    real = f"{path.resolve()}/"
    for line in text.splitlines():
        _, point, kind = (word.replace("\\040", " ") for word in line.split()[:3])
        if real.startswith(point.rstrip("/") + "/") and len(point) >= len(best):
            best, kind_there = point, kind
    return kind_there


def check_disk(folder: Path) -> Finding:
    """Check with a test write that a folder, or the one that it will be created in, takes files."""
    existing = nearest_existing(folder)
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(os.urandom(TEST_WRITE))
            file.flush()
            os.fsync(file.fileno())  # a quota may be noticed only now
    except OSError as error:
        text = f"You cannot write to the scratch folder {folder}: {error.strerror}."
        return Finding("disk", PROBLEM, text, f"Make room there, or {ELSEWHERE}")
    free = shutil.disk_usage(existing).free
    text = f"{free / 2**30:.1f} GB free"
    if free >= LITTLE_SPACE:
        return Finding("disk", GOOD, text)
    level = PROBLEM if free < NO_SPACE else WARNING
    text = f"The scratch folder {folder} has little space left: {text}."
    return Finding("disk", level, text, f"Remove old runs (paceline clean), or {ELSEWHERE}")
