"""A sweep as one row, as an object for JSON with figures, and as CSV."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.contract.sweep_folder import DONE, FAILED, SweepFolder, TrialFolder
from paceline.errors import PacelineError
from paceline.spec.run_path import list_folders
from paceline.sweep.results import (
    MISSING,
    PENDING,
    RUNNING,
    Row,
    Sweep,
    Trial,
    best_first,
    comparable,
    finished,
    has_repeats,
    read_sweep,
    rows,
    to_label,
)
from paceline.watch.details import flatten, read_config
from paceline.watch.events import newest_change
from paceline.watch.metrics import as_number
from paceline.watch.records import QueryStates
from paceline.watch.scheduler import query_states

INTERVAL, OVER_INTERVAL = 10.0, 60.0  # seconds between reads of a sweep, and of one that is over
IDLE_SHARE = 20  # reading that takes long is followed by a pause of so many times its duration


@dataclass(frozen=True)
class SweepOverview:
    """A sweep in one row. Times are in seconds since 1970; what is not known is None."""

    name: str
    project: str
    experiment: str
    path: str
    is_over: bool
    metric: str
    direction: str  # minimize or maximize
    created: float | None
    trials: int
    # trials by state: done, pruned, failed, missing, running, pending; none without trials
    counts: dict[str, int]
    best: float | None
    best_trial: int | None

    @property
    def status(self) -> str:
        return sweep_status(self.counts)

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "status": self.status}


def sweep_status(counts: Mapping[str, int]) -> str:
    """Return what most concerns you about a sweep, in one word, from its trials by state. All
    views show this one.
    """
    for state, word in ((RUNNING, "running"), (PENDING, "queued")):
        if state in counts:
            return word
    return next((state for state in (FAILED, MISSING) if state in counts), DONE)


def find_sweeps(scratch: Path) -> Iterator[SweepFolder]:
    """Yield the sweeps in a scratch folder."""
    return (SweepFolder(Path(path)) for path in list_folders(scratch, "sweep.json"))


def read_sweep_overview(folder: SweepFolder, query: QueryStates = query_states) -> SweepOverview:
    return make_sweep_overview(read_sweep(folder, query))


def make_sweep_overview(sweep: Sweep) -> SweepOverview:
    path = sweep.folder.path
    ends = [
        (trial.value, trial.number) for trial in finished(sweep.trials) if trial.value is not None
    ]
    best = (max if sweep.maximizes else min)(ends, default=None)
    return SweepOverview(
        name=sweep.name,
        project=path.parent.parent.name,
        experiment=path.parent.name,
        path=str(path),
        is_over=not {RUNNING, PENDING} & sweep.counts.keys(),
        metric=sweep.metric,
        direction="maximize" if sweep.maximizes else "minimize",
        created=sweep.spec.get("created"),
        trials=len(sweep.trials),
        counts=sweep.counts,
        best=best[0] if best else None,
        best_trial=best[1] if best else None,
    )


class SweepOverviews:
    """Reads the rows of sweeps again and again: those that are over seldom, unless their files
    change.
    """

    def __init__(self, query: QueryStates) -> None:
        self._query = query
        # rows by folder, with when its files changed, and until when it is not read again otherwise
        self._known: dict[Path, tuple[SweepOverview, tuple[float, ...], float]] = {}

    def read(self, folders: Iterable[SweepFolder]) -> list[SweepOverview]:
        """Return the rows of these sweeps, as far as they can be read."""
        found = {}
        for folder in folders:
            known, began = self._known.get(folder.path), time.monotonic()
            # when trials were added, started or submitted again; those that go on change their own
            paths = (folder.trials, folder.points, folder.jobs, folder.path)
            stamp = tuple(newest_change([path]) for path in paths)
            if known is None or known[1] != stamp or began > known[2]:
                with suppress(PacelineError, OSError, ValueError):
                    row = read_sweep_overview(folder, self._query)
                    pause = OVER_INTERVAL if row.is_over else INTERVAL
                    took = time.monotonic() - began
                    known = (row, stamp, began + max(pause, IDLE_SHARE * took))
            if known is not None:
                found[folder.path] = known
        self._known = found
        return [row for row, _, _ in found.values()]


def started_trials(folder: SweepFolder) -> list[TrialFolder]:
    """Return the run folders of the trials that have started, by number."""
    numbers = sorted(int(path.name) for path in folder.trials.glob("*") if path.name.isdigit())
    return [folder.trial(number) for number in numbers if folder.trial(number).run_json.is_file()]


MAX_TRIALS = 2000  # in one answer; `sweep show --csv` writes all
MAX_POINTS = 500  # trials in a figure with one dot for each and parameter
MAX_LINES = 150  # trials in parallel coordinates, which have one line for each
MAX_PARAMETERS = 10
MAX_CATEGORIES = 10  # up to this many different values count as a choice
WIDE = 500  # times the smallest value: a range of numbers so wide has a log scale
BEFORE, AFTER = ("number", "state", "value"), ("seed", "seconds", "folder", "error")


def describe_trials(sweep: Sweep) -> dict[str, Any]:
    """Return a sweep with its trials and its figures.

    `rows` has one entry per point, best first: a trial, or its trials with several seeds.
    """
    listed = [_row(row) for row in best_first(sweep, rows(sweep))[:MAX_TRIALS]]
    best = next((row for row in listed if row["counts"]), None)
    return {
        **make_sweep_overview(sweep).to_json(),
        "sampler": str(sweep.spec.get("sampler") or ""),
        "pruner": str(sweep.spec.get("prune") or ""),
        "best": best,
        "keys": sweep.keys,
        "has_repeats": has_repeats(sweep),
        "rows": listed,
        "trials": [trial.to_json() for trial in sweep.trials[:MAX_TRIALS]],
        "figures": make_figures(sweep),
    }


def _row(row: Row) -> dict[str, Any]:
    errors = [trial.error for trial in row.trials if trial.error]
    return {
        "number": row.number,
        "numbers": [trial.number for trial in row.trials],
        "state": row.state,
        "status": row.status,
        "counts": row.counts,
        "value": row.value,
        "deviation": row.deviation,
        "count": row.count,
        "point": row.point,
        "seconds": row.seconds,
        "step": max((trial.step for trial in row.trials if trial.step is not None), default=None),
        "error": errors[0] if errors else "",
    }


def to_csv(sweep: Sweep) -> str:
    """Return one line per trial, with a column per parameter and per setting in `run.config`."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    taken = {*BEFORE, *AFTER}
    keys = [f"parameter {key}" if key in taken else key for key in sweep.keys]
    configs = [flatten(read_config(trial.folder)) for trial in sweep.trials]
    names = dict.fromkeys(name for each in configs for name in each)
    more = [name for name in names if name not in sweep.keys]
    writer.writerow([*BEFORE, *keys, *AFTER, *(f"config {name}" for name in more)])
    for trial, config in zip(sweep.trials, configs, strict=True):
        cells = [trial.number, trial.state, trial.value]
        cells += [*(trial.point.get(key) for key in sweep.keys), trial.seed]
        cells += ["" if trial.seconds is None else f"{trial.seconds:.3f}"]
        cells += [str(trial.folder.path), trial.error, *(config.get(name) for name in more)]
        writer.writerow([_text(cell) for cell in cells])
    return out.getvalue()


