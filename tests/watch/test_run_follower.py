"""Following a run until it is over."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.contract.run_folder import RunFolder
from paceline.slurm.job_states import JobState
from paceline.watch.records import Record, read_record
from paceline.watch.run_log import RunLog, RunMonitor, follow
from tests.watch.test_records import make_run


@pytest.mark.parametrize("grep", ["", "e"])
def test_follow_reads_all_attempts(tmp_path: Path, grep: str) -> None:
    folder = make_run(tmp_path)
    slurm = {"state": "RUNNING"}

    def read(folder: RunFolder) -> Record:
        return read_record(folder, lambda jobs: {"7": JobState("7", slurm["state"])})

    monitor = RunMonitor(folder, read)
    first, second = folder.attempt(1), folder.attempt(2)
    first.path.mkdir()
    first.log(0).write_text("one\n")
    received = []
    for lines in follow(RunLog(folder), monitor, grep=grep):
        received += [line.text for line in lines]
        if received == ["one"]:
            with open(first.log(0), "a", encoding="utf-8") as log:
                log.write("t\u00e9n e\n")
        elif received[-1].startswith("t\u00e9n"):
            second.path.mkdir(exist_ok=True)
            second.log(0).write_text("three\nno end")
        if received[-1] == "three":
            slurm["state"] = "COMPLETED"
            folder.job_start("7-0").verdict.write_text("done\n")
    assert received == ["one", "t\u00e9n e", "three", "no end"]
    assert monitor.record.status == "done"
