"""Who has the run folder, and files that are complete or absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.contract.claims import find_successor
from paceline.contract.run_folder import RunFolder, write_atomically


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
