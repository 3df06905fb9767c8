"""The importance of each parameter, by Optuna's PED-ANOVA over trials that ended with a value.

It compares each parameter's distribution among the best trials with that among all. It needs no other package, and
handles parameters that only some trials have.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

from paceline.errors import EnvironmentProblem
from paceline.sweep.report.axes import MAX_CATEGORIES, as_number, wide
from paceline.sweep.results import Sweep, Trial, finished

MIN_TRIALS = 8  # with fewer, importances would be noise
MAX_TRIALS = 2000  # to evaluate, evenly spread over all ranks
BEST = 0.2  # the share of trials that count as good


def importances(sweep: Sweep) -> dict[str, float]:
    """Return shares that add up to 1, largest first; empty if there are too few trials."""
    trials = _sample(finished(sweep.trials), sweep.maximizes)
    keys = [key for key in sweep.keys if len({_plain(trial.point.get(key)) for trial in trials}) > 1]
    if len(trials) < MIN_TRIALS or not keys:
        return {}
    optuna = _optuna()
    spread = {key: _distribution(optuna, sweep, key, trials) for key in keys}
    study = optuna.create_study(direction="maximize" if sweep.maximizes else "minimize")
    study.add_trials([_frozen(optuna, trial, spread) for trial in trials])
    found: dict[str, float] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the evaluator is experimental
        quantile = max(BEST, 3 / len(trials))
        evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=quantile)
        for group in _groups(trials, keys):
            found |= optuna.importance.get_param_importances(study, evaluator=evaluator, params=group, normalize=False)
    total = sum(found.values())
    if not total or not math.isfinite(total):
        return {}
    return dict(sorted(((key, share / total) for key, share in found.items()), key=lambda each: -each[1]))


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise EnvironmentProblem(
            "Importances need Optuna, which is not installed here.",
            hint='Install it with `pip install "paceline[sweep]"`.',
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _sample(trials: list[Trial], maximizes: bool) -> list[Trial]:
    ordered = sorted(trials, key=lambda trial: (trial.value or 0.0) * (-1 if maximizes else 1))
    if len(ordered) <= MAX_TRIALS:
        return ordered
    step = len(ordered) / MAX_TRIALS
    return [ordered[int(index * step)] for index in range(MAX_TRIALS)]


def _groups(trials: list[Trial], keys: list[str]) -> list[list[str]]:
    """Group parameters that the same trials have: Optuna only uses trials that have all parameters of a query."""
    groups: dict[tuple[bool, ...], list[str]] = {}
    for key in keys:
        groups.setdefault(tuple(key in trial.point for trial in trials), []).append(key)
    return list(groups.values())


def _distribution(optuna: Any, sweep: Sweep, key: str, trials: list[Trial]) -> Any:
    """Return a parameter's distribution: a range for many numbers, else a choice."""
    known = [trial.point[key] for trial in trials if trial.point.get(key) is not None]
    distinct = {_plain(value) for value in known}
    numbers = [number for value in known if (number := as_number(value)) is not None]
    if len(numbers) < len(known) or len(distinct) <= MAX_CATEGORIES:
        return optuna.distributions.CategoricalDistribution(sorted(distinct, key=str))
    low, high = min(numbers), max(numbers)
    log = sweep.is_log(key)
    return optuna.distributions.FloatDistribution(low, high, log=low > 0 and (wide(low, high) if log is None else log))


def _frozen(optuna: Any, trial: Trial, spread: dict[str, Any]) -> Any:
    values, used = {}, {}
    for key, distribution in spread.items():
        value = trial.point.get(key)
        if value is None:
            continue
        used[key] = distribution
        is_choice = isinstance(distribution, optuna.distributions.CategoricalDistribution)
        values[key] = _plain(value) if is_choice else float(value)
    return optuna.trial.create_trial(params=values, distributions=used, value=trial.value)


def _plain(value: object) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
