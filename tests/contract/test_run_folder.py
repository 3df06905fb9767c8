"""Files that are written even if the disk is full."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.contract.run_folder import RESERVED_BYTES, reserve, write_atomically, write_reserved
from tests.small_disk import fill, mount_small_disk


def test_a_verdict_is_written_on_a_full_disk(tmp_path: Path) -> None:
    with mount_small_disk(tmp_path / "small", "64k") as disk:
        verdict = disk / "verdict"
        reserve(verdict)
        fill(disk)
        with pytest.raises(OSError, match="No space"):
            write_atomically(verdict, "done\n")
        write_reserved(verdict, "done\n")
        assert verdict.read_text() == "done\n"
        assert sorted(path.name for path in disk.iterdir()) == ["ballast", "verdict"]


def test_reserved_space_is_given_back(tmp_path: Path) -> None:
    verdict = tmp_path / "verdict"
    reserve(verdict)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == RESERVED_BYTES
    write_reserved(verdict, "stopped\n")
    assert [path.name for path in tmp_path.iterdir()] == ["verdict"]
    assert verdict.read_text() == "stopped\n"
