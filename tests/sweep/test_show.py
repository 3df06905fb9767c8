"""`paceline sweep show`: the table, the CSV file and the report, of sweep folders small and large."""

from __future__ import annotations

import csv
import json
import math
import random
import re
import subprocess
import sys
import xml.etree.ElementTree as tree
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.cli import sweep_show
from paceline.contract.sweep.folder import SweepFolder
from paceline.sweep import results
from paceline.sweep.report.html import render
from paceline.sweep.report.importance import importances
from paceline.sweep.report.rows import best_first, rows
from paceline.sweep.results import read_sweep
from tests.sweep.folders import end, grid, make_sweep

Completed = subprocess.CompletedProcess[str]


@pytest.fixture
def searched(scratch: Path) -> SweepFolder:
    """Sixty trials: the learning rate decides, a conditional parameter does little, and some fail."""
    dice = random.Random(0)
    points = []
    for _ in range(60):
        point = {
            "lr": 10 ** dice.uniform(-5, -1),
            "optimizer": dice.choice(["sgd", "adam"]),
            "width": dice.choice([32, 64]),
        }
        if point["optimizer"] == "sgd":
            point["momentum"] = dice.uniform(0.5, 0.99)
        points.append(point)
    space = {"lr": {"log_uniform": [1e-5, 0.1]}, "optimizer": {"grid": ["sgd", "adam"]}, "width": {"grid": [32, 64]}}
    folder = make_sweep(scratch / "project" / "default" / "digits", grid(points), sampler="random", space=space)
    for number, point in enumerate(points[:55]):
        loss = abs(math.log10(float(str(point["lr"]))) + 3) + dice.gauss(0, 0.05)
        if number % 20 == 7:
            end(folder, number, "failed", error="RuntimeError: <b>out of memory</b>")
        else:
            end(folder, number, value=loss)
    return folder


def test_the_table(searched: SweepFolder, paceline: Callable[..., Completed]) -> None:
    completed = paceline("sweep", "show", "digits", "-n", "5", check=True)
    sweep = read_sweep(searched)
    done = sorted((trial for trial in sweep.trials if trial.state == "done"), key=lambda trial: trial.value or 0)
    shown = [int(found[1]) for found in re.finditer(r"^(\d+) {2,}done", completed.stdout, re.MULTILINE)]
    assert shown == [trial.number for trial in done[:5]]
    assert "52 done · 3 failed · 5 missing of 60" in completed.stdout
    assert "trial 7, 27, 47: RuntimeError: <b>out of memory</b>" in completed.stdout
    assert "again: paceline sweep --local --resubmit failed digits" in completed.stdout
    assert "… and 55 more" in completed.stdout


def test_an_unknown_column_is_an_error(searched: SweepFolder, paceline: Callable[..., Completed]) -> None:
    completed = paceline("sweep", "show", "digits", "--sort", "learning_rate")
    assert completed.returncode == 2
    assert "no column 'learning_rate'" in completed.stderr
    assert "momentum" in completed.stderr


