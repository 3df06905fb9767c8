"""A sweep's Optuna study: TPE chooses points, and trials share their reports. Optuna is imported on
first use.

All processes of a sweep share one append-only journal file under a lock that is safe on NFS. There
is no server.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.contract.run_folder import write_atomically
from paceline.contract.sweep.folder import FAILED, PRUNED, Search, SweepFolder, is_active
from paceline.errors import EnvironmentProblem

LOCK_TIMEOUT = 120.0  # seconds that a trial waits for another that requests the same point
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
    # A run that resumes from a checkpoint may report the same step again.
    warnings.filterwarnings("ignore", message="The reported value is ignored")
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
        sampler=sampler or optuna.samplers.RandomSampler(),
    )


# -- points
# ----------------------------------------------------------------------------------------------


def point_of_group(
    sweep: SweepFolder, search: Search, group: int, *, point: dict[str, Any] | None, shared: bool
) -> tuple[dict[str, Any], int]:
    """Return a group's point and its trial number in the study. The first trial of the group
    requests it.

    If `point` is known, the study has it for its reports alone. `shared`: several trials (seeds)
    have this point, and may start at the same time.
    """
    path = sweep.chosen_point(group) if point is None else sweep.study_number(group)
    path.parent.mkdir(exist_ok=True)
    with _lock(path) if shared else contextlib.nullcontext():
        known = _read(path)
        if known is not None and not is_finished(sweep, search, known["optuna"]):
            return known["point"], known["optuna"]
        if point is not None:
            number = _start_trial(sweep, search, group)
        else:
            point, number = _choose_point(
                sweep, search, group, point=known["point"] if known else None
            )
        write_atomically(path, json.dumps({"point": point, "optuna": number}) + "\n")
        return point, number


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Let one trial at a time run the body. A lock whose holder died is broken after a while."""
    lock = path.with_suffix(".lock")
    deadline = time.monotonic() + LOCK_TIMEOUT
    while True:
        try:
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            break
        except FileExistsError:
            if time.monotonic() > deadline:
                with contextlib.suppress(OSError):
                    os.unlink(lock)
                deadline = time.monotonic() + LOCK_TIMEOUT
            time.sleep(0.1)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(lock)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found


def _choose_point(
    sweep: SweepFolder, search: Search, group: int, *, point: dict[str, Any] | None
) -> tuple[dict[str, Any], int]:
    """Start a new trial of the study, with the sampler's choice or with a given point."""
    optuna = import_optuna()
    # Every trial has a sampler in a process of its own: with a common seed they would all choose
    # the same points.
    seed = zlib.crc32(f"{search.seed}/{group}".encode())
    # Running trials count as bad ones, so that concurrent trials try different points
    # (constant_liar). Keys are sampled jointly; those that only some points have form separate
    # groups.
    sampler = optuna.samplers.TPESampler(
        n_startup_trials=STARTUP_TRIALS,
        constant_liar=True,
        multivariate=True,
        group=True,
        seed=seed,
    )
    if point is not None:
        fixed = {key: _to_choice(value) for key, value in point.items()}
        sampler = optuna.samplers.PartialFixedSampler(fixed, sampler)
    study = open_study(sweep, search, sampler=sampler)
    trial = study.ask()
    trial.set_user_attr("group", group)
    return suggest(trial, search.space), trial.number


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


# -- trials
# ----------------------------------------------------------------------------------------------


def _start_trial(sweep: SweepFolder, search: Search, group: int) -> int:
    """Start a trial whose point is known. Return its number in the study."""
    trial = open_study(sweep, search).ask()
    trial.set_user_attr("group", group)
    known: int = trial.number
    return known


def is_finished(sweep: SweepFolder, search: Search, known: int) -> bool:
    """Return whether the study knows the end of a trial, and so takes no more reports of it."""
    study = open_study(sweep, search)
    trials = study.get_trials(deepcopy=False)
    return known >= len(trials) or bool(trials[known].state.is_finished())


def finish_trial(
    sweep: SweepFolder, search: Search, known: int, *, state: str, value: float | None
) -> None:
    """Record how a trial ended, unless the study already knows."""
    optuna = import_optuna()
    study = open_study(sweep, search)
    states = optuna.trial.TrialState
    if state == PRUNED:
        study.tell(known, state=states.PRUNED, skip_if_finished=True)
    elif state == FAILED or value is None:
        study.tell(known, state=states.FAIL, skip_if_finished=True)
    else:
        study.tell(known, value, skip_if_finished=True)
