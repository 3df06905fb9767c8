"""Optuna's own Plotly figures of a sweep: history, importance, parallel coordinates, slices.

Optuna draws studies, so the trials of any sweep, also a grid, become one in memory.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from paceline.errors import EnvironmentProblem
from paceline.sweep.report.importance import importances
from paceline.sweep.report.study import import_optuna, make_study, sample
from paceline.sweep.results import Sweep, Trial, finished

MAX_POINTS = 500  # trials in a figure with one dot for each and parameter
MAX_HISTORY = 4000  # trials in the history
MAX_LINES = 150  # trials in parallel coordinates, which have one line for each
MAX_PARAMETERS = 10
LEFT_OUT = ("template", "title", "width", "height")  # the page has its own


def make_figures(sweep: Sweep) -> list[dict[str, Any]]:
    """Return `{"title", "figure"}` for each figure that the trials allow. Raises
    EnvironmentProblem without Optuna.
    """
    optuna = import_optuna()
    _require_plotly()
    done = finished(sweep.trials)
    if not done:
        return []
    shares = importances(sweep)
    names = [*shares, *(key for key in sweep.keys if key not in shares)][:MAX_PARAMETERS]
    varying = [key for key in names if len({str(trial.point.get(key)) for trial in done}) > 1]
    everywhere = [key for key in varying if all(key in trial.point for trial in done)]
    draw = optuna.visualization
    few = make_study(optuna, sweep, sample(done, sweep.maximizes, MAX_LINES), varying)
    dots = sample(done, sweep.maximizes, MAX_POINTS)
    some = make_study(optuna, sweep, dots, varying)
    history = sweep.trials[:: 1 + len(sweep.trials) // MAX_HISTORY]
    whole = make_study(optuna, sweep, history, [])
    known = _KnownImportance(optuna, shares) if shares else None
    drawn = [
        _figure(
            "History",
            lambda: _number_axis(
                draw.plot_optimization_history(whole, target_name=sweep.metric), history
            ),
        )
    ]
    if known is not None:
        drawn.append(
            _figure(
                "Importance", lambda: draw.plot_param_importances(some, evaluator=known.evaluator)
            )
        )
    if len(everywhere) > 0:
        drawn.append(
            _figure(
                "Parallel coordinates",
                lambda: draw.plot_parallel_coordinate(
                    few, params=everywhere, target_name=sweep.metric
                ),
            )
        )
    if varying:
        drawn.append(
            _figure(
                "Slices",
                lambda: _number_colours(
                    draw.plot_slice(some, params=varying, target_name=sweep.metric), dots
                ),
            )
        )
    return [figure for figure in drawn if figure]


class _KnownImportance:
    """Lets Optuna draw importances that have been computed, instead of computing them again."""

    def __init__(self, optuna: Any, shares: dict[str, float]) -> None:
        class Evaluator(optuna.importance.BaseImportanceEvaluator):  # type: ignore[misc]
            def evaluate(
                self, study: Any, params: Sequence[str] | None = None, **_: Any
            ) -> dict[str, float]:
                return dict(shares)

        self.evaluator = Evaluator()


def _number_colours(figure: Any, trials: Sequence[Trial]) -> Any:
    """Colour dots by the numbers of their trials: Optuna numbers those of a study anew."""
    for trace in figure.data:
        trace.marker.color = [trials[int(number)].number for number in trace.marker.color]
    return figure


def _number_axis(figure: Any, trials: Sequence[Trial]) -> Any:
    """Put dots above the numbers of their trials."""
    for trace in figure.data:
        if trace.x is not None:
            trace.x = [trials[int(number)].number for number in trace.x]
    return figure


def _figure(title: str, draw: Callable[[], Any]) -> dict[str, Any]:
    """Return a figure as the page takes it; empty if Optuna cannot draw it, such as for one equal
    value.
    """
    with (
        warnings.catch_warnings(),
        contextlib.suppress(ValueError, ZeroDivisionError, RuntimeError),
    ):
        warnings.simplefilter("ignore")  # some are experimental
        figure = json.loads(draw().to_json())
        layout = {
            key: value for key, value in figure.get("layout", {}).items() if key not in LEFT_OUT
        }
        return (
            {"title": title, "figure": {"data": figure["data"], "layout": layout}}
            if figure["data"]
            else {}
        )
    return {}


def _require_plotly() -> None:
    try:
        import plotly  # noqa: F401
    except ImportError:
        raise EnvironmentProblem(
            "Figures of a sweep need Plotly, which is not installed here.",
            hint='Install it with `pip install "paceline[ui]"`.',
        ) from None
