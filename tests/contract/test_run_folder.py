"""Files that are written even if the disk is full, and who has the run folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.contract.claims import find_successor
from paceline.contract.run_folder import (
    RESERVED_BYTES,
    RunFolder,
    reserve,
    write_atomically,
    write_reserved,
)
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


@pytest.mark.parametrize(
    ("claims", "successor"),
    [([], ""), (["7-0"], ""), (["7-0", "7-1"], "7-1"), (["6-0", "7-0"], ""), (["6-0", "6-1"], "")],
)
def test_who_has_taken_over(tmp_path: Path, claims: list[str], successor: str) -> None:
    run = RunFolder(tmp_path)
    for number, job_start in enumerate(claims, 1):
        run.claims.mkdir(exist_ok=True)
        (run.claims / str(number)).symlink_to(job_start)
    assert find_successor(run, "7-0") == successor


def test_a_link_at_the_temporary_name_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("weights")
    (tmp_path / f".cancelled.{os.getpid()}.partial").symlink_to(precious)
    write_atomically(tmp_path / "cancelled", "1\n")
    assert precious.read_text() == "weights"
    assert not (tmp_path / "cancelled").is_symlink()
    monkeypatch.setattr(os, "urandom", lambda size: b"guessed!")
    (tmp_path / f".cancelled.{b'guessed!'.hex()}.partial").symlink_to(precious)
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "cancelled", "2\n")
    assert precious.read_text() == "weights"
