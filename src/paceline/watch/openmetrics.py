"""A run's numbers in the OpenMetrics text format, which monitoring systems read.

Only gauges and counters are used, so that the textfile collector of Prometheus' node exporter,
which reads the older format, understands the same text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from paceline.watch.details import RunDetails

MAX_METRICS = 500  # of a run
MAX_LABEL = 200  # characters
SPECIAL = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}
# Each metric, after `paceline_run_`: its kind, unit and help. All samples of one stand together.
METRICS = {
    "info": ("gauge", "", "What a run is. The value is always 1."),
    "step": ("gauge", "", "How many steps the run has done."),
    "steps_planned": ("gauge", "", "How many steps the run will have in all."),
    "left_seconds": ("gauge", "seconds", "Estimated seconds of training left at the current pace."),
    "metric": ("gauge", "", "The newest value of a metric that the run logs, by name."),
    "time_seconds": ("gauge", "seconds", "Where the run's wall time went, by category and part."),
    "goodput_ratio": (
        "gauge",
        "ratio",
        "The share of the wall time that went into steps that count.",
    ),
    "attempts": ("counter", "", "How often the run's ranks were started."),
    "failures": ("counter", "", "How often the run has failed."),
    "checkpoint_step": ("gauge", "", "The step of the newest complete checkpoint."),
}


def write_openmetrics(runs: Iterable[tuple[RunDetails, Mapping[str, Any]]]) -> str:
    """Return the metrics of runs, each with the values that it has logged last."""
    samples: dict[str, list[str]] = {name: [] for name in METRICS}
    for details, values in runs:
        for name, value, labels in _samples(details, values):
            if value is not None:
                named = {"run": details.overview.key, **labels}
                text = ",".join(f'{label}="{_escape(str(each))}"' for label, each in named.items())
                samples[name].append(f"{{{text}}} {SPECIAL.get(repr(value), repr(value))}")
    lines = []
    for name, (kind, unit, about) in METRICS.items():
        metric = f"paceline_run_{name}"
        if samples[name]:
            lines += [f"# TYPE {metric} {kind}", f"# HELP {metric} {about}"]
            lines += [f"# UNIT {metric} {unit}"] if unit else []
        suffix = "_total" if kind == "counter" else ""
        lines += [f"{metric}{suffix}{each}" for each in samples[name]]
    return "\n".join([*lines, "# EOF", ""])


def _samples(
    details: RunDetails, values: Mapping[str, Any]
) -> Iterator[tuple[str, float | None, dict[str, str]]]:
    row, goodput = details.overview, details.goodput
    labels = {name: getattr(row, name) for name in ("name", "project", "experiment", "job")}
    yield "info", 1, {**labels, "status": row.status}
    yield "step", row.step, {}
    yield "steps_planned", row.total_steps, {}
    yield "left_seconds", row.seconds_left, {}
    for name, value in list(values.items())[:MAX_METRICS]:
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield "metric", value, {"metric": name}
    for category, seconds in goodput.seconds.items():
        for part, each in (goodput.parts.get(category) or {"": seconds}).items():
            yield "time_seconds", each, {"category": category, "part": part}
    yield "goodput_ratio", row.goodput, {}
    yield "attempts", row.attempts, {}
    yield "failures", goodput.failures, {}
    saved = max((each.step for each in details.checkpoints), default=None)
    yield "checkpoint_step", saved, {}


def _escape(label: str) -> str:
    kept = (each if each.isprintable() or each == "\n" else "\ufffd" for each in label[:MAX_LABEL])
    return "".join(kept).replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
