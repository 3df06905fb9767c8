"""`paceline sweep show`: the table, the CSV file and the report, of sweep folders small and large."""

from __future__ import annotations

import csv
import json
import math
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.cli.commands import sweep
from paceline.contract.sweep_folder import SweepFolder
from paceline.spec.shell_text import meant_for
from paceline.sweep.report import describe_trials, make_figures
from paceline.sweep.results import best_first, read_sweep, rows
from tests.sweep.folders import end, grid, make_sweep
from tests.ui.report.answers import read_answers

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
    space = {
        "lr": {"log_uniform": [1e-5, 0.1]},
        "optimizer": {"grid": ["sgd", "adam"]},
        "width": {"grid": [32, 64]},
    }
    folder = make_sweep(
        scratch / "project" / "default" / "digits", grid(points), sampler="random", space=space
    )
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
    done = sorted(
        (trial for trial in sweep.trials if trial.state == "done"),
        key=lambda trial: trial.value or 0,
    )
    shown = [
        int(found[1]) for found in re.finditer(r"^(\d+) {2,}done", completed.stdout, re.MULTILINE)
    ]
    assert shown == [trial.number for trial in done[:5]]
    assert "52 done · 3 failed · 5 missing of 60" in completed.stdout
    assert "trial 7, 27, 47: RuntimeError: <b>out of memory</b>" in completed.stdout
    assert "again: paceline sweep --resubmit failed digits" in completed.stdout
    assert "… and 55 more" in completed.stdout


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
    from paceline.sweep.report import to_csv

    folder = make_sweep(tmp_path / "names", grid([{"value": 'a,"b"\n', "seed": [1, 2]}]))
    end(folder, 0, value=1.5)
    read_sweep(folder).trials[0].folder.config.write_text('{"value": 3, "model": {"width": 8}}')
    head, line = list(csv.reader(to_csv(read_sweep(folder)).splitlines(keepends=True)))
    row = dict(zip(head, line, strict=True))
    assert row["value"] == "1.5"
    assert row["parameter value"] == 'a,"b"\n'
    assert row["parameter seed"] == "[1, 2]"
    assert {name: row[name] for name in row if name.startswith("config")} == {
        "config model.width": "8"
    }


def test_dots_have_the_numbers_of_their_trials(scratch: Path) -> None:
    """Trial 0 did best but one, and trial 1 has not ended."""
    points = [{"lr": lr} for lr in (0.001, 0.01, 0.05, 5.0)]
    folder = make_sweep(scratch / "project" / "default" / "rates", grid(points))
    for number, loss in ((0, 0.5), (2, 0.1), (3, 0.9)):
        end(folder, number, value=loss)
    figures = {each["title"]: each["figure"]["data"] for each in make_figures(read_sweep(folder))}
    [slices] = figures["Slices"]
    found = dict(zip(slices["marker"]["color"], slices["x"], strict=True))
    assert {number: float(lr) for number, lr in found.items()} == {0: 0.001, 2: 0.05, 3: 5.0}
    assert dict(zip(figures["History"][0]["x"], figures["History"][0]["y"], strict=True)) == {
        0: 0.5,
        2: 0.1,
        3: 0.9,
    }


def test_the_report_has_figures(
    searched: SweepFolder, paceline: Callable[..., Completed], tmp_path: Path
) -> None:
    paceline("report", "digits", "-o", "report.html", check=True, cwd=tmp_path)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<b>out" not in page  # output of trials is text, not markup
    answers = read_answers(page)
    sweep = answers["api/sweeps/digits"]
    assert [figure["title"] for figure in sweep["figures"]] == [
        "History",
        "Parallel coordinates",
        "Slices",
    ]
    history, lines, slices = (figure["figure"] for figure in sweep["figures"])
    assert len(history["data"][0]["x"]) == 52
    columns = lines["data"][0]["dimensions"]
    # the loss, and the parameters that all trials have
    assert [each["label"].split()[-1] for each in columns] == ["loss", "lr", "optimizer", "width"]
    assert all(len(each["values"]) == 52 for each in columns)
    assert len(slices["data"]) == 4
    assert len(sweep["rows"]) == 60
    done = [trial for trial in read_sweep(searched).trials if trial.value is not None]
    best = min(done, key=lambda trial: trial.value or 0)
    assert (sweep["best"]["number"], sweep["best"]["point"]) == (best.number, best.point)
    assert f"api/runs/digits-{best.number}" in answers  # its own page


