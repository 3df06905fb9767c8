"""Files that are written even if the disk is full."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.contract.run_folder import RESERVED_BYTES, reserve, write_atomically, write_reserved


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "paceline-test", str(tmp_path)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a file system here: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def fill(path: Path) -> None:
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_a_verdict_is_written_on_a_full_disk(small_disk: Path) -> None:
    verdict = small_disk / "verdict"
    reserve(verdict)
    fill(small_disk / "ballast")
    with pytest.raises(OSError, match="No space"):
        write_atomically(verdict, "done\n")
    write_reserved(verdict, "done\n")
    assert verdict.read_text() == "done\n"
    assert sorted(path.name for path in small_disk.iterdir()) == ["ballast", "verdict"]


def test_reserved_space_is_given_back(tmp_path: Path) -> None:
    verdict = tmp_path / "verdict"
    reserve(verdict)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == RESERVED_BYTES
    write_reserved(verdict, "stopped\n")
    assert [path.name for path in tmp_path.iterdir()] == ["verdict"]
    assert verdict.read_text() == "stopped\n"
