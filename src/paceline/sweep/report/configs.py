"""What the scripts of a sweep's trials have passed to `run.config`, besides the sweep's own
parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.sweep.report.rows import Row
from paceline.sweep.results import Sweep
from paceline.watch.details import flatten, read_config

MAX_COLUMNS = 20


@dataclass(frozen=True)
class Configs:
    common: Mapping[str, Any]  # settings that are the same in all trials
    varying: Sequence[str]  # names of the others
    by_number: Mapping[int, Mapping[str, Any]]  # of each row

    def value(self, row: Row, name: str) -> Any:
        return self.by_number[row.number].get(name)


def read_configs(sweep: Sweep, listed: Sequence[Row]) -> Configs:
    """Read the settings of rows; of several seeds, those of the first that has any."""
    found = {row.number: _read(sweep, row) for row in listed}
    known = [config for config in found.values() if config]
    names = list(dict.fromkeys(name for config in known for name in config))
    common = {
        name: known[0][name]
        for name in names
        if all(name in config and config[name] == known[0].get(name) for config in known)
    }
    return Configs(common, [name for name in names if name not in common][:MAX_COLUMNS], found)


def _read(sweep: Sweep, row: Row) -> dict[str, Any]:
    for trial in row.trials:
        if config := flatten(read_config(trial.folder)):
            return {name: value for name, value in config.items() if name not in sweep.keys}
    return {}
