"""Reports: one file that opens offline, small, and safe whatever the run has written."""

from __future__ import annotations

import json
import random
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paceline.contract.run_folder import RunFolder
from paceline.contract.sweep_folder import SweepFolder
from paceline.ui.report import thin_curve
from paceline.watch.metrics import Curve
from tests.sweep.folders import end, grid, make_sweep
from tests.ui.conftest import Console
from tests.ui.report.answers import read_answers
from tests.ui.web.folders import NOW, make_run

Completed = subprocess.CompletedProcess[str]
HOSTILE = "</script><script>window.hacked = 1</script><!--<script>"


@dataclass
class Offline:
    """A tab without a network, and what it has complained about."""

    tab: Any
    console: Console

    @property
    def problems(self) -> list[str]:
        return [each for each in self.console.problems if not each.startswith("asks file:")]


@pytest.fixture
def offline(chromium: Any, console: Console) -> Iterator[Offline]:
    context = chromium.new_context(viewport={"width": 1280, "height": 900}, offline=True)
    tab = context.new_page()
    console.watch(tab)
    yield Offline(tab, console)
    context.close()


@pytest.fixture
def ordinary(scratch: Path) -> RunFolder:
    """A run like many: 50,000 steps, ten metrics, a long log, two nodes with GPUs."""
    dice = random.Random(0)
    lines = {
        rank: [f"step {n} loss {dice.random()} {HOSTILE}" for n in range(3000)] for rank in range(1)
    }
    folder = make_run(scratch, steps=0, log=lines, name=f"ordinary {HOSTILE}")
    folder.config.write_text(json.dumps({"lr": 0.1, HOSTILE: HOSTILE}))
    with open(folder.metrics, "w", encoding="utf-8") as file:
        for step in range(50_000):
            values = {f"metric {n}": dice.random() for n in range(9)}
            file.write(
                json.dumps(
                    {"step": step, "time": NOW + step / 10, "loss": 1 / (1 + step), **values}
                )
                + "\n"
            )
    folder.system.mkdir()
    for node in range(2):
        with open(folder.node_metrics(node), "w", encoding="utf-8") as file:
            gpus = [{"name": "H200", "memory": 1.4e11}] * 8
            file.write(
                json.dumps(
                    {
                        "time": NOW,
                        "host": f"n{node}",
                        "cores": 64,
                        "memory_total": 5e11,
                        "gpus": gpus,
                    }
                )
            )
            for n in range(2000):
                use = [
                    {"busy": dice.uniform(0, 100), "memory": 9e10, "power": 600.0} for _ in range(8)
                ]
                line = {
                    "time": NOW + 30 * n,
                    "cpu": 50.0,
                    "memory": 1e11,
                    "own_cpu": 2.0,
                    "gpus": use,
                    "ranks": [],
                }
                file.write("\n" + json.dumps(line))
    return folder


@pytest.mark.parametrize("light", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_report_opens_offline_and_shows_everything(
    ordinary: RunFolder,
    paceline: Callable[..., Completed],
    offline: Offline,
    tmp_path: Path,
    light: bool,
) -> None:
    done = paceline(
        "report", ordinary.path.name, "-o", "run.html", *(["--light"] if light else []), check=True
    )
    assert "wrote the report to run.html" in done.stdout
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    plotly = (
        0
        if light
        else max(len(text) for text in re.findall(r"<script>(.*?)</script>", page, re.DOTALL))
    )
    assert len(page.encode()) - plotly < 500_000
    assert light or plotly > 1_000_000
    tab = offline.tab
    tab.goto(f"file://{tmp_path}/run.html")
    tab.get_by_role("heading", name=f"ordinary {HOSTILE}").wait_for()
    chart = tab.locator("[data-metric=loss] .chart")
    chart.locator(
        "svg.still path" if light else ".main-svg .scatterlayer path.js-line"
    ).first.wait_for(state="attached")
    # below the screen, they are drawn once they are seen
    assert tab.locator(".chart:empty").count() > 0
    tab.get_by_role("tab", name="Log").click()
    tab.locator(".log .text", has_text="step 2999").first.wait_for()
    tab.get_by_label("Search the log").fill("step 2990 ")
    tab.get_by_text("1 line matches").wait_for()
    tab.get_by_role("tab", name="Nodes").click()
    assert tab.locator(".gpu").count() == 16
    tab.get_by_role("tab", name="Settings").click()
    tab.get_by_text(HOSTILE).first.wait_for()
    assert tab.evaluate("window.hacked") is None
    assert not offline.problems


@pytest.mark.parametrize("light", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_sweep_with_the_pages_of_its_best_trials(
    scratch: Path, paceline: Callable[..., Completed], offline: Offline, tmp_path: Path, light: bool
) -> None:
    points = [{"lr": 10.0 ** -(n % 4 + 1), "width": 2 ** (n % 3)} for n in range(20)]
    sweep: SweepFolder = make_sweep(scratch / "project" / "default" / "search", grid(points))
    for number in range(20):
        end(sweep, number, value=1.0 + number % 4)
    done = paceline("report", "search", *(["--light"] if light else []), check=True)
    assert "wrote the report to report.html" in done.stdout
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert len(page) < 500_000 or not light
    tab = offline.tab
    tab.goto(f"file://{tmp_path}/report.html")
    tab.locator(".figures svg").first.wait_for(state="attached")
    assert tab.locator(".figures .card").count() == (1 if light else 3)
    tab.get_by_role("link", name="trial 0").first.click()
    tab.get_by_role("heading", name="search-0").wait_for()
    tab.get_by_role("link", name="search", exact=True).click()
    tab.get_by_role("heading", name="Trials").wait_for()
    assert not offline.problems


def test_a_name_that_is_neither_a_run_nor_a_sweep(
    paceline: Callable[..., Completed], scratch: Path
) -> None:
    make_run(scratch)
    done = paceline("report", "nothing")
    assert done.returncode == 2
    assert "There is no run 'nothing'" in done.stderr


def test_numbers_that_json_lacks_and_files_that_are_not_there(
    paceline: Callable[..., Completed], scratch: Path, tmp_path: Path
) -> None:
    folder = make_run(scratch, steps=3)
    folder.config.write_text('{"bad": NaN, "huge": 1e999}')
    folder.metrics.unlink()
    for log in folder.attempt(1).path.glob("*.log"):
        log.unlink()
    (tmp_path / "link.html").symlink_to("r.html")
    paceline("report", "--light", "-o", "link.html", check=True)
    assert (tmp_path / "link.html").is_symlink()
    answers = read_answers((tmp_path / "r.html").read_text())
    details = answers[f"api/runs/{folder.path.name}"]
    assert details["config"] == {"bad": None, "huge": None}
    assert answers[f"api/runs/{folder.path.name}/log"]["lines"] == []


def test_a_thin_curve_keeps_its_ends_and_its_spikes() -> None:
    values = [0.5] * 10_000
    values[1234], values[8000] = 9.0, -9.0
    curve = Curve("loss", list(range(10_000)), [float(n) for n in range(10_000)], values)
    thin = thin_curve(curve, 200)
    assert len(thin["values"]) <= 202
    assert (thin["steps"][0], thin["steps"][-1]) == (0, 9999)
    assert {1234, 8000} <= set(thin["steps"])
    assert thin["steps"] == sorted(set(thin["steps"]))
    assert thin_curve(Curve("one", [3], [1.0], [2.0]), 200)["values"] == [2.0]
