"""The importance of each parameter, by Optuna's PED-ANOVA over trials that ended with a value.

It compares each parameter's distribution among the best trials with that among all. It needs no
other package, and handles parameters that only some trials have.
"""

from __future__ import annotations

import math
import warnings

from paceline.sweep.report.study import import_optuna, make_study, plain, sample
from paceline.sweep.results import Sweep, Trial, finished

MIN_TRIALS = 8  # with fewer, importances would be noise
MAX_TRIALS = 2000  # to evaluate, evenly spread over all ranks
BEST = 0.2  # the share of trials that count as good


def importances(sweep: Sweep) -> dict[str, float]:
    """Return shares that add up to 1, largest first; empty if there are too few trials."""
    trials = sample(finished(sweep.trials), sweep.maximizes, MAX_TRIALS)
    keys = [key for key in sweep.keys if len({plain(trial.point.get(key)) for trial in trials}) > 1]
    if len(trials) < MIN_TRIALS or not keys:
        return {}
    optuna = import_optuna()
    study = make_study(optuna, sweep, trials, keys)
    found: dict[str, float] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the evaluator is experimental
        quantile = max(BEST, 3 / len(trials))
        evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=quantile)
        for group in _groups(trials, keys):
            found |= optuna.importance.get_param_importances(
                study, evaluator=evaluator, params=group, normalize=False
            )
    total = sum(found.values())
    if not total or not math.isfinite(total):
        return {}
    return dict(
        sorted(((key, share / total) for key, share in found.items()), key=lambda each: -each[1])
    )


def _groups(trials: list[Trial], keys: list[str]) -> list[list[str]]:
    """Group parameters that the same trials have: Optuna only uses trials that have all parameters
    of a query.
    """
    groups: dict[tuple[bool, ...], list[str]] = {}
    for key in keys:
        groups.setdefault(tuple(key in trial.point for trial in trials), []).append(key)
    return list(groups.values())
