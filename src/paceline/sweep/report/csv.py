"""A sweep's trials as CSV: one line per trial, one column per parameter and per setting in
`run.config`.
"""

from __future__ import annotations

import csv
import io
import json

from paceline.sweep.results import Sweep, Trial
from paceline.watch.details import flatten, read_config

BEFORE, AFTER = ("number", "state", "value"), ("seed", "seconds", "folder", "error")


def columns(sweep: Sweep) -> dict[str, str]:
    """Return each parameter's column name. One that equals another column's gets a prefix."""
    taken = {*BEFORE, *AFTER}
    return {key: f"parameter {key}" if key in taken else key for key in sweep.keys}


def to_csv(sweep: Sweep) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    named = columns(sweep)
    configs = {trial.number: flatten(read_config(trial.folder)) for trial in sweep.trials}
    more = [
        name
        for name in dict.fromkeys(name for each in configs.values() for name in each)
        if name not in named
    ]
    writer.writerow([*BEFORE, *named.values(), *AFTER, *(f"config {name}" for name in more)])
    for trial in sweep.trials:
        config = configs[trial.number]
        writer.writerow([*_cells(trial, list(named)), *(_text(config.get(name)) for name in more)])
    return out.getvalue()


def _cells(trial: Trial, keys: list[str]) -> list[str]:
    return [
        str(trial.number),
        trial.state,
        _text(trial.value),
        *(_text(trial.point.get(key)) for key in keys),
        _text(trial.seed),
        "" if trial.seconds is None else f"{trial.seconds:.3f}",
        str(trial.folder.path),
        trial.error,
    ]


def _text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, default=str)
