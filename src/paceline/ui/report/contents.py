"""The answers that a report contains: those of the dashboard, thinned out to stay small enough for
a mail.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any
from urllib.parse import quote

from paceline.contract.run_folder import RunFolder
from paceline.contract.sweep.folder import SweepFolder
from paceline.errors import EnvironmentProblem
from paceline.launch.diff import compare_run
from paceline.sweep.report.summary import describe_trials
from paceline.sweep.results import Sweep, read_sweep
from paceline.watch import origin
from paceline.watch.curves import Curve, Curves, MetricsReader
from paceline.watch.details import read_details
from paceline.watch.records import read_record
from paceline.watch.run_log import RunLog

CURVES = 160_000  # characters of all curves of a run, about
POINT = 30  # characters of a point, about
MIN_POINTS, MAX_POINTS = 40, 1000  # of a curve
SAMPLES = 1500  # of all nodes of a run
LOG = 60_000  # characters of the log
LOG_LINES = 1000
DIFFERENCE = 40_000  # characters of the code difference
TRIALS = 5  # the best of a sweep, whose own pages a report has

Answers = dict[str, Any]


def run_answers(folder: RunFolder) -> tuple[Answers, str]:
    """Return what a report of a run contains, by the paths of the questions, and its title."""
    details = read_details(read_record(folder)).to_json()
    run = details["overview"]
    key = folder.key
    answers = {**_about(f"run/{quote(key, safe='')}"), **_run(folder, key, details, share=1)}
    return answers, str(run["name"] or key)


def sweep_answers(folder: SweepFolder) -> tuple[Answers, str]:
    """Return the same for a sweep, with the pages of its best trials."""
    sweep = read_sweep(folder)
    name = quote(sweep.name, safe="")
    answers = {**_about(f"sweep/{name}"), f"api/sweeps/{name}": describe_trials(sweep)}
    for number in _best(sweep, answers[f"api/sweeps/{name}"]):
        trial = folder.trial(number)
        if trial.run_json.is_file():
            details = read_details(read_record(trial)).to_json()
            answers |= _run(trial, f"{sweep.name}-{number}", details, share=TRIALS)
    return answers, sweep.name


def _about(page: str) -> Answers:
    return {"about": {"page": page, "time": time.time(), "now": origin.now()}}


def _best(sweep: Sweep, answer: Mapping[str, Any]) -> list[int]:
    return [row["number"] for row in answer["rows"] if row["counts"]][:TRIALS]


def _run(folder: RunFolder, key: str, details: dict[str, Any], *, share: int) -> Answers:
    """Return the answers about one run; `share` runs share the space."""
    path = f"api/runs/{quote(key, safe='')}"
    curves = Curves()
    curves.add(MetricsReader(folder.metrics).read_new())
    found = curves.all()
    points = max(MIN_POINTS, min(MAX_POINTS, CURVES // share // POINT // max(1, len(found))))
    return {
        path: {**details, "nodes": _thin_nodes(details["nodes"], SAMPLES // share)},
        f"{path}/curves": {"curves": [thin_curve(curve, points) for curve in found]},
        f"{path}/log": {"lines": _log(folder, LOG // share)},
        **_difference(f"{path}/diff", folder, DIFFERENCE // share),
    }


def thin_curve(curve: Curve, points: int) -> dict[str, Any]:
    """Return at most so many points: of neighbours, the lowest and the highest, so that no spike
    disappears.
    """
    length = len(curve.values)
    kept = list(range(length))
    if length > points:
        size = max(1, points // 2)
        bounds = [length * index // size for index in range(size + 1)]
        parts = (_extremes(curve.values, first, last) for first, last in pairwise(bounds))
        kept = sorted({0, length - 1, *(index for part in parts for index in part)})
    return {
        "name": curve.name,
        "steps": [curve.steps[index] for index in kept],
        "times": [round(curve.times[index], 1) for index in kept],
        "values": [float(f"{curve.values[index]:.6g}") for index in kept],
    }


def _extremes(values: Sequence[float], first: int, last: int) -> tuple[int, int]:
    return min(range(first, last), key=values.__getitem__), max(
        range(first, last), key=values.__getitem__
    )


def _thin_nodes(nodes: list[dict[str, Any]], samples: int) -> list[dict[str, Any]]:
    """Keep the newest sample of each node, and an even share of those before it."""
    each = max(2, samples // max(1, sum(1 + len(node["gpus"]) for node in nodes)))
    return [
        {**node, "samples": [_rounded(sample) for sample in _evenly(node["samples"], each)]}
        for node in nodes
    ]


def _evenly(values: Sequence[Any], count: int) -> list[Any]:
    if len(values) <= count:
        return list(values)
    return [values[round(index * (len(values) - 1) / (count - 1))] for index in range(count)]


def _rounded(sample: Mapping[str, Any]) -> dict[str, Any]:
    kept = ("time", "cpu", "memory", "gpus")
    return {name: sample[name] for name in kept if name in sample}


def _log(folder: RunFolder, size: int) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for line in reversed(RunLog(folder).tail(LOG_LINES)):
        text = line.plain[:2000]
        size -= len(text) + 50
        if size < 0:
            break
        lines.append({"time": line.time, "rank": line.rank, "attempt": line.attempt, "text": text})
    return lines[::-1]


def _difference(path: str, folder: RunFolder, size: int) -> Answers:
    """Return how the code has changed; nothing if that is not known."""
    try:
        text = compare_run(folder).to_text()
    except (EnvironmentProblem, OSError):
        return {}
    return {
        path: {
            "diff": text
            if len(text) <= size
            else f"{text[:size]}\n… and {len(text) - size:,} characters more"
        }
    }
