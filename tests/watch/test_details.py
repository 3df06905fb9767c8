"""A run's row and its details, read from the folder of a real run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.watch.details import read_details
from paceline.watch.overview import make_overview
from paceline.watch.records import find_runs, read_record

SCRIPT = """
import paceline
with paceline.session() as run:
    for step in run.steps(range(5)):
        run.log(loss=1.0 / (step + 1))
    if FAIL:
        raise ValueError("the data is empty")
"""


def run_script(tmp_path: Path, *, fail: bool) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("FAIL", str(fail)))
    subprocess.run(
        [sys.executable, "-m", "paceline", "run", "--nproc", "1", "--cpu", "--name", "first", "train.py"],
        cwd=tmp_path, check=not fail, capture_output=True,
    )  # fmt: skip


@pytest.mark.parametrize("fail", [False, True])
def test_row_and_details_of_a_run(tmp_path: Path, fail: bool) -> None:
    run_script(tmp_path, fail=fail)
    [folder] = find_runs(tmp_path / "runs")
    record = read_record(folder)
    row = make_overview(record)
    assert (row.name, row.status, row.is_over) == ("first", "failed" if fail else "done", True)
    assert (row.nodes, row.nproc, row.job, row.step) == (1, 1, "", 5)
    assert (row.loss_name, row.loss) == ("loss", pytest.approx(0.2))
    assert row.goodput is not None
    details = read_details(record)
    assert details.overview.run_id == row.run_id
    assert details.command.endswith("train.py")
    [attempt] = details.attempts
    assert attempt.verdict == row.status
    if fail:
        assert attempt.failure is not None
        assert attempt.failure.rank == 0
        assert "the data is empty" in attempt.failure.text
        assert "Traceback" in attempt.failure.traceback
    assert sum(details.goodput.seconds.values()) == pytest.approx(details.goodput.total)
    json.dumps(details.to_json(), allow_nan=False)
