"""A sweep as an object for JSON: what the browser and a report show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import EnvironmentProblem
from paceline.sweep.overview import sweep_status
from paceline.sweep.report.configs import read_configs
from paceline.sweep.report.figures import make_figures
from paceline.sweep.report.rows import Row, best_first, has_repeats, rows
from paceline.sweep.results import Sweep, Trial

MAX_TRIALS = 2000  # in one answer; `sweep show --csv` writes all


def describe_sweep(sweep: Sweep) -> dict[str, Any]:
    """Return the facts of a sweep, without its trials."""
    path = sweep.folder.path
    best = next((row for row in best_first(sweep, rows(sweep)) if row.counts), None)
    return {
        "name": sweep.name,
        "project": path.parent.parent.name,
        "experiment": path.parent.name,
        "path": str(path),
        "metric": sweep.metric,
        "direction": "maximize" if sweep.maximizes else "minimize",
        "sampler": _text(sweep.spec, "sampler"),
        "pruner": _text(sweep.spec, "prune"),
        "counts": sweep.counts,
        "status": sweep_status(sweep.counts),
        "best": None if best is None else _row(best),
    }


def describe_trials(sweep: Sweep) -> dict[str, Any]:
    """Return the facts of a sweep with its trials and its figures.

    `rows` has one entry per point, best first: a trial, or its trials with several seeds.
    `settings` are those that all scripts have passed to `run.config`; those that differ stand in
    the rows as `config`.
    """
    ordered = best_first(sweep, rows(sweep))
    configs = read_configs(sweep, ordered[:MAX_TRIALS])
    try:
        figures, note = make_figures(sweep), ""
    except EnvironmentProblem as problem:  # the rest of the page works without Optuna
        figures, note = [], f"{problem.message} {problem.hint}"
    return {
        **describe_sweep(sweep),
        "keys": sweep.keys,
        "has_repeats": has_repeats(sweep),
        "rows": [
            {**_row(row), "config": {name: configs.value(row, name) for name in configs.varying}}
            for row in ordered[:MAX_TRIALS]
        ],
        "trials": [_trial(trial) for trial in sweep.trials[:MAX_TRIALS]],
        "settings": dict(configs.common),
        "figures": figures,
        "note": note,
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


def _trial(trial: Trial) -> dict[str, Any]:
    return {
        "number": trial.number,
        "group": trial.group,
        "state": trial.state,
        "value": trial.value,
        "point": trial.point,
        "seed": trial.seed,
        "seconds": trial.seconds,
        "step": trial.step,
        "error": trial.error,
        "job": trial.job,
    }


def _text(spec: Mapping[str, Any], key: str) -> str:
    value = spec.get(key)
    return value if isinstance(value, str) else ""
