"""The newest runs and sweeps of a scratch folder, each in one row."""

from __future__ import annotations

import time
from pathlib import Path

from paceline.contract.run_path import list_runs_and_sweeps
from paceline.contract.sweep.folder import SweepFolder
from paceline.sweep.overview import SweepOverview, read_sweep_overview
from paceline.watch.index import read_rows
from paceline.watch.overview import Overview

Row = Overview | SweepOverview


def read_newest(scratch: Path, limit: int | None) -> tuple[list[Row], int]:
    """Return the newest runs and sweeps, and how many are older."""
    found, sweep_paths = list_runs_and_sweeps(scratch)
    folders = {path: path.rpartition("/")[2] for path in found}
    sweeps = {path: SweepFolder(Path(path)) for path in sweep_paths}
    ages = folders | {path: _age(sweep) for path, sweep in sweeps.items()}
    newest = sorted(ages, key=ages.__getitem__, reverse=True)
    listed = newest if limit is None else newest[:limit]
    read = read_rows([path for path in listed if path in folders], scratch)
    rows: dict[str, Row] = {row.path: row for row in read}
    rows |= {path: read_sweep_overview(sweeps[path]) for path in listed if path in sweeps}
    return [rows[path] for path in listed], len(newest) - len(listed)


def _age(sweep: SweepFolder) -> str:
    """Return when a sweep began, as the ids of runs tell it."""
    try:
        began = sweep.spec.stat().st_mtime
    except OSError:
        began = 0.0
    return time.strftime("%Y%m%d-%H%M%S", time.localtime(began))
