"""The trials of a sweep as an Optuna study in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.contract.sweep.folder import DONE, PRUNED
from paceline.errors import EnvironmentProblem
from paceline.sweep.report.numbers import MAX_CATEGORIES, as_number, wide
from paceline.sweep.results import Sweep, Trial


def import_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise EnvironmentProblem(
            "Importances and figures of a sweep need Optuna, which is not installed here.",
            hint='Install it with `pip install "paceline[sweep]"`.',
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
    """Return at most this many trials, best first, evenly spread over all ranks."""
    ordered = sorted(trials, key=lambda trial: (trial.value or 0.0) * (-1 if maximizes else 1))
    if len(ordered) <= limit:
        return ordered
    step = len(ordered) / limit
    return [ordered[int(index * step)] for index in range(limit)]


def plain(value: object) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _distribution(optuna: Any, sweep: Sweep, key: str, trials: Sequence[Trial]) -> Any:
    """Return a parameter's distribution: a range for many numbers, else a choice."""
    known = [trial.point[key] for trial in trials if trial.point.get(key) is not None]
    distinct = {plain(value) for value in known}
    numbers = [number for value in known if (number := as_number(value)) is not None]
    if len(numbers) < len(known) or len(distinct) <= MAX_CATEGORIES:
        return optuna.distributions.CategoricalDistribution(sorted(distinct, key=_order))
    low, high = min(numbers), max(numbers)
    log = sweep.is_log(key)
    return optuna.distributions.FloatDistribution(
        low, high, log=low > 0 and (wide(low, high) if log is None else log)
    )


def _order(value: object) -> tuple[int, float, str]:
    number = as_number(value)
    return (0, number, "") if number is not None else (1, 0.0, str(value))


def _frozen(optuna: Any, trial: Trial, spread: dict[str, Any]) -> Any:
    values, used = {}, {}
    for key, distribution in spread.items():
        value = trial.point.get(key)
        if value is None:
            continue
        used[key] = distribution
        is_choice = isinstance(distribution, optuna.distributions.CategoricalDistribution)
        values[key] = plain(value) if is_choice else float(value)
    if trial.value is None or trial.state not in (DONE, PRUNED):
        return optuna.trial.create_trial(
            state=optuna.trial.TrialState.FAIL, params=values, distributions=used
        )
    if trial.state == PRUNED:
        state = optuna.trial.TrialState.PRUNED
        reports = {trial.step or 0: trial.value}
        return optuna.trial.create_trial(
            state=state, params=values, distributions=used, intermediate_values=reports
        )
    return optuna.trial.create_trial(params=values, distributions=used, value=trial.value)
