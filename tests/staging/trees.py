"""Folders to stage, and whether a copy equals its source."""

from __future__ import annotations

import os
import random
from pathlib import Path

from paceline.staging.cleanup import make_private_folder
from paceline.staging.copy import Transfer
from paceline.staging.manifest import SMALL
from paceline.staging.request import StagingRequest, make_request
from paceline.staging.stager import ScannedItem, Stager, scan_items

ODD = "a name with spaces\nand a newline"


def make_tree(root: Path, *, small: int = 100, large: int = 1) -> Path:
    """Small files in several folders, large ones, an empty folder, odd names."""
    chance = random.Random(7)
    root.mkdir(parents=True)
    for number in range(small):
        folder = root / f"class {number % 5}"
        folder.mkdir(exist_ok=True)
        (folder / f"{number:04d}.bin").write_bytes(chance.randbytes(chance.randrange(3000)))
    for number in range(large):
        (root / f"large-{number}").write_bytes(chance.randbytes(SMALL + 4097 * (number + 1)))
    (root / "empty").mkdir()
    (root / ODD).write_bytes(b"odd")
    (root / "script.sh").write_text("#!/bin/sh\n")
    (root / "script.sh").chmod(0o755)
    return root


def content(root: Path) -> dict[str, object]:
    """Return all that a folder holds: bytes, time and mode of files, and targets of links."""
    found: dict[str, object] = {}
    for folder, folders, files in os.walk(root):
        for name in [*folders, *files]:
            path = Path(folder, name)
            key = str(path.relative_to(root))
            if path.is_symlink():
                found[key] = os.readlink(path)
            elif path.is_dir():
                found[key] = None
            else:
                about = path.stat()
                found[key] = (path.read_bytes(), about.st_mtime_ns, about.st_mode)
    return found


def request(base: Path, *stage: str, **more: object) -> StagingRequest:
    return make_request({"stage": list(stage), **more}, base=base, environ={"HOME": "/home/ann"})


class Node:
    """A node's own disk, and one run after the other on it."""

    def __init__(self, path: Path) -> None:
        path.mkdir(exist_ok=True)
        self.private = make_private_folder(path)
        self.runs = 0

    def stager(self, wanted: StagingRequest) -> Stager:
        self.runs += 1
        data = self.private / f"run-{self.runs}" / "data"
        data.mkdir(parents=True)
        return Stager(wanted, private=self.private, data=data, host="here", transfer=Transfer())

    def stage(
        self, wanted: StagingRequest, items: list[ScannedItem] | None = None
    ) -> tuple[Path, Stager]:
        stager = self.stager(wanted)
        stager.stage(items)
        return stager.data, stager

    def follow(self, wanted: StagingRequest) -> tuple[Path, Stager]:
        """Stage as a node does that is not the head: the items are scanned already."""
        return self.stage(wanted, scan_items(wanted))