def test_reports_without_values(tmp_path: Path) -> None:
    folder = make_sweep(tmp_path / "begun", grid([{"lr": 0.1}, {"lr": 0.2}]))
    answer = describe_trials(read_sweep(folder))
    assert (answer["best"], answer["figures"]) == (None, [])
    end(folder, 0, value=0.5)  # one value alone is a history too
    answer = describe_trials(read_sweep(folder))
    assert [figure["title"] for figure in answer["figures"]] == ["History"]


def test_the_report_shows_pruned_trials(tmp_path: Path) -> None:
    folder = make_sweep(
        tmp_path / "pruned", grid([{"lr": 0.1 * number} for number in range(4)]), prune="halving"
    )
    end(folder, 0, value=0.5)
    end(folder, 1, "pruned", value=0.2, step=40)
    end(folder, 2, "pruned", value=900.0, step=20)
    end(folder, 3, "pruned")  # before its first report
    answer = describe_trials(read_sweep(folder))
    assert [(row["number"], row["state"], row["step"]) for row in answer["rows"]] == [
        (0, "done", None),
        (1, "pruned", 40),
        (2, "pruned", 20),
        (3, "pruned", None),
    ]
    assert answer["best"]["number"] == 0  # an early value is not the best


def test_a_pruned_point_does_not_rank_by_its_lucky_seeds(tmp_path: Path) -> None:
    folder = make_sweep(
        tmp_path / "seeds", grid([{"lr": 0.1}, {"lr": 0.2}], seeds=2), prune="halving"
    )
    for number, value in enumerate((0.5, 0.6)):
        end(folder, number, value=value)
    end(folder, 2, value=0.1)
    end(folder, 3, "pruned", value=8.1)
    sweep = read_sweep(folder)
    first, second = best_first(sweep, rows(sweep))
    assert (first.number, first.value) == (0, 0.55)
    assert (second.status, second.value) == ("1 done, 1 pruned", 4.1)


def test_equal_values_and_a_parameter_that_never_varies(tmp_path: Path) -> None:
    folder = make_sweep(
        tmp_path / "equal", grid([{"lr": 0.1, "depth": depth} for depth in range(12)])
    )
    for number in range(12):
        end(folder, number, value=0.25)
    answer = describe_trials(read_sweep(folder))
    assert "History" in [figure["title"] for figure in answer["figures"]]
    assert "NaN" not in json.dumps(answer)


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
    folder = make_sweep(
        tmp_path / "large", grid([{"lr": number / count} for number in range(count)])
    )
    for number in range(count):
        end(folder, number, value=number / count, point={"lr": number / count}, seed=None)
    args = [sys.executable, "-c", COUNTING, str(folder.path)]
    done = subprocess.run(args, check=True, capture_output=True, text=True)
    trials, opened = map(int, done.stdout.split())
    assert trials == count
    assert count <= opened <= count + 5


def test_a_missing_folder_is_named(
    searched: SweepFolder, tmp_path: Path, paceline: Callable[..., Completed]
) -> None:
    completed = paceline("sweep", "show", "digits", "--csv", "nowhere/trials.csv", cwd=tmp_path)
    assert completed.returncode == 2
    assert "there is no folder 'nowhere'" in completed.stderr


def test_trials_of_slurm_are_not_run_again_on_a_login_node(scratch: Path) -> None:
    """A sweep whose command was killed before it called sbatch has no job that says where its trials were to run."""
    folder = make_sweep(scratch / "project" / "default" / "digits", grid([{"x": 1}, {"x": 2}]))

    def hint() -> str:
        return str(sweep._failures(read_sweep(folder))[-1])

    assert hint() == "run again: paceline sweep --resubmit missing digits"
    for number, backend in ((1, "local"), (10, "slurm")):
        folder.submission(number).mkdir(parents=True)
        text = json.dumps({"backend": backend})
        (folder.submission(number) / "run.json").write_text(text, encoding="utf-8")
        local = "--local " if backend == "local" else ""
        assert hint() == f"run again: paceline sweep {local}--resubmit missing digits"
    with meant_for("alps"):
        assert hint() == "run again: paceline sweep --resubmit missing digits --on alps"
