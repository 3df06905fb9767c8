"""A sweep's Optuna study: TPE chooses points, trials share their reports, and points are ended
early, by successive halving or if they are worse than the median. Optuna is imported on first use.

All processes of a sweep share one append-only journal file under a lock that is safe on NFS. There
is no server. A point is judged by the mean of its seeds at the same report, over those that have
got there so far, and ends with all of them.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.contract.run_folder import write_atomically
from paceline.contract.sweep_folder import (
    FAILED,
    PRUNED,
    Search,
    SweepFolder,
    TrialFolder,
    is_active,
    is_number,
    read_lines,
)
from paceline.errors import EnvironmentProblem, RunError

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
    from optuna.storages.journal import JournalFileOpenLock

    lock = JournalFileOpenLock(str(path), grace_period=LOCK_TIMEOUT)
    lock.acquire()
    try:
        yield
    finally:
        lock.release()


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


REDUCTION_FACTOR = 3  # one in this many points continues at each rung of successive halving
STARTUP_POINTS = 4  # that have finished before the median counts


def seeds_of(sweep: SweepFolder, number: int) -> list[TrialFolder]:
    """Return the other trials of a trial's point."""
    points = [line for line in read_lines(sweep.points) if isinstance(line.get("number"), int)]
    groups = {line["number"]: line.get("group") for line in points}
    return [
        sweep.trial(other)
        for other in groups
        if other != number and groups[other] == groups.get(number)
    ]


def is_point_pruned(seeds: Sequence[TrialFolder]) -> bool:
    return any(trial.pruned.exists() for trial in seeds)


class Pruner:
    """Passes a trial's reports on, and decides. Rank 0 holds one for the whole session."""

    def __init__(self, sweep: SweepFolder, search: Search, *, number: int, known: int) -> None:
        """`known` is the point's number in the study."""
        self._study, self._search, self._known = open_study(sweep, search), search, known
        self._states = import_optuna().trial.TrialState
        trials = self._study.get_trials(deepcopy=False)
        if known >= len(trials):
            raise RunError(
                f"{sweep.journal} has no trial {known}.",
                hint="Check whether the file was replaced.",
            )
        self._trial_id = trials[known]._trial_id
        self._seeds = seeds_of(sweep, number)
        self._sign = -1.0 if search.direction == "maximize" else 1.0

    def should_prune(self, value: float, count: int) -> bool:
        """Report a value and return whether to end the trial. `count` numbers the reports from
        1.
        """
        others = [found[count] for trial in self._seeds if count in (found := read_reports(trial))]
        mean = statistics.fmean([value, *others])
        # Unlike `Trial.report`, this replaces the mean over fewer seeds.
        self._study._storage.set_trial_intermediate_value(self._trial_id, count, mean)
        if is_point_pruned(self._seeds):
            return True
        trials = self._study.get_trials(deepcopy=False)
        own = {
            report: self._sign * each
            for report, each in trials[self._known].intermediate_values.items()
        }
        own = {report: each for report, each in own.items() if report < count} | {
            count: self._sign * mean
        }
        rivals = [
            (
                {report: self._sign * each for report, each in trial.intermediate_values.items()},
                trial.state,
            )
            for trial in trials
            if trial.number != self._known
        ]
        if self._search.prune == "halving":
            return is_halved(own, [values for values, _ in rivals], after=self._search.prune_after)
        finished = [values for values, state in rivals if state == self._states.COMPLETE]
        return is_below_median(own, finished, after=self._search.prune_after)


def read_reports(trial: TrialFolder) -> dict[int, float]:
    """Return the values that a trial has reported, by the number of the report, which is that of
    its step.
    """
    counts: dict[Any, int] = {}
    values: dict[int, float] = {}
    for line in read_lines(trial.reports):
        if is_number(line.get("value")):
            values.setdefault(
                counts.setdefault(line.get("step"), len(counts) + 1), float(line["value"])
            )
    return values


def is_halved(
    own: Mapping[int, float], rivals: Sequence[Mapping[int, float]], *, after: int
) -> bool:
    """Return whether a point ends at its last report: at reports `after`, `3 * after`, ... the best
    third continues.

    Smaller is better. The best point always continues, and nothing waits: a point is compared with
    those that have got there before it (asynchronous successive halving).
    """
    count = max(own)
    rung = after
    while rung < count:
        rung *= REDUCTION_FACTOR
    if rung != count:
        return False
    values = sorted([own[count], *(values[count] for values in rivals if count in values)])
    return own[count] > values[max(0, len(values) // REDUCTION_FACTOR - 1)]


def is_below_median(
    own: Mapping[int, float], finished: Sequence[Mapping[int, float]], *, after: int
) -> bool:
    """Return whether a point's best report so far is worse than the median of finished points at
    its last report.
    """
    count = max(own)
    values = [values[count] for values in finished if count in values]
    if count < after or len(finished) < STARTUP_POINTS or not values:
        return False
    return min(own.values()) > statistics.median(values)
