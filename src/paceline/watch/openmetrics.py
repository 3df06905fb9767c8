"""A run's numbers in the OpenMetrics text format, which monitoring systems read.

Only gauges and counters are used, so that the textfile collector of Prometheus' node exporter,
which reads the older format, understands the same text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.contract.files.foreign_records import parse_object, read_tail
from paceline.contract.run_folder import ALONE
from paceline.watch.details import RunDetails

TAIL = 65536  # bytes at the end of a metrics file
NOT_METRICS = frozenset({"step", "epoch", "time"})
MAX_METRICS = 500  # of a run
MAX_LABEL = 200  # characters


@dataclass
class _Family:
    """A metric with all its samples, which must stand together."""

    name: str
    kind: str  # gauge or counter
    help: str
    unit: str = ""
    samples: list[tuple[dict[str, str], float]] = field(default_factory=list)

    def add(self, value: float | None, **labels: object) -> None:
        if value is not None:
            self.samples.append(({name: str(text) for name, text in labels.items()}, float(value)))

    def lines(self) -> Iterable[str]:
        if not self.samples:
            return
        yield f"# TYPE {self.name} {self.kind}"
        if self.unit:
            yield f"# UNIT {self.name} {self.unit}"
        yield f"# HELP {self.name} {self.help}"
        suffix = "_total" if self.kind == "counter" else ""
        for labels, value in self.samples:
            text = ",".join(f'{name}="{_escape(label)}"' for name, label in labels.items())
            yield f"{self.name}{suffix}{{{text}}} {_number(value)}"


def write_openmetrics(runs: Iterable[tuple[RunDetails, Mapping[str, float]]]) -> str:
    """Return the metrics of runs, each with its newest logged numbers (see `read_last_values`)."""
    families = {
        "info": _Family("paceline_run_info", "gauge", "What a run is. The value is always 1."),
        "step": _Family("paceline_run_step", "gauge", "How many steps the run has done."),
        "total": _Family(
            "paceline_run_steps_planned", "gauge", "How many steps the run will have in all."
        ),
        "left": _Family(
            "paceline_run_left_seconds",
            "gauge",
            "Estimated seconds of training left at the current pace.",
            "seconds",
        ),
        "value": _Family(
            "paceline_run_metric",
            "gauge",
            "The newest value of a metric that the run logs, by name.",
        ),
        "time": _Family(
            "paceline_run_time_seconds",
            "gauge",
            "Where the run's wall time went, by category and part.",
            "seconds",
        ),
        "goodput": _Family(
            "paceline_run_goodput_ratio",
            "gauge",
            "The share of the wall time that went into steps that count.",
            "ratio",
        ),
        "attempts": _Family(
            "paceline_run_attempts", "counter", "How often the run's ranks were started."
        ),
        "failures": _Family("paceline_run_failures", "counter", "How often the run has failed."),
        "saved": _Family(
            "paceline_run_checkpoint_step", "gauge", "The step of the newest complete checkpoint."
        ),
    }
    for details, values in runs:
        _add(families, details, values)
    lines = [line for family in families.values() for line in family.lines()]
    return "\n".join([*lines, "# EOF", ""])


def _add(families: Mapping[str, _Family], details: RunDetails, values: Mapping[str, float]) -> None:
    row, goodput = details.overview, details.goodput
    run = row.key
    families["info"].add(
        1,
        run=run,
        name=row.name,
        project=row.project,
        experiment=row.experiment,
        job=row.job,
        status=row.status,
    )
    families["step"].add(row.step, run=run)
    families["total"].add(row.total_steps, run=run)
    families["left"].add(row.seconds_left, run=run)
    for name, value in values.items():
        families["value"].add(value, run=run, metric=name)
    for category, seconds in goodput.seconds.items():
        parts = goodput.parts.get(category) or {"": seconds}
        for part, each in parts.items():
            families["time"].add(each, run=run, category=category, part=part)
    families["goodput"].add(row.goodput, run=run)
    families["attempts"].add(row.attempts, run=run)
    families["failures"].add(goodput.failures, run=run)
    families["saved"].add(max((each.step for each in details.checkpoints), default=None), run=run)


def read_last_values(metrics: Path) -> dict[str, float]:
    """Return the newest value of each number in the end of a metrics file."""
    found: dict[str, Any] = {}
    with suppress(OSError):
        for line in read_tail(metrics, TAIL).splitlines():
            with suppress(ValueError):
                record = parse_object(line)
                found |= {} if ALONE in record else record
    numbers = {
        name: float(value)
        for name, value in found.items()
        if name not in NOT_METRICS
        and isinstance(value, int | float)
        and not isinstance(value, bool)
    }
    return dict(list(numbers.items())[:MAX_METRICS])


def _escape(label: str) -> str:
    text = "".join(
        each if each.isprintable() or each == "\n" else "\ufffd" for each in label[:MAX_LABEL]
    )
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)
