"""Rows of runs that are over come from an index, and are read again as soon as anything has changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.contract.claims import describe_processes
from paceline.contract.run_folder import RunFolder
from paceline.slurm.job_states import JobState
from paceline.watch import index as index_file
from paceline.watch import index as rows
from paceline.watch.index import load_index, read_rows, save_index
from paceline.watch.overview import Overview
from paceline.watch.records import QueryStates, find_runs
from paceline.watch.scheduler import query_states

COUNT = 120


def read_all(scratch: Path, *, query: QueryStates = query_states) -> list[Overview]:
    """Return the rows of all runs, newest first."""
    return read_rows(find_runs(scratch), scratch, query)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder of this test's own."""
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


def make_run(
    scratch: Path, number: int, *, verdict: str = "done", job: str = "", age: float = 3600.0
) -> RunFolder:
    folder = RunFolder(scratch / "p" / "e" / f"20260101-{number:06d}-aaaa")
    name = f"{job}-0" if job else "pid-1-abc"
    folder.job_start(name).path.mkdir(parents=True)
    folder.claims.mkdir()
    (folder.claims / "1").symlink_to(name)
    folder.run_json.write_text(
        json.dumps({"name": f"run-{number}", "created": 1.7e9, "host": "here"})
    )
    if job:
        folder.job.write_text(job)
    if verdict:
        folder.job_start(name).verdict.write_text(verdict)
    settle(folder, name, age=age)
    return folder


def settle(folder: RunFolder, name: str = "pid-1-abc", *, age: float = 3600.0) -> None:
    """Let the last change of a folder be a while ago."""
    then = time.time() - age
    for path in (folder.job_start(name).path, folder.claims, folder.path):
        os.utime(path, (then, then))


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    for number in range(COUNT):
        make_run(tmp_path / "scratch", number)
    return tmp_path / "scratch"


def read_folders(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the runs whose folders are read."""
    found: list[str] = []
    real = rows.record_maker

    def read(folders: Any, query: Any) -> Any:
        found.extend(folder.path.name for folder in folders)
        return real(folders, query)

    monkeypatch.setattr(rows, "record_maker", read)
    return found


def test_runs_that_are_over_are_read_once(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = read_folders(monkeypatch)
    first = read_all(scratch)
    assert len(read) == len(first) == COUNT
    assert [row.run_id for row in first] == sorted((row.run_id for row in first), reverse=True)
    read.clear()
    assert read_all(scratch) == first
    assert read == []
    new = make_run(scratch, 500)
    assert [row.run_id for row in read_all(scratch)] == [
        new.path.name,
        *(row.run_id for row in first),
    ]
    assert read == [new.path.name]


def test_a_run_that_changes_is_read_again(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resumed, cancelled, lost = (make_run(scratch, 500 + n, verdict="failed") for n in range(3))
    assert {row.status for row in read_all(scratch)[:3]} == {"failed"}
    read = read_folders(monkeypatch)
    (resumed.claims / "2").symlink_to("pid-2-def")
    resumed.job_start("pid-2-def").path.mkdir()
    resumed.job_start("pid-2-def").process.write_text(describe_processes([os.getpid()]))
    cancelled.cancelled.touch()
    lost.job_start("pid-1-abc").verdict.unlink()
    found = {row.run_id: row.status for row in read_all(scratch)}
    assert [found[each.path.name] for each in (resumed, cancelled, lost)] == [
        "running",
        "cancelled",
        "lost",
    ]
    assert sorted(read) == sorted(each.path.name for each in (resumed, cancelled, lost))
    read.clear()
    read_all(scratch)  # the changes are new, and there may be more of them
    assert sorted(read) == sorted(each.path.name for each in (resumed, cancelled, lost))


def test_the_scheduler_is_asked_only_about_runs_that_may_go_on(scratch: Path) -> None:
    make_run(scratch, 500, job="7", verdict="")
    make_run(scratch, 501, job="8", verdict="failed")
    asked: list[list[str]] = []

    def query(jobs: Any) -> dict[str, JobState]:
        asked.append(sorted(jobs))
        return {"7": JobState("7", "RUNNING"), "8": JobState("8", "FAILED")}

    for _ in range(2):
        assert [row.status for row in read_all(scratch, query=query)[:2]] == ["failed", "running"]
    assert asked == [["7", "8"], ["7"]]


def test_a_job_that_slurm_has_just_forgotten_is_asked_for_again(scratch: Path) -> None:
    make_run(scratch, 500, job="7", verdict="")
    make_run(scratch, 501, job="8", verdict="", age=2 * 86400.0)
    asked: list[list[str]] = []

    def query(jobs: Any) -> dict[str, JobState]:
        asked.append(sorted(jobs))
        return {}

    for _ in range(2):
        assert [row.status for row in read_all(scratch, query=query)[:2]] == ["lost", "lost"]
    assert asked == [["7", "8"], ["7"]]


@pytest.mark.parametrize("damage", ["cut", "garbage", "byte", "version", "link", "empty"])
def test_an_index_that_is_damaged_is_made_again(
    scratch: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    first = read_all(scratch)
    (path,) = temporary.glob("paceline-*/index-*")
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    text = path.read_bytes()
    if damage == "link":
        path.rename(temporary / "elsewhere")
        path.symlink_to(temporary / "elsewhere")
    elif damage == "version":
        path.write_bytes(text.replace(b'"version": "', b'"version": "0.0.', 1))
    elif damage == "byte":
        path.write_bytes(text.replace(b"run-17", b"run-99", 1))
    else:
        path.write_bytes({"cut": text[:-100], "garbage": b"\0" * 1000, "empty": b""}[damage])
    read = read_folders(monkeypatch)
    assert read_all(scratch) == first
    assert len(read) == COUNT
    assert load_index(scratch)
    assert read_all(scratch) == first
    assert len(read) == COUNT


def test_without_a_place_for_the_index_everything_is_read(
    scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    assert len(read_all(scratch)) == len(read_all(scratch)) == COUNT


def test_runs_that_are_removed_leave_the_index(scratch: Path) -> None:
    read_all(scratch)
    gone = scratch / "p" / "e" / "20260101-000003-aaaa"
    gone.rename(scratch / "gone")
    assert len(read_all(scratch)) == COUNT - 1
    assert str(gone) not in load_index(scratch)


WRITER = """
import sys, tempfile
from pathlib import Path
from paceline.watch.index import read_rows
from paceline.watch.records import find_runs
tempfile.tempdir = sys.argv[2]
for _ in range(5):
    scratch = Path(sys.argv[1])
    assert len(read_rows(find_runs(scratch), scratch)) == int(sys.argv[3])
    for path in Path(sys.argv[2]).glob("paceline-*/index-*"):
        path.unlink(missing_ok=True)
"""


def test_several_processes_may_write_it(scratch: Path, temporary: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(scratch), str(temporary), str(COUNT)]
    started = [subprocess.Popen(command) for _ in range(3)]
    assert [each.wait() for each in started] == [0, 0, 0]


def test_the_fields_of_a_row_survive(scratch: Path) -> None:
    row = read_all(scratch)[0]
    entries = load_index(scratch)
    save_index(scratch, entries)
    assert load_index(scratch) == entries
    assert entries[row.path].row == row
    assert list(row.to_json()) == index_file.FIELDS