def test_the_csv_file_has_every_trial(
    searched: SweepFolder, paceline: Callable[..., Completed], tmp_path: Path
) -> None:
    paceline("sweep", "show", "digits", "--csv", "all.csv", check=True, cwd=tmp_path)
    with open(tmp_path / "all.csv", encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    sweep = read_sweep(searched)
    assert [int(line["number"]) for line in lines] == list(range(60))
    for line, trial in zip(lines, sweep.trials, strict=True):
        assert line["state"] == trial.state
        assert line["value"] == ("" if trial.value is None else repr(trial.value))
        assert float(line["lr"]) == trial.point["lr"]
        assert (line["momentum"] == "") == (line["optimizer"] == "adam")
        assert line["folder"] == str(trial.folder.path)
    assert lines[7]["error"] == "RuntimeError: <b>out of memory</b>"


def test_parameters_named_like_other_columns(tmp_path: Path) -> None:
    from paceline.sweep.report.csv import to_csv

    folder = make_sweep(tmp_path / "names", grid([{"value": 'a,"b"\n', "seed": [1, 2]}]))
    end(folder, 0, value=1.5)
    read_sweep(folder).trials[0].folder.config.write_text('{"value": 3, "model": {"width": 8}}')
    head, line = list(csv.reader(to_csv(read_sweep(folder)).splitlines(keepends=True)))
    row = dict(zip(head, line, strict=True))
    assert row["value"] == "1.5"
    assert row["parameter value"] == 'a,"b"\n'
    assert row["parameter seed"] == "[1, 2]"
    assert {name: row[name] for name in row if name.startswith("config")} == {"config model.width": "8"}


def test_the_report_has_the_settings_of_the_scripts(tmp_path: Path) -> None:
    """Those that are alike once, the others as columns; not those that the sweep sets, and none of pending trials."""
    folder = make_sweep(tmp_path / "settings", grid([{"lr": 0.1}, {"lr": 0.2}, {"lr": 0.3}]))
    for trial in read_sweep(folder).trials[:2]:
        end(folder, trial.number, value=1.5)
        config = {"lr": trial.point["lr"], "data": "<books>", "model": {"width": 8 + trial.number}}
        trial.folder.config.write_text(json.dumps(config))
    page = render(read_sweep(folder))
    assert '<h2>Settings of all trials</h2><table class="point"><tr><th>data</th><td>&lt;books&gt;</td></tr>' in page
    assert re.findall(r"<th tabindex='0'>(.*?)</th>", page)[3:] == ["lr", "model.width", "time"]
    assert [cells[4] for row in re.findall(r"<tr>(<td data-v=.*?)</tr>", page)
            if (cells := re.findall(r'data-v="(.*?)"', row))] == ["8", "9", ""]  # fmt: skip


def test_the_report_is_one_self_contained_file(
    searched: SweepFolder, paceline: Callable[..., Completed], tmp_path: Path
) -> None:
    paceline("sweep", "show", "digits", "--report", "report.html", check=True, cwd=tmp_path)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://|<link|src=|@import|url\(", page)
    assert "<b>out" not in page  # output of trials is text, not markup
    pictures = [tree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    assert [each.get("aria-label") for each in pictures] == [
        "parallel coordinates of 52 points", "importance of each parameter", "values in the order of the trials",
    ]  # fmt: skip
    lines, bars, history = pictures
    assert len(lines.findall("path")) == 52
    names = [text.text for text in lines.findall("text") if text.get("class") == "name"]
    assert names == ["lr", "optimizer", "width", "momentum", "loss"]
    assert bars.findall("text")[0].text == "lr"
    assert len(history.findall("circle")) == 52
    assert page.count("<tr><td data-v=") == 60
    best = min((trial for trial in read_sweep(searched).trials if trial.value), key=lambda trial: trial.value or 0)
    assert page.count("<tr><th>") == len(best.point)


def test_the_decisive_parameter_ranks_as_most_important(searched: SweepFolder) -> None:
    shares = importances(read_sweep(searched))
    assert sum(shares.values()) == pytest.approx(1.0)
    assert next(iter(shares)) == "lr"
    assert shares["lr"] > 0.5
    assert set(shares) == {"lr", "optimizer", "width", "momentum"}


def test_reports_without_values(tmp_path: Path) -> None:
    folder = make_sweep(tmp_path / "begun", grid([{"lr": 0.1}, {"lr": 0.2}]))
    assert "No trial has a value yet" in render(read_sweep(folder))
    end(folder, 0, value=0.5)  # one value alone is an axis and a history too
    assert "parallel coordinates of 1 points" in render(read_sweep(folder))


def test_the_report_shows_pruned_trials(tmp_path: Path) -> None:
    folder = make_sweep(tmp_path / "pruned", grid([{"lr": 0.1 * number} for number in range(4)]), prune="halving")
    end(folder, 0, value=0.5)
    end(folder, 1, "pruned", value=0.2, step=40)
    end(folder, 2, "pruned", value=900.0, step=20)
    end(folder, 3, "pruned")  # before its first report
    page = render(read_sweep(folder))
    lines, history = (tree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    assert [path.get("class") for path in lines.findall("path")] == ["line early", "line early", "line"]
    assert [dot.get("class") for dot in history.findall("circle")] == ["early outside", "early outside", "dot"]
    assert "trial 1 (pruned): loss 0.2" in page
    assert "Grey: 2 pruned, at their last report." in page
    assert "pruned at step 40" in page
    assert '<p class="facts">trial 0 ' in page  # an early value is not the best


def test_a_pruned_point_does_not_rank_by_its_lucky_seeds(tmp_path: Path) -> None:
    folder = make_sweep(tmp_path / "seeds", grid([{"lr": 0.1}, {"lr": 0.2}], seeds=2), prune="halving")
    for number, value in enumerate((0.5, 0.6)):
        end(folder, number, value=value)
    end(folder, 2, value=0.1)
    end(folder, 3, "pruned", value=8.1)
    sweep = read_sweep(folder)
    first, second = best_first(sweep, rows(sweep))
    assert (first.number, first.value) == (0, 0.55)
    assert (second.status, second.value) == ("1 done, 1 pruned", 4.1)


def test_equal_values_and_a_parameter_that_never_varies(tmp_path: Path) -> None:
    folder = make_sweep(tmp_path / "equal", grid([{"lr": 0.1, "depth": depth} for depth in range(12)]))
    for number in range(12):
        end(folder, number, value=0.25)
    page = render(read_sweep(folder))
    assert "nan" not in re.sub(r"<(style|script)>.*?</\1>", "", page, flags=re.DOTALL)


def test_watching_ends_with_the_last_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_sweep(tmp_path / "scratch" / "project" / "default" / "two", grid([{"lr": 0.1}, {"lr": 0.2}]))
    slept = []

    def sleep(seconds: float) -> None:
        end(folder, len(slept), value=0.5)  # a trial ends between two updates
        slept.append(seconds)

    with monkeypatch.context() as patch:
        patch.setenv("PACELINE_SCRATCH", str(tmp_path / "scratch"))
        patch.setattr(sweep_show.time, "sleep", sleep)
        patch.setattr(results, "is_starting", lambda _: True)
        assert sweep_show.command("two", watch=True) == 0
    assert len(slept) == 2
    assert "2 done of 2" in capsys.readouterr().out


COUNTING = """
import sys
from pathlib import Path
from paceline.sweep.results import SweepFolder, read_sweep
folder, opened = SweepFolder(Path(sys.argv[1])), []
sys.addaudithook(lambda event, words: opened.append(1) if event == "open" and sys.argv[1] in str(words[0]) else None)
print(len(read_sweep(folder).trials), len(opened))
"""


def test_a_large_sweep_reads_one_small_file_per_trial(tmp_path: Path) -> None:
    """Count reads instead of timing them. The audit hook cannot be removed, so it gets its own process."""
    count = 1000
    folder = make_sweep(tmp_path / "large", grid([{"lr": number / count} for number in range(count)]))
    for number in range(count):
        end(folder, number, value=number / count, point={"lr": number / count}, seed=None)
    args = [sys.executable, "-c", COUNTING, str(folder.path)]
    done = subprocess.run(args, check=True, capture_output=True, text=True)
    trials, opened = map(int, done.stdout.split())
    assert trials == count
    assert count <= opened <= count + 5


def test_a_missing_folder_is_named(searched: SweepFolder, tmp_path: Path, paceline: Callable[..., Completed]) -> None:
    completed = paceline("sweep", "show", "digits", "--report", "nowhere/report.html", cwd=tmp_path)
    assert completed.returncode == 2
    assert "there is no folder 'nowhere'" in completed.stderr