def _text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, default=str)


# -- figures ---------------------------------------------------------------------------------------


def make_figures(sweep: Sweep) -> list[dict[str, Any]]:
    """Return `{"title", "figure"}` for each figure of Plotly that the trials allow."""
    done = finished(sweep.trials)
    if not done:
        return []
    numbers, values = [trial.number for trial in done], [trial.value or 0.0 for trial in done]
    best = list(itertools.accumulate(values, max if sweep.maximizes else min))
    dots: dict[str, Any] = {"type": "scatter", "mode": "markers", "name": sweep.metric}
    history = [
        {**dots, "x": numbers, "y": values},
        {**dots, "mode": "lines", "name": "best so far", "x": numbers, "y": best},
    ]
    named = {"yaxis": {"title": {"text": sweep.metric}}}
    figures = [_figure("History", history, {**named, "xaxis": {"title": {"text": "Trial"}}})]
    labels = {key: {to_label(trial.point.get(key)) for trial in done} for key in sweep.keys}
    varying = [key for key in sweep.keys if len(labels[key]) > 1][:MAX_PARAMETERS]
    everywhere = [key for key in varying if all(key in trial.point for trial in done)]
    if everywhere:
        few = _spread(done, MAX_LINES)
        shown = [trial.value for trial in few]
        columns = [_column(key, [trial.point[key] for trial in few]) for key in everywhere]
        columns.insert(0, {"label": sweep.metric, "values": shown})
        lines = {"type": "parcoords", "dimensions": columns, "line": {"color": shown}}
        figures.append(_figure("Parallel coordinates", [lines], {}))
    if varying:
        figures.append(_slices(varying, _spread(done, MAX_POINTS), dots, named))
    return figures


def _slices(
    keys: Sequence[str], trials: Sequence[Trial], dots: dict[str, Any], named: dict[str, Any]
) -> dict[str, Any]:
    """Return the values over each parameter, side by side."""
    traces = []
    grid = {"rows": 1, "columns": len(keys), "pattern": "coupled"}
    layout = {**named, "grid": grid, "showlegend": False}
    for number, key in enumerate(keys, 1):
        known = [trial for trial in trials if key in trial.point]
        x = [trial.point[key] for trial in known]
        scale = _scale(x)
        axis = f"{number if number > 1 else ''}"
        layout[f"xaxis{axis}"] = {"title": {"text": key}, "type": scale}
        trace = {"x": [*map(to_label, x)] if scale == "category" else x, "xaxis": f"x{axis}"}
        marker = {"color": [trial.number for trial in known]}
        traces.append({**dots, **trace, "y": [trial.value for trial in known], "marker": marker})
    return _figure("Slices", traces, layout)


def _figure(title: str, data: list[dict[str, Any]], layout: dict[str, Any]) -> dict[str, Any]:
    return {"title": title, "figure": {"data": data, "layout": layout}}


def _spread(trials: Sequence[Trial], limit: int) -> Sequence[Trial]:
    """Return at most this many trials, evenly spread."""
    return trials[:: -(-len(trials) // limit)]


def _scale(values: Sequence[object]) -> str:
    """Return the kind of axis for a parameter: few different values count as a choice."""
    numbers = {number for value in values if (number := as_number(value)) is not None}
    if len({*map(to_label, values)}) <= MAX_CATEGORIES or len(numbers) < len({*map(str, values)}):
        return "category"
    return "log" if min(numbers) > 0 and max(numbers) / min(numbers) >= WIDE else "linear"


def _column(key: str, values: Sequence[Any]) -> dict[str, Any]:
    """Return an axis of parallel coordinates."""
    scale = _scale(values)
    if scale == "category":
        names = [*dict.fromkeys(map(to_label, sorted(values, key=comparable)))]
        places = [names.index(to_label(value)) for value in values]
        ticks = {"tickvals": [*range(len(names))], "ticktext": names}
        return {"label": key, "values": places, **ticks}
    if scale == "log":
        return {"label": f"log10 {key}", "values": [math.log10(value) for value in values]}
    return {"label": key, "values": values}
