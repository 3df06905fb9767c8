"""Who has the run folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.contract.claims import find_successor
from paceline.contract.run_folder import RunFolder


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
