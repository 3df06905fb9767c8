"""`paceline wait`: exit codes, progress, several runs, sweeps."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline import cli
from paceline.cli import runs
from paceline.contract.claims import describe_processes
from paceline.contract.run_folder import RunFolder, write_atomically
from paceline.errors import UsageError
from paceline.watch import run_log
from tests.sweep.folders import end, grid, make_sweep
from tests.watch.test_records import make_run


@pytest.fixture(autouse=True)
def here(guard: None, scratch: Path, tmp_path: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_SCRATCH", str(scratch))
        patch.chdir(tmp_path)
        patch.setattr(run_log, "QUERY_INTERVAL", 0.05)
        yield


def make_live(scratch: Path, name: str = "20260101-000000-aaaa") -> RunFolder:
    """A local run whose process is this one."""
    run = make_run(scratch, name, job=None)
    write_atomically(run.job_start("pid-1-a").process, describe_processes([os.getpid()]))
    return run


@pytest.mark.parametrize(("verdict", "code"), [("done", 0), ("failed", 1), ("stopped", 75)])
def test_the_exit_code_is_that_of_the_run(
    verdict: str, code: int, scratch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(scratch, job=None, verdict=verdict)
    assert cli.dispatch(["wait", "aaaa"]) == code
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{run.path.name}: {verdict}")


def test_of_several_runs_the_worst_counts(scratch: Path) -> None:
    make_run(scratch, "20260101-000000-aaaa", job=None, verdict="done")
    make_run(scratch, "20260101-000001-bbbb", job=None, verdict="stopped")
    assert cli.dispatch(["wait", "aaaa", "bbbb"]) == 75
    cancelled = make_run(scratch, "20260101-000002-cccc", job=None)
    cancelled.cancelled.touch()
    assert cli.dispatch(["wait", "aaaa", "bbbb", "cccc"]) == 1
    cancelled.job_start("pid-1-a").verdict.write_text("stopped\n")  # it has saved
    assert cli.dispatch(["wait", "aaaa", "bbbb", "cccc"]) == 75


def test_failures_of_several_runs_are_told_apart(
    scratch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, message in (("20260101-000000-aaaa", "no"), ("20260101-000001-bbbb", "never")):
        run = make_run(scratch, name, job=None, verdict="failed")
        run.attempt(1).path.mkdir(exist_ok=True)
        run.attempt(1).failure.write_text(
            json.dumps({"rank": 0, "host": "n1", "type": "ValueError", "message": message})
        )
    assert cli.dispatch(["wait", "aaaa", "bbbb"]) == 1
    said = capsys.readouterr().err
    assert "paceline: 20260101-000000-aaaa: rank 0 on n1: ValueError: no\n" in said
    assert "paceline: 20260101-000001-bbbb: rank 0 on n1: ValueError: never\n" in said
    assert cli.dispatch(["wait", "aaaa"]) == 1
    assert "paceline: rank 0 on n1: ValueError: no\n" in capsys.readouterr().err


def test_it_waits_for_the_end_and_prints_each_change_once(
    scratch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_live(scratch)
    end_it = threading.Timer(1.5, lambda: run.job_start("pid-1-a").verdict.write_text("done\n"))
    end_it.start()
    assert cli.dispatch(["wait"]) == 0
    end_it.join()
    name = run.path.name
    assert capsys.readouterr().out.splitlines() == [f"{name}: running", f"{name}: done (here)"]


def test_a_timeout_names_what_is_left(scratch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_live(scratch)
    make_run(scratch, "20260101-000001-bbbb", job=None, verdict="done")
    assert (
        cli.dispatch(["wait", "--timeout", "1", "aaaa", "bbbb"]) == 124
    )  # seconds, as in timeout(1)
    said = capsys.readouterr().err
    assert f"finished after 1 s: {run.path.name} (running).\n  Only the wait timed out" in said
    assert "bbbb" not in said


def test_a_sweep_with_the_name_of_a_run(scratch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(scratch, job=None, verdict="done")
    run.run_json.write_text('{"name": "digits-large", "host": "here"}')
    sweep = make_sweep(scratch / "project" / "default" / "digits", grid([{"x": 1}, {"x": 2}]))
    for number in (0, 1):
        end(sweep, number, value=1.0)
    assert cli.dispatch(["wait", "digits"]) == 0
    assert "2 done" in capsys.readouterr().out, (
        "the whole name of the sweep, and only the start of the run's"
    )
    assert runs.run_or_sweep("digits").path == sweep.path
    assert cli.dispatch(["wait", "digits-l"]) == 0
    assert capsys.readouterr().out == f"{run.path.name}: done (here)\n"


@pytest.mark.parametrize("timeout", ["5x", "-1"])
def test_a_wrong_timeout(timeout: str, scratch: Path) -> None:
    make_live(scratch)
    with pytest.raises(UsageError, match="Invalid --timeout"):
        cli.dispatch(["wait", "--timeout", timeout])


def test_a_run_that_does_not_exist(scratch: Path) -> None:
    make_live(scratch)
    with pytest.raises(UsageError, match="There is no run 'nothing'"):
        cli.dispatch(["wait", "aaaa", "nothing"])


def test_all_trials_of_a_sweep(scratch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = make_sweep(scratch / "project" / "default" / "rates", grid([{"lr": 0.1}, {"lr": 0.2}]))
    end(sweep, 0, value=0.5)
    end(sweep, 1, value=0.4)
    assert cli.dispatch(["wait", "rates"]) == 0
    assert capsys.readouterr().out == "rates: 2 done\n"
    shutil.rmtree(sweep.trial(1).path)
    end(sweep, 1, "failed", error="ValueError: no")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.cli.commands.wait.SWEEP_REFRESH", 0.1)
        assert cli.dispatch(["wait", "rates"]) == 1
    assert "rates: 1 done, 1 failed: paceline sweep show rates" in capsys.readouterr().err


def test_a_terminal_shows_the_steps(scratch: Path, tmp_path: Path) -> None:
    run = make_live(scratch)
    run.events.mkdir()
    (run.events / "rank-0.jsonl").write_text(
        json.dumps({"time": time.time(), "event": "training", "step": 0, "steps": 200}) + "\n"
    )
    run.metrics.write_text(f'{{"step": 50, "loss": 1.5, "time": {time.time()}}}\n')
    run.run_json.write_text('{"nodes": 1, "nproc": 1, "host": "\\u001b[2Jhere"}')
    main, side = pty.openpty()
    waiting = subprocess.Popen(
        [sys.executable, "-m", "paceline", "wait", "aaaa"], stderr=side, stdout=subprocess.PIPE
    )
    os.close(side)
    seen = b""
    while b"50 of 200 steps" not in seen:
        seen += os.read(main, 4096)
    run.job_start("pid-1-a").verdict.write_text("done\n")
    while True:
        try:
            seen += os.read(main, 4096)
        except OSError:  # it has ended
            break
    os.close(main)
    assert waiting.wait() == 0
    assert waiting.stdout is not None
    waiting.stdout.close()
    assert b"done" in seen
    assert b"\x1b[2J" not in seen
