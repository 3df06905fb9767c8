"""Points and trials: grids, random points, lists, stable trial numbers, tasks and arrays."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from paceline.contract.sweep_folder import Point, Search
from paceline.errors import SpecError
from paceline.sweep.settings import (
    choose_seeds,
    draw,
    grid,
    new_trials,
    parse_options,
    read_list,
    request_points,
)
from paceline.sweep.slurm_sweep import Chunk, cut, group, ranges

SPACE: dict[str, dict[str, Any]] = {
    "lr": {"grid": [0.1, 0.01]},
    "optimizer": {"grid": ["adam", "sgd"]},
    "momentum": {"grid": [0.5, 0.9], "when": {"optimizer": ["sgd"]}},
}


def test_a_grid_omits_parameters_that_do_not_apply() -> None:
    points = list(grid(SPACE))
    assert points[:3] == [
        {"lr": 0.1, "optimizer": "adam"},
        {"lr": 0.1, "optimizer": "sgd", "momentum": 0.5},
        {"lr": 0.1, "optimizer": "sgd", "momentum": 0.9},
    ]
    assert len(points) == 6
    assert list(grid({"n": {"integer": [2, 8], "step": 3, "log": False}})) == [
        {"n": 2},
        {"n": 5},
        {"n": 8},
    ]


def test_invalid_grids_are_rejected() -> None:
    huge = {f"k{index}": {"grid": list(range(100))} for index in range(4)}
    with pytest.raises(SpecError, match="100,000,000 combinations"):
        next(grid(huge))


def test_random_points_are_in_range_and_reproducible() -> None:
    space: dict[str, dict[str, Any]] = {
        "lr": {"log_uniform": [1e-4, 1.0]},
        "drop": {"uniform": [0.25, 0.5]},
        "width": {"integer": [16, 64], "step": 16, "log": False},
        "depth": {"integer": [1, 64], "step": 1, "log": True},
        "kind": {"grid": ["a", "b"]},
        "only_b": {"grid": [1], "when": {"kind": ["b"]}},
    }
    points = [draw(space, f"0/{index}") for index in range(300)]
    assert points == [draw(space, f"0/{index}") for index in range(300)]
    assert all(1e-4 <= point["lr"] <= 1 and 0.25 <= point["drop"] <= 0.5 for point in points)
    assert {point["width"] for point in points} == {16, 32, 48, 64}
    assert min(point["depth"] for point in points) == 1
    assert max(point["depth"] for point in points) <= 64
    # Evenly on the scale of the logarithm: half of them below the geometric mean.
    below = sum(math.log10(point["lr"]) < -2 for point in points)
    assert 100 < below < 200
    assert all(("only_b" in point) == (point["kind"] == "b") for point in points)


def test_a_growing_sweep_keeps_its_trial_numbers() -> None:
    search = Search("s", sampler="random", space={"x": {"uniform": [0.0, 1.0]}})
    first = new_trials([], request_points(search, count=3), seeds=[None])
    more = new_trials(first, request_points(search, count=5), seeds=[None])
    assert [(point.number, point.group) for point in more] == [(3, 3), (4, 4)]
    small = Search("s", space={"x": {"grid": [1, 2]}})
    large = Search("s", space={"x": {"grid": [0, 1, 2, 3]}})
    known = new_trials([], request_points(small, count=None), seeds=[None])
    added = new_trials(known, request_points(large, count=None), seeds=[None])
    assert [(point.number, point.point) for point in added] == [(2, {"x": 0}), (3, {"x": 3})]


def test_seeds_of_a_point_are_one_group() -> None:
    assert choose_seeds(1, 7) == [None]
    assert choose_seeds(3, None) == [0, 1, 2]
    assert choose_seeds(2, 7) == [7, 8]
    search = Search("s", space={"x": {"grid": [1, 2]}})
    trials = new_trials([], request_points(search, count=None), seeds=[0, 1])
    assert [(each.number, each.group, each.seed) for each in trials] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 1, 0),
        (3, 1, 1),
    ]
    more = new_trials(trials, request_points(search, count=None), seeds=[0, 1, 2])
    assert [(each.number, each.group, each.seed) for each in more] == [(4, 0, 2), (5, 1, 2)]


def test_points_of_a_sampler_are_numbered_in_advance() -> None:
    search = Search("s", sampler="tpe", space={"x": {"uniform": [0.0, 1.0]}})
    trials = new_trials([], request_points(search, count=2), seeds=[0, 1])
    assert [(each.group, each.seed, each.point) for each in trials] == [
        (0, 0, None),
        (0, 1, None),
        (1, 0, None),
        (1, 1, None),
    ]
    assert [
        each.group for each in new_trials(trials, request_points(search, count=3), seeds=[0])
    ] == [2]


# -- lists -------------------------------------------------------------------------------------------------


def test_a_list_has_one_command_line_per_line(tmp_path: Path) -> None:
    path = tmp_path / "experiment_configurations.txt"
    path.write_text(
        "# a comment\n\ntrain.py --lr 0.1 --name 'a b'\npython3 other.py --fast --lr=2e-3 pos\n",
        encoding="utf-8",
    )
    first, second = read_list(path)
    assert (first.program, first.args) == ("train.py", ["--lr", "0.1", "--name", "a b"])
    assert first.point == {"lr": 0.1, "name": "a b"}
    assert (second.program, second.args) == ("other.py", ["--fast", "--lr=2e-3", "pos"])
    assert second.point == {"fast": True, "lr": 0.002}


def test_a_list_of_arguments_needs_a_script(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_text("--lr 0.1\n", encoding="utf-8")
    with pytest.raises(SpecError, match=r"line 1: the line starts with '--lr'") as refusal:
        read_list(path)
    assert "--script" in refusal.value.hint
    (found,) = read_list(path, script="train.py")
    assert (found.program, found.args) == ("train.py", ["--lr", "0.1"])
    path.write_text("--name 'open\n", encoding="utf-8")
    with pytest.raises(SpecError, match="line 1: no closing quotation"):
        read_list(path, script="train.py")


def test_negative_numbers_are_values() -> None:
    assert parse_options(["--x", "-1.5", "-v", "--y=-2"]) == {"x": -1.5, "v": True, "y": -2}


# -- tasks -------------------------------------------------------------------------------------------------


def test_ten_thousand_trials_need_the_fewest_arrays() -> None:
    chunks = cut(group(range(10_000)), max_array=1001)
    assert len(chunks) == math.ceil(10_000 / 1001)
    assert sorted(number for chunk in chunks for number in chunk.trials) == list(range(10_000))
    assert chunks[0].array(4) == "0-1000%4"
    assert all(index < 1001 for chunk in chunks for index in chunk.tasks)


def test_a_task_index_is_its_trial_number_if_possible() -> None:
    (chunk,) = cut(group([3, 7, 9]), max_array=1001)
    assert chunk.array(None) == "3,7,9"
    assert chunk.listing() == "3 3\n7 7\n9 9\n"
    (chunk,) = cut(group([3, 2007, 5009]), max_array=1001)  # still one array
    assert chunk.listing() == "0 3\n1 2007\n2 5009\n"
    assert [each.array(None) for each in cut(group(range(12)), max_array=5)] == [
        "0-4",
        "0-4",
        "0-1",
    ]


def test_a_task_runs_several_trials_if_arrays_are_limited() -> None:
    assert group(range(10), max_tasks=4) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert group(range(10), pack=4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert group(range(16), pack=4, max_tasks=3) == [list(range(8)), list(range(8, 16))]
    assert Chunk({0: [1, 2]}).listing() == "0 1 2\n"
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


def test_points_round_trip_through_the_file() -> None:
    point = Point(3, 1, {"ä": "\n"}, seed=None, program="t.py", args=["x"])
    import json

    assert Point(**json.loads(point.to_line())) == point
