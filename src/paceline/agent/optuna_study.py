"""A sweep's Optuna study: TPE chooses a point when its first trial starts, and learns how it ended.
Optuna is imported on first use.

All processes of a sweep share one append-only journal file under a lock that is safe on NFS. There
is no server.
"""

from __future__ import annotations

import json
import warnings
import zlib
from typing import Any

from paceline.contract.run_folder import write_atomically
from paceline.contract.sweep_folder import DONE, PRUNED, Search, SweepFolder, is_active
from paceline.errors import EnvironmentProblem

LOCK_TIMEOUT = 120  # seconds that a trial waits for another that requests the same point
STARTUP_TRIALS = 10  # random points before TPE starts


def import_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise EnvironmentProblem(
            "This sweep needs Optuna, which is not installed in the trial's Python.",
            hint="Install it there with `pip install optuna`.",
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna


def open_study(sweep: SweepFolder, search: Search, *, sampler: Any = None) -> Any:
    """Return the sweep's study; the first caller creates it."""
    optuna = import_optuna()
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock, JournalStorage

    path = str(sweep.journal)
    storage = JournalStorage(JournalFileBackend(path, lock_obj=JournalFileOpenLock(path)))
    return optuna.create_study(
        study_name=search.name,
        storage=storage,
        direction=search.direction,
        load_if_exists=True,
        sampler=sampler,
    )


def choose_point(sweep: SweepFolder, search: Search, group: int) -> tuple[dict[str, Any], int]:
    """Return a group's point and its trial number in the study. Its first trial requests it;
    further seeds, which may start at the same time, and later starts find it.
    """
    optuna = import_optuna()
    from optuna.storages.journal import JournalFileOpenLock

    path = sweep.chosen_point(group)
    path.parent.mkdir(exist_ok=True)
    # A lock whose holder died is broken after a while.
    lock = JournalFileOpenLock(str(path), grace_period=LOCK_TIMEOUT)
    lock.acquire()
    try:
        if not path.exists():
            # Running trials count as bad ones, so that concurrent trials try different points
            # (constant_liar). Keys are sampled jointly; those that only some points have form
            # separate groups. Every trial has a sampler in a process of its own: with a common
            # seed they would all choose the same points.
            sampler = optuna.samplers.TPESampler(
                n_startup_trials=STARTUP_TRIALS,
                constant_liar=True,
                multivariate=True,
                group=True,
                seed=zlib.crc32(f"{search.seed}/{group}".encode()),
            )
            trial = open_study(sweep, search, sampler=sampler).ask()
            chosen = {"point": suggest(trial, search.space), "optuna": trial.number}
            write_atomically(path, json.dumps(chosen) + "\n")
        known = json.loads(path.read_text(encoding="utf-8"))
    finally:
        lock.release()
    return known["point"], known["optuna"]


def suggest(trial: Any, space: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return a value for every key that applies. Keys follow the keys that their conditions
    name.
    """
    point: dict[str, Any] = {}
    for key, each in space.items():
        if not is_active(each.get("when", {}), point):
            continue
        if "grid" in each:
            known = {_to_choice(value): value for value in each["grid"]}
            point[key] = known[trial.suggest_categorical(key, list(known))]
        elif "integer" in each:
            low, high = each["integer"]
            point[key] = trial.suggest_int(key, low, high, step=each["step"], log=each["log"])
        else:
            kind = "uniform" if "uniform" in each else "log_uniform"
            point[key] = trial.suggest_float(key, *each[kind], log=kind == "log_uniform")
    return point


def _to_choice(value: Any) -> Any:
    """Return a value as a choice for Optuna: lists and booleans as text, because True equals 1."""
    return (
        value
        if isinstance(value, (int, float, str)) and not isinstance(value, bool)
        else json.dumps(value)
    )


def finish_trial(
    sweep: SweepFolder, search: Search, number: int, *, state: str, value: float | None
) -> None:
    """Tell the study how a point ended."""
    optuna, study = import_optuna(), open_study(sweep, search)
    states = optuna.trial.TrialState
    known = study.trials[number]
    if state == DONE and value is not None and known.state == states.FAIL:
        # It failed, and ran again: the study can't change an ended trial.
        study.add_trial(
            optuna.trial.create_trial(
                value=value, params=known.params, distributions=known.distributions
            )
        )
    elif state == DONE and value is not None:
        study.tell(number, value, skip_if_finished=True)
    else:
        ended = states.PRUNED if state == PRUNED else states.FAIL
        study.tell(number, state=ended, skip_if_finished=True)
