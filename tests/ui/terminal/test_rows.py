"""The table of `paceline top`: order, sweeps, filter, columns."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.sweep.report import SweepOverview
from paceline.ui.terminal.panes import sweep_facts
from paceline.ui.terminal.rows import (
    LOSS_WIDTH,
    arrange,
    cells,
    fit,
    liveliness,
    row_line,
    summary,
    title_line,
)
from paceline.ui.text import plain
from paceline.watch.overview import Overview

RUN = Overview(
    run_id="20260101-120000-1a2b",
    name="resnet",
    project="vision",
    experiment="default",
    sweep="",
    trial=None,
    program="train.py",
    path="/scratch/vision/default/20260101-120000-1a2b",
    status="running",
    is_over=False,
    job="4711",
    nodes=2,
    nproc=8,
    attempts=1,
    created=1000.0,
    updated=2000.0,
    step=250,
    total_steps=1000,
    seconds_left=300.0,
    loss=0.12345,
    loss_name="loss",
    rate=1234.0,
    rate_unit="samples/s",
    goodput=0.9,
    starts=None,
    detail="node1",
    hint="",
)


def run(
    name: str, status: str = "running", *, created: float = 1000.0, trial: int | None = None
) -> Overview:
    over = status not in ("running", "queued")
    sweep = "lr" if trial is not None else ""
    path = f"/scratch/p/e/lr/trials/{trial}" if sweep else f"/scratch/p/e/{name}"
    return replace(
        RUN,
        name=name,
        run_id=name,
        path=path,
        status=status,
        is_over=over,
        created=created,
        sweep=sweep,
        trial=trial,
    )


def test_live_runs_come_first_and_new_ones_before_old_ones() -> None:
    runs = [
        run("over", "done", created=9),
        run("waits", "queued", created=8),
        run("old", created=1),
        run("new"),
    ]
    assert [row.name for row in arrange(runs)] == ["new", "old", "waits", "over"]
    assert summary(runs) == "2 running · 1 queued · 1 over"


SWEEP = SweepOverview(
    name="lr",
    project="p",
    experiment="e",
    path="/scratch/p/e/lr",
    is_over=False,
    metric="acc",
    direction="maximize",
    created=5000.0,
    trials=10,
    counts={"done": 2, "pending": 7, "running": 1},
    best=0.75,
    best_trial=3,
)


def test_the_trials_of_a_sweep_are_one_row_that_unfolds() -> None:
    trials = [
        run("", "done", trial=0),
        run("", "queued", trial=1),
        run("", trial=2),
        run("", "done", trial=3),
    ]
    (row,) = arrange(trials, [SWEEP])
    assert (row.name, row.counts, liveliness(row), row.is_over) == (
        "lr",
        "1 running, 7 pending, 2 done",
        0,
        False,
    )
    unfolded = arrange(trials, [SWEEP], unfolded={row.key})
    assert [each.name for each in unfolded] == ["lr", "trial 2", "trial 1", "trial 0", "trial 3"]


def test_a_sweep_counts_trials_that_have_not_started() -> None:
    queued = replace(
        SWEEP, path="/scratch/p/e/other", name="other", counts={"pending": 4}, trials=4, best=None
    )
    runs = [
        run("", "done", trial=0),
        run("", trial=2),
        run("", "done", trial=3),
        run("new", created=9000.0),
    ]
    rows = arrange(runs, [SWEEP, queued])
    assert [row.name for row in rows] == ["new", "lr", "other"]
    line = row_line(rows[1], fit(100)).plain
    assert "20% 1 running, 7 pending, 2 done  best acc 0.75" in " ".join(line.split(" ")).replace(
        "  20%", " 20%"
    )
    assert "0% 4 pending" in row_line(rows[2], fit(100)).plain
    assert [row.status for row in rows] == ["running", "running", "queued"]
    assert [row_line(row, fit(100)).plain.split()[2] for row in rows[1:]] == ["running", "queued"]
    over = replace(SWEEP, is_over=True, counts={"done": 9, "failed": 1})
    assert (arrange([], [over])[0].status, liveliness(arrange([], [over])[0])) == ("failed", 2)
    assert [row.name for row in arrange(runs, [SWEEP, queued], wanted="other")] == ["other"]
    assert "7 pending" in sweep_facts(rows[1]).plain
    assert "acc 0.75, trial 3" in sweep_facts(rows[1]).plain


@pytest.mark.parametrize(
    ("wanted", "names"), [("RUN a", ["a"]), ("queued", ["b"]), ("nothing", []), ("", ["a", "b"])]
)
def test_a_filter_wants_all_of_its_words(wanted: str, names: list[str]) -> None:
    assert [row.name for row in arrange([run("a"), run("b", "queued")], wanted=wanted)] == names


def test_columns_that_matter_less_are_left_out_of_a_narrow_terminal() -> None:
    row = arrange([RUN])[0]
    for width in (20, 40, 80, 120, 200):
        chosen = fit(width)
        assert title_line(chosen).cell_len <= max(width, 40)
        assert row_line(row, chosen).cell_len <= max(width, 40)
    assert [column.title for column in fit(80).columns] == ["STATUS", "PROGRESS", "LOSS", "LEFT"]
    assert len(fit(200).columns) == 9
    assert [column.title for column in fit(59).columns] == ["STATUS", "PROGRESS", "LOSS", "LEFT"]
    assert "WHERE" not in title_line(fit(59)).plain
    narrow = row_line(row, fit(59))
    assert narrow.cell_len == 59
    assert all(
        text in narrow.plain for text in ("resnet", "1a2b", "running", "25%", "0.1235", "5m")
    )
    line = row_line(row, fit(80)).plain
    assert all(
        text in line for text in ("resnet", "1a2b", "running", "██", "25%", "0.1235", "5m", "node1")
    )


def test_foreign_text_is_one_line_without_control_characters() -> None:
    assert (
        plain("\x1b]0;title\x07a\x1b[31mb\x1b[0m\r\nc\td\u202e\x9b2J")
        == "ab\ufffd c   d\ufffd\ufffd2J"
    )
    assert plain("[bold]x[/] \\[") == "[bold]x[/] \\["
    hostile = replace(
        RUN, name="\x1b[2J[red]x", status="\x07odd", job="\x9b1", detail="a\nb\x1b[H", rate_unit="s"
    )
    line = row_line(arrange([hostile])[0], fit(200)).plain
    assert "[red]x" in line
    assert all(each.isprintable() for each in line)


@pytest.mark.parametrize(
    ("loss", "shown"), [(7.781e-09, "7.8e-09"), (-2.311e-15, "-2.3e-15"), (0.12345, "0.1235")]
)
def test_no_digit_of_a_loss_is_cut(loss: float, shown: str) -> None:
    assert cells(replace(RUN, loss=loss))["LOSS"] == shown
    assert len(shown) <= LOSS_WIDTH
