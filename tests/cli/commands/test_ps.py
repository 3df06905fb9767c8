"""`paceline ps`: which runs it lists, sweeps as rows, and JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import cli
from paceline.cli.commands import ps as ps_columns
from paceline.cli.console import fit
from paceline.contract.run_folder import RunFolder
from paceline.errors import UsageError
from paceline.sweep.report import SweepOverview
from paceline.watch.overview import Overview, make_overview
from paceline.watch.records import Record
from tests.sweep.folders import begin, end, grid, make_sweep


def make_run(scratch: Path, number: int, *, verdict: str = "done", project: str = "p") -> RunFolder:
    folder = RunFolder(scratch / project / "e" / f"20260101-{number:06d}-aaaa")
    folder.job_start("pid-1-abc").path.mkdir(parents=True)
    folder.claims.mkdir()
    (folder.claims / "1").symlink_to("pid-1-abc")
    folder.run_json.write_text(
        json.dumps({"name": f"run-{number}", "project": project, "created": time.time() - 90})
    )
    folder.job_start("pid-1-abc").verdict.write_text(verdict)
    return folder


@pytest.fixture
def runs(scratch: Path, tmp_path: Path) -> Iterator[Path]:
    make_run(scratch, 1)
    make_run(scratch, 2, verdict="failed")
    make_run(scratch, 3, project="other")
    sweep = make_sweep(scratch / "p" / "e" / "digits", grid({"lr": 0.1 * n} for n in range(4)))
    for number in range(3):
        end(sweep, number, value=3.0 - number, point={"lr": 0.1})
    begin(sweep, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_SCRATCH", str(scratch))
        patch.chdir(tmp_path)
        yield scratch


def listed(capsys: pytest.CaptureFixture[str], *flags: str) -> list[str]:
    assert cli.dispatch(["ps", *flags]) == 0
    return [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]


def test_a_sweep_is_one_row_with_its_counts_and_its_best_trial(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.dispatch(["ps"]) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("digits "))
    assert " 4/4 " in row
    assert " 4 trials " in row
    assert row.endswith("3 done, 1 missing; best loss 1 (digits-2)")


def test_flags_choose_the_rows(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two, three = (f"20260101-00000{number}-aaaa" for number in (1, 2, 3))
    assert listed(capsys) == ["digits", three, two, one]  # the sweep was made now
    assert listed(capsys, "--all") == ["digits", three, two, one]
    assert listed(capsys, "-n", "2") == ["digits", three]
    assert listed(capsys, "--project", "other") == [three]
    assert listed(capsys, "--state", "failed") == [two]
    assert listed(capsys, "--state", "failed", "--state", "missing") == ["digits", two]
    assert listed(capsys, "--state", "done", "--project", "p", "-n", "1") == ["digits"]
    assert listed(capsys, "--live") == []
    with pytest.raises(UsageError, match="Unknown --state 'over'"):
        cli.dispatch(["ps", "--state", "over"])


def test_json_has_every_field_of_every_row(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.dispatch(["ps", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["format"], answer["scratch"]) == (1, str(runs))
    assert [row["name"] for row in answer["runs"]] == ["run-3", "run-2", "run-1"]
    assert all(row.keys() == Overview.__dataclass_fields__.keys() for row in answer["runs"])
    (sweep,) = answer["sweeps"]
    assert sweep.keys() == {*SweepOverview.__dataclass_fields__, "status"}
    assert sweep["status"] == "missing"
    assert (sweep["counts"], sweep["best"], sweep["best_trial"]) == (
        {"done": 3, "missing": 1},
        1.0,
        2,
    )


def test_json_without_runs_is_an_empty_list(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("PACELINE_SCRATCH", str(scratch))
        assert cli.dispatch(["ps", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["runs"], answer["sweeps"]) == ([], [])


def made_run(path: Path) -> RunFolder:
    """A run in its first attempt, at step 10."""
    folder = RunFolder(path)
    folder.attempt(1).path.mkdir(parents=True, exist_ok=True)
    folder.metrics.write_text('{"step": 10}\n')
    return folder


def cells(tmp_path: Path, **changes: Any) -> dict[str, str]:
    record = Record(made_run(tmp_path), {"name": "n"}, "running", None, None)
    row = Overview(**{**make_overview(record).to_json(), **changes})
    return {column.title: column.cells[0] for column in ps_columns.make_columns([row])}


def test_progress_and_rate_of_a_run(tmp_path: Path) -> None:
    shown = cells(
        tmp_path,
        total_steps=500,
        seconds_left=7260.0,
        loss=0.123456,
        rate=12345.0,
        rate_unit="tokens/s",
        goodput=0.934,
    )
    assert (shown["STEP"], shown["LEFT"], shown["LOSS"]) == ("10/500", "2h 1m", "0.1235")
    assert (shown["RATE"], shown["GOODPUT"]) == ("12.35k tokens/s", "93%")
    over = cells(tmp_path, total_steps=500, is_over=True, rate=2.0, status="done")
    assert (over["STEP"], over["LEFT"], over["RATE"]) == ("10/500", "", "")


@pytest.mark.parametrize(
    ("width", "titles"),
    [
        (80, ["RUN", "STATUS", "STEP", "LEFT", "LOSS", "WHERE / WHY"]),
        (60, ["RUN", "STATUS", "STEP", "WHERE / WHY"]),
    ],
)
def test_a_narrow_terminal_shows_progress_rather_than_jobs(
    tmp_path: Path, width: int, titles: list[str]
) -> None:
    record = Record(made_run(tmp_path), {"name": "resnet50"}, "running", None, None)
    made = make_overview(record).to_json() | {
        "total_steps": 5000,
        "seconds_left": 7260.0,
        "loss": 0.123456,
        "job": "123456",
        "detail": "node[01-16] and 8 more",
        "goodput": 0.9,
        "rate": 12345.0,
        "rate_unit": "tokens/s",
    }
    rows = [Overview(**made | {"run_id": f"202601{day}-120000-aa{day}"}) for day in ("01", "02")]
    shown, dropped = fit(ps_columns.make_columns(rows), width)
    assert [column.title for column in shown] == titles
    assert "JOB" in [column.title for column in dropped]


def test_an_unknown_state_is_an_error_that_names_the_states(runs: Path) -> None:
    with pytest.raises(UsageError, match="Unknown --state 'faild'") as error:
        cli.dispatch(["ps", "--state", "faild"])
    assert error.value.hint.startswith("The states are: 'cancelled', 'done', 'done, not saved', ")
    assert "queued" in error.value.hint
    # there is no such run, but there may be
    assert cli.dispatch(["ps", "--state", "out of memory"]) == 0
