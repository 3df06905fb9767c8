"""A sweep as an object for JSON (what the browser and a report show), with Optuna's figures and
importances, and as CSV.

Optuna draws studies, so the trials of any sweep, also a grid, become one in memory.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from paceline.contract.sweep_folder import DONE, PRUNED
from paceline.errors import EnvironmentProblem
from paceline.sweep.overview import make_sweep_overview
from paceline.sweep.results import (
    Row,
    Sweep,
    Trial,
    best_first,
    comparable,
    finished,
    has_repeats,
    rows,
)
from paceline.watch.details import flatten, read_config
from paceline.watch.latest import as_number

MAX_TRIALS = 2000  # in one answer; `sweep show --csv` writes all
MAX_COLUMNS = 20  # of settings that differ
MAX_POINTS = 500  # trials in a figure with one dot for each and parameter
MAX_LINES = 150  # trials in parallel coordinates, which have one line for each
MAX_PARAMETERS = 10
MAX_CATEGORIES = 10  # up to this many different values count as a choice
WIDE = 500  # times the smallest value: a range of numbers so wide has a log scale
LEFT_OUT = ("template", "title", "width", "height")  # the page has its own
MIN_EVALUATED, MAX_EVALUATED = 8, 2000  # trials for importances; with fewer, they would be noise
BEST = 0.2  # the share of trials that count as good
BEFORE, AFTER = ("number", "state", "value"), ("seed", "seconds", "folder", "error")


def describe_trials(sweep: Sweep) -> dict[str, Any]:
    """Return a sweep with its trials and its figures.

    `rows` has one entry per point, best first: a trial, or its trials with several seeds.
    `settings` are those that all scripts have passed to `run.config`; those that differ stand in
    the rows as `config`.
    """
    ordered = best_first(sweep, rows(sweep))
    listed = [_row(row) for row in ordered[:MAX_TRIALS]]
    settings = _divide_configs(sweep, listed, ordered)
    try:
        figures, note = make_figures(sweep), ""
    except EnvironmentProblem as problem:  # the rest of the page works without Optuna
        figures, note = [], f"{problem.message} {problem.hint}"
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
        "settings": settings,
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


def _divide_configs(
    sweep: Sweep, listed: Sequence[dict[str, Any]], ordered: Sequence[Row]
) -> dict[str, Any]:
    """Return what all scripts have passed to `run.config`, and put what differs into the rows."""
    for entry, row in zip(listed, ordered, strict=False):
        found = (flatten(read_config(trial.folder)) for trial in row.trials)
        config = next((each for each in found if each), {})  # of the first seed that has any
        entry["config"] = {name: value for name, value in config.items() if name not in sweep.keys}
    known = [entry["config"] for entry in listed if entry["config"]]
    names = list(dict.fromkeys(name for config in known for name in config))
    same = {
        name: known[0][name]
        for name in names
        if all(name in config and config[name] == known[0].get(name) for config in known)
    }
    varying = [name for name in names if name not in same][:MAX_COLUMNS]
    for entry in listed:
        entry["config"] = {name: entry["config"].get(name) for name in varying}
    return same


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
    """Return `{"title", "figure"}` for each figure that the trials allow. Raises
    EnvironmentProblem without Optuna or Plotly.
    """
    optuna = import_optuna()
    done = finished(sweep.trials)
    if not done:
        return []
    shares = importances(sweep)
    names = [*shares, *(key for key in sweep.keys if key not in shares)][:MAX_PARAMETERS]
    varying = [key for key in names if len({str(trial.point.get(key)) for trial in done}) > 1]
    everywhere = [key for key in varying if all(key in trial.point for trial in done)]
    draw, aim = optuna.visualization, {"target_name": sweep.metric}
    figures = []

    def add(title: str, make: Callable[[], Any]) -> None:
        # Optuna cannot draw every set of trials, such as those of one equal value.
        with contextlib.suppress(ValueError, ZeroDivisionError, RuntimeError):
            figure = json.loads(make().to_json())
            layout = {name: each for name, each in figure["layout"].items() if name not in LEFT_OUT}
            if figure["data"]:
                entry = {"data": figure["data"], "layout": layout}
                figures.append({"title": title, "figure": entry})

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some are experimental
        whole = make_study(optuna, sweep, sweep.trials, [])
        add("History", lambda: _numbered(draw.plot_optimization_history(whole, **aim), sweep))
        if shares:
            labels, widths = [*shares][::-1], [*shares.values()][::-1]
            bars = {"type": "bar", "orientation": "h", "x": widths, "y": labels}
            layout = {"xaxis": {"title": {"text": "Share of the differences"}}}
            figure = {"data": [bars], "layout": layout}
            figures.append({"title": "Importance", "figure": figure})
        if everywhere:
            few = make_study(optuna, sweep, sample(done, sweep.maximizes, MAX_LINES), varying)
            add(
                "Parallel coordinates",
                lambda: draw.plot_parallel_coordinate(few, params=everywhere, **aim),
            )
        if varying:
            dots = sample(done, sweep.maximizes, MAX_POINTS)
            some = make_study(optuna, sweep, dots, varying)
            add("Slices", lambda: _coloured(draw.plot_slice(some, params=varying, **aim), dots))
    return figures


def _coloured(figure: Any, trials: Sequence[Trial]) -> Any:
    """Colour dots by the numbers of their trials: Optuna numbers those of a study anew."""
    for trace in figure.data:
        trace.marker.color = [trials[int(number)].number for number in trace.marker.color]
    return figure


def _numbered(figure: Any, sweep: Sweep) -> Any:
    """Put dots above the numbers of their trials, of which some may be missing."""
    for trace in figure.data:
        if trace.x is not None:
            trace.x = [sweep.trials[int(number)].number for number in trace.x]
    return figure


def importances(sweep: Sweep) -> dict[str, float]:
    """Return how much each parameter of all trials matters, by Optuna's PED-ANOVA over those that
    ended with a value: shares that add up to 1, largest first; empty if there are too few trials.

    It compares each parameter's distribution among the best trials with that among all, and needs
    no other package.
    """
    trials = sample(finished(sweep.trials), sweep.maximizes, MAX_EVALUATED)
    keys = [key for key in sweep.keys if all(key in trial.point for trial in trials)]
    keys = [key for key in keys if len({_plain(trial.point[key]) for trial in trials}) > 1]
    if len(trials) < MIN_EVALUATED or not keys:
        return {}
    optuna = import_optuna()
    study = make_study(optuna, sweep, trials, keys)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the evaluator is experimental
        evaluator = optuna.importance.PedAnovaImportanceEvaluator(
            target_quantile=max(BEST, 3 / len(trials))
        )
        return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))


def import_optuna() -> Any:
    try:
        import optuna
        import plotly  # noqa: F401
    except ImportError as problem:
        raise EnvironmentProblem(
            f"Importances and figures of a sweep need {problem.name}, which is not installed here.",
            hint='Install it with `pip install "paceline[sweep,ui]"`.',
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def make_study(optuna: Any, sweep: Sweep, trials: Sequence[Trial], keys: Sequence[str]) -> Any:
    """Return a study with these parameters. Trials without a value count as failed: the others
    keep their numbers.
    """
    spread = {key: _distribution(optuna, sweep, key, trials) for key in keys}
    study = optuna.create_study(direction="maximize" if sweep.maximizes else "minimize")
    study.add_trials([_frozen(optuna, trial, spread) for trial in trials])
    return study


def sample(trials: Sequence[Trial], maximizes: bool, limit: int) -> list[Trial]:
    """Return at most this many trials, evenly spread over all ranks."""
    if len(trials) <= limit:
        return list(trials)
    ordered = sorted(trials, key=lambda trial: (trial.value or 0.0) * (-1 if maximizes else 1))
    step = len(ordered) / limit
    chosen = [ordered[int(index * step)] for index in range(limit)]
    return sorted(chosen, key=lambda trial: trial.number)


def _plain(value: object) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _distribution(optuna: Any, sweep: Sweep, key: str, trials: Sequence[Trial]) -> Any:
    """Return a parameter's distribution: a range for many numbers, else a choice."""
    known = [trial.point[key] for trial in trials if trial.point.get(key) is not None]
    distinct = {_plain(value) for value in known}
    numbers = [number for value in known if (number := as_number(value)) is not None]
    if len(numbers) < len(known) or len(distinct) <= MAX_CATEGORIES:
        return optuna.distributions.CategoricalDistribution(sorted(distinct, key=comparable))
    low, high = min(numbers), max(numbers)
    log = sweep.is_log(key)
    is_log = low > 0 and (high / low >= WIDE if log is None else log)
    return optuna.distributions.FloatDistribution(low, high, log=is_log)


def _frozen(optuna: Any, trial: Trial, spread: dict[str, Any]) -> Any:
    values, used = {}, {}
    for key, distribution in spread.items():
        value = trial.point.get(key)
        if value is None:
            continue
        used[key] = distribution
        is_choice = isinstance(distribution, optuna.distributions.CategoricalDistribution)
        values[key] = _plain(value) if is_choice else float(value)
    states, shown = optuna.trial.TrialState, {"params": values, "distributions": used}
    if trial.value is None or trial.state not in (DONE, PRUNED):
        return optuna.trial.create_trial(state=states.FAIL, **shown)
    if trial.state == PRUNED:
        reports = {trial.step or 0: trial.value}
        return optuna.trial.create_trial(state=states.PRUNED, intermediate_values=reports, **shown)
    return optuna.trial.create_trial(value=trial.value, **shown)
