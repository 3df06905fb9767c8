"""`paceline top` on the copy of a cluster's runs."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.errors import ConnectionProblem
from paceline.sweep.report import SweepOverview
from paceline.ui.terminal.panes import sweep_facts
from paceline.ui.terminal.rows import Row
from paceline.watch.origin import NEWS, ClusterCopy, show
from tests.cluster_copies import copy_of_run
from tests.ui.terminal.screen import Screen, drive

RUN = "project/default/20260101-120000-aaaa"
SWEEP = SweepOverview(
    name="my lrs",
    project="p",
    experiment="e",
    path="/scratch/ann/p/e/my lrs",
    is_over=True,
    metric="loss",
    direction="minimize",
    created=5000.0,
    trials=2,
    counts={"done": 2},
    best=None,
    best_trial=None,
)


def test_the_title_says_where_the_runs_are_and_keys_act_there(tmp_path: Path) -> None:
    asked = list[tuple[str, str]]()

    def act(verb: str, run: str) -> str:
        asked.append((verb, run))
        if verb == "stop":
            raise ConnectionProblem("You are not logged in to alps.")
        return f"{run} is cancelled."

    async def work(screen: Screen) -> None:
        await screen.until("paceline top --on alps", "digits", "running", "n1", "alps:/scratch/me")
        await screen.press("enter")
        await screen.until(f"alps:/scratch/me/{RUN}")  # as `show` has it
        await screen.press("escape")
        await screen.pilot.resize_terminal(50, 30)
        await screen.until("paceline top --on alps  1 running")
        await screen.pilot.resize_terminal(140, 30)
        await screen.press("c")
        await screen.until("Cancel the run")
        await screen.press("y")
        await screen.until("20260101-120000-aaaa is cancelled.")
        news = {**copy.news(), "problem": "no connection to alps since 14:03"}
        (copy.base / NEWS).write_text(json.dumps(news))
        await screen.press("s")
        await screen.until("Save and stop")
        await screen.press("y")
        await screen.until(
            "You are not logged in to alps.",
            "no connection to alps since 14:03: paceline login alps",
        )

    copy = copy_of_run(tmp_path, RUN, {"name": "digits", "program": "train.py"}, act=act)
    with show(copy):
        drive(copy.scratch, work, size=(140, 30))
    assert asked == [("cancel", "20260101-120000-aaaa"), ("stop", "20260101-120000-aaaa")]
    assert not (copy.scratch / RUN / "cancelled").exists()


def test_commands_for_a_sweep_name_the_cluster(tmp_path: Path) -> None:
    row = Row("/scratch/ann/p/e/my lrs", None, sweep=SWEEP)
    with show(ClusterCopy("alps", tmp_path, lambda verb, run: "")):
        assert "paceline sweep show 'my lrs' --on alps" in sweep_facts(row).plain
    assert "paceline sweep show 'my lrs'\n" in f"{sweep_facts(row).plain}\n"
