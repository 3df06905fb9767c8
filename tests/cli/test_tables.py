"""`ps` and `sweep show` at several widths: ids and reasons stay whole, and in a pipe nothing is cut."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from paceline.cli import console
from paceline.cli.commands import ps, show, sweep
from paceline.contract.run_folder import RunFolder
from paceline.slurm.job_states import JobState
from paceline.watch.overview import make_overview
from paceline.watch.records import Record
from tests.sweep.folders import end, grid, make_sweep

REASON = "(ReqNodeNotAvail, UnavailableNodes:node[001-064])"
NAME = "a-long-name-for-an-experiment-with-a-large-model"
Draw = Callable[..., str]


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch) -> Draw:
    """Run a command on a terminal of some width, or in a pipe; return what it prints."""

    def run(width: int | None, command: Callable[[], object]) -> str:
        out = io.StringIO()

        def make(*, stderr: bool = False) -> Console:
            made = Console(
                file=out, width=width or console.PIPE_WIDTH, force_terminal=False, highlight=False
            )
            from rich.theme import Theme

            made.push_theme(Theme(console.THEME))
            return made

        monkeypatch.setattr(console, "console", make)
        command()
        return out.getvalue()

    return run


def joined(text: str) -> str:
    return "".join(text.split())


def make_records(folder: Path) -> list[Record]:
    found = []
    for number, (status, job) in enumerate(
        [("queued", "1234567"), ("running", "1234568"), ("done", None)]
    ):
        run = RunFolder(folder / f"20261115-225151-d7f{number}")
        state = JobState(job, "PENDING", reason=REASON) if status == "queued" and job else None
        details = {"nodes": 16, "nproc": 8, "name": NAME, "created": 1.0, "host": "login1"}
        run.attempt(1).path.mkdir(parents=True, exist_ok=True)
        run.metrics.write_text('{"step": 123456}\n')
        found.append(Record(run, details, status, job, state))
    return found


@pytest.mark.parametrize("width", [80, 100, 160, None])
def test_ps_never_cuts_ids_and_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draw: Draw, width: int | None
) -> None:
    monkeypatch.setattr(ps.runs, "scratch_here", lambda: tmp_path)
    monkeypatch.setattr(
        ps, "read_newest", lambda *_: (list(map(make_overview, make_records(tmp_path))), 0)
    )
    text = draw(width, lambda: ps.command(count=20))
    lines = text.splitlines()
    assert max(map(len, lines)) <= (width or console.PIPE_WIDTH)
    for number in range(3):
        assert any(line.startswith(f"20261115-225151-d7f{number} ") for line in lines)
    head = lines[0].split()
    assert ("STEP" in head, "ATTEMPT" in head) == (True, width not in (80, 100))
    assert (head[:2], head[-1]) == (["RUN", "STATUS"], "WHY")
    assert ("JOB" in head) == (width != 80)  # a job has a place in the list after its progress
    reason = "".join(
        line[lines[0].index("WHERE") :].strip() for line in lines[1:6] if "run" not in line
    )
    assert joined(reason).startswith(joined(REASON))  # wrapped, but whole
    assert (NAME in text) == (width is None)  # only names are shortened
    left_out = {80: "JOB, RANKS, ATTEMPT, AGE", 100: "RANKS, ATTEMPT"}.get(width or 0)
    if left_out is None:
        assert "hidden columns" not in text
    else:
        assert lines[-1] == f"hidden columns: {left_out} (show all: paceline ps | less -S)"


def test_ps_of_a_laptop_has_steps_ages_and_whole_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draw: Draw
) -> None:
    found = []
    for number, status in enumerate(("running", "failed")):
        details = {
            "nodes": 1,
            "nproc": 2,
            "program": "pkg.sub.train",
            "created": time.time() - 3599,
            "host": "vm",
        }
        run = RunFolder(tmp_path / f"20261115-225151-d7f{number}")
        run.attempt(1).path.mkdir(parents=True, exist_ok=True)
        run.metrics.write_text('{"step": 1234}\n')
        found.append(Record(run, details, status, None, None))
    failure = {
        "rank": 0,
        "host": "vm",
        "type": "RuntimeError",
        "message": "the loss is not a number since step 12",
    }
    found[1].folder.attempt(1).failure.write_text(json.dumps(failure))
    monkeypatch.setattr(ps.runs, "scratch_here", lambda: tmp_path)
    monkeypatch.setattr(ps, "read_newest", lambda *_: (list(map(make_overview, found)), 0))
    lines = draw(80, lambda: ps.command(count=20)).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["RUN", "STATUS", "STEP", "AGE", "PROGRAM", "WHERE", "/", "WHY"]
    assert all(
        "1234  " in line and "  pkg.sub.train  " in line
        for line in lines
        if line.startswith("2026")
    )
    assert "rank 0 on vm:" in lines[2]


@pytest.mark.parametrize("live", [True, False])
def test_ps_says_how_many_runs_are_older(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    draw: Draw,
    capsys: pytest.CaptureFixture[str],
    live: bool,
) -> None:
    records = [
        make_overview(record) for record in make_records(tmp_path) if not live or not record.is_over
    ]
    monkeypatch.setattr(ps.runs, "scratch_here", lambda: tmp_path)
    monkeypatch.setattr(
        ps, "read_newest", lambda _, limit: (records[:limit], len(records[limit:]) if limit else 0)
    )
    text = draw(80, lambda: ps.command(count=1, live=live))
    assert "d7f0" in text
    assert "d7f1" not in text
    older = "1 older run: paceline ps --live -n 2" if live else "2 older runs: paceline ps -n 3"
    assert capsys.readouterr().err == f"paceline: {older}\n"
    draw(80, lambda: ps.command(count=len(records), live=live))
    assert capsys.readouterr().err == ""


def test_ps_paints_a_stopped_run_unlike_a_failed_one() -> None:
    assert console.THEME[ps.COLOURS["stopped"]] == "yellow"
    assert console.THEME[ps.COLOURS["failed"]] == "red"


@pytest.mark.parametrize("width", [80, 100, 160, None])
def test_sweep_show_drops_what_does_not_vary_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draw: Draw, width: int | None
) -> None:
    fixed = {f"constant.parameter.{index}": "always/the/same/value" for index in range(6)}
    varying = [
        {**fixed, "optimizer.learning_rate": 0.1 * n, "width": 2**n, "data": f"/d/{n}"}
        for n in range(3)
    ]
    folder = make_sweep(
        tmp_path / "scratch" / "project" / "default" / "long-sweep-name", grid(varying)
    )
    for number in range(3):
        end(folder, number, value=0.123456 + number)
    monkeypatch.setattr(sweep.runs, "scratch_here", lambda: tmp_path / "scratch")
    text = draw(width, lambda: sweep.show("last", count=20))
    table = text[text.index("TRIAL") :]
    assert all(len(line.rstrip()) <= (width or console.PIPE_WIDTH) for line in table.splitlines())
    assert "…" not in text
    for value in ("0.12346", "1.1235", "2.1235", "done", "0.1", "/d/2"):
        assert value in table
    assert ("constant.parameter.5" in table.splitlines()[0]) == (width is None)
    assert ("hidden columns: " in text) == (width is not None)
    if width is not None:
        assert "constant.parameter.5, TIME" in " ".join(text.split("hidden columns: ")[1].split())


@pytest.mark.parametrize("width", [80, None])
def test_show_cuts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draw: Draw, width: int | None
) -> None:
    run = RunFolder(tmp_path / "20261115-225151-d7f0")
    run.path.mkdir()
    command = ["paceline", "submit", *(f"--option-{index}=value" for index in range(12))]
    run.run_json.write_text(json.dumps({"command": command, "nodes": 2, "nproc": 8}))
    monkeypatch.setattr(show.runs, "named", lambda _: run)
    text = draw(width, lambda: show.command("last", diff=False))
    typed = " ".join(command)
    assert typed in text  # it can be copied
    assert str(run.path) in text
    others = text.replace(str(run.path), "").replace(typed, "").splitlines()
    assert max(map(len, others)) <= (width or console.PIPE_WIDTH)
