"""Optuna, where a sweep needs it: TPE chooses points, pruners end trials early. No torch; Optuna on first use.

All processes of a sweep share one journal, a file that is only ever appended to, under a lock that is safe on NFS.
There is no server.
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
from paceline.contract.sweep_folder import FAILED, PRUNED, Search, SweepFolder, is_active
from paceline.errors import EnvironmentProblem, RunError

PATIENCE = 120.0  # seconds that a trial waits for another that asks for the same point
STARTUP = 10  # trials at random before TPE has something to go by
HALVING = 3  # one of so many trials goes on at each rung


def import_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise EnvironmentProblem(
            "this sweep needs Optuna, and the trial's Python does not have it",
            hint="install it there: pip install optuna",
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    # A run that goes on from a checkpoint may come by the same step again.
    warnings.filterwarnings("ignore", message="The reported value is ignored")
    return optuna


def open_study(sweep: SweepFolder, search: Search, *, sampler: Any = None) -> Any:
    """The sweep's study; whoever comes first makes it."""
    optuna = import_optuna()
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock, JournalStorage

    path = str(sweep.journal)
    storage = JournalStorage(JournalFileBackend(path, lock_obj=JournalFileOpenLock(path)))
    after = search.prune_after
    pruners = {
        "halving": lambda: optuna.pruners.SuccessiveHalvingPruner(
            min_resource=after, reduction_factor=HALVING
        ),
        "median": lambda: optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=after),
        "none": optuna.pruners.NopPruner,
    }
    return optuna.create_study(
        study_name=search.name, storage=storage, direction=search.direction, load_if_exists=True,
        sampler=sampler or optuna.samplers.RandomSampler(), pruner=pruners[search.prune](),
    )  # fmt: skip


# -- points ----------------------------------------------------------------------------------------------


def point_of_group(
    sweep: SweepFolder, search: Search, group: int, *, shared: bool
) -> tuple[dict[str, Any], int]:
    """The point of a group, and the number of its trial in the study. The first that comes asks for it.

    `shared`: several trials (seeds) have it, and may come at the same time.
    """
    path = sweep.asked(group)
    path.parent.mkdir(exist_ok=True)
    with _alone(path) if shared else contextlib.nullcontext():
        known = _read(path)
        if known is not None and not _is_over(sweep, search, known["optuna"]):
            return known["point"], known["optuna"]
        point, number = _ask(sweep, search, group, point=known["point"] if known else None)
        write_atomically(path, json.dumps({"point": point, "optuna": number}) + "\n")
        return point, number


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One asks, others wait for what it is told. One that died while it asked is not waited for, in the end."""
    lock = path.with_suffix(".lock")
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            break
        except FileExistsError:
            if time.monotonic() > deadline:
                with contextlib.suppress(OSError):
                    os.unlink(lock)
                deadline = time.monotonic() + PATIENCE
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


def _ask(
    sweep: SweepFolder, search: Search, group: int, *, point: dict[str, Any] | None
) -> tuple[dict[str, Any], int]:
    """A new trial of the study: with a point of the sampler's choice, or with one that was tried before."""
    optuna = import_optuna()
    # Every trial asks in a process of its own: with one seed for all they would all be told the same at first.
    seed = zlib.crc32(f"{search.seed}/{group}".encode())
    # Trials that run count as bad ones: those side by side try different points.
    # Keys are looked at together; those that only some points have make groups of their own.
    sampler = optuna.samplers.TPESampler(
        n_startup_trials=STARTUP, constant_liar=True, multivariate=True, group=True, seed=seed
    )
    if point is not None:
        fixed = {key: _told(value) for key, value in point.items()}
        sampler = optuna.samplers.PartialFixedSampler(fixed, sampler)
    study = open_study(sweep, search, sampler=sampler)
    trial = study.ask()
    trial.set_user_attr("group", group)
    return suggest(trial, search.space), trial.number


def suggest(trial: Any, space: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A value for every key that applies; the space is in an order in which conditions are known when needed."""
    point: dict[str, Any] = {}
    for key, each in space.items():
        if not is_active(each.get("when", {}), point):
            continue
        if "grid" in each:
            known = {_told(value): value for value in each["grid"]}
            point[key] = known[trial.suggest_categorical(key, list(known))]
        elif "integer" in each:
            low, high = each["integer"]
            point[key] = trial.suggest_int(key, low, high, step=each["step"], log=each["log"])
        else:
            kind = "uniform" if "uniform" in each else "log_uniform"
            point[key] = trial.suggest_float(key, *each[kind], log=kind == "log_uniform")
    return point


def _told(value: Any) -> Any:
    """A value as Optuna takes it: lists, and numbers beside equal truth values, as texts."""
    return (
        value if isinstance(value, (int, float, str)) and not isinstance(value, bool) else json.dumps(value)
    )


# -- trials ----------------------------------------------------------------------------------------------


def begin(sweep: SweepFolder, search: Search, number: int) -> int:
    """A trial whose point is known: the study hears of its reports alone."""
    trial = open_study(sweep, search).ask()
    trial.set_user_attr("trial", number)
    known: int = trial.number
    return known


def is_over(sweep: SweepFolder, search: Search, known: int) -> bool:
    """Whether the study has been told the end of a trial: it takes no more reports of it."""
    return _is_over(sweep, search, known)


def _is_over(sweep: SweepFolder, search: Search, known: int) -> bool:
    study = open_study(sweep, search)
    trials = study.get_trials(deepcopy=False)
    return known >= len(trials) or bool(trials[known].state.is_finished())


def tell(sweep: SweepFolder, search: Search, known: int, *, state: str, value: float | None) -> None:
    """How a trial ended; one that has been told already stays as it is."""
    optuna = import_optuna()
    study = open_study(sweep, search)
    states = optuna.trial.TrialState
    if state == PRUNED:
        study.tell(known, state=states.PRUNED, skip_if_finished=True)
    elif state == FAILED or value is None:
        study.tell(known, state=states.FAIL, skip_if_finished=True)
    else:
        study.tell(known, value, skip_if_finished=True)


class Judge:
    """Asks the pruner, report by report. Held by rank 0 for as long as its session lives."""

    def __init__(self, sweep: SweepFolder, search: Search, known: int) -> None:
        optuna = import_optuna()
        study = open_study(sweep, search)
        trials = study.get_trials(deepcopy=False)
        if known >= len(trials):
            raise RunError(f"{sweep.journal} knows no trial {known}", hint="Was it written anew?")
        self._trial = optuna.trial.Trial(study, trials[known]._trial_id)

    def gives_up(self, value: float, count: int) -> bool:
        """`count` numbers the reports from 1: what pruners take for the effort spent."""
        self._trial.report(value, count)
        return bool(self._trial.should_prune())
