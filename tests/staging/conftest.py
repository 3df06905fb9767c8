"""A project's folder on scratch, and nodes to stage it to."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.staging.trees import Node


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """<scratch>/<project>"""
    return tmp_path / "scratch" / "project"


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "disk")


@pytest.fixture
def little_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MB."""
    mount = tmp_path / "little"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(mount)], capture_output=True
    )
    if done.returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)
