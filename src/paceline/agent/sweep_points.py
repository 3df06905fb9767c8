"""Points that a sampler chooses when trials start: Optuna's TPE, or a sweep of W&B.

The first trial of a group requests its point; further seeds and later starts find it in the sweep's
folder. All processes of a sweep share one Optuna study, an append-only journal file under a lock
that is safe on NFS, and TPE learns there how each point ended. There is no server. For W&B, one
process requests the point for the whole run before any rank starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paceline
from paceline.contract.run_folder import write_atomically
from paceline.contract.sweep_folder import DONE, PRUNED, NoPoint, Search, SweepFolder, is_active
from paceline.errors import EnvironmentProblem, LaunchError

LOCK_TIMEOUT = 120  # seconds that a trial waits for another that requests the same point
STARTUP_TRIALS = 10  # random points before TPE starts
WANDB_TIMEOUT = 300.0  # seconds for an answer of W&B
NO_MORE = "the search has no more points"

# -- Optuna
# ---------------------------------------------------------------------------------------------


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
    study = open_study(sweep, search)
    if state == DONE and value is not None:
        study.tell(number, value, skip_if_finished=True)
    else:
        states = import_optuna().trial.TrialState
        ended = states.PRUNED if state == PRUNED else states.FAIL
        study.tell(number, state=ended, skip_if_finished=True)


# -- W&B
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrialPython:
    """The trial's own Python, which has wandb, and environment variables that this process may
    lack.
    """

    executable: str
    variables: Mapping[str, str]


def request_point(sweep: SweepFolder, name: str, group: int, python: TrialPython) -> dict[str, Any]:
    """Return a group's point and the variables of its W&B run. Raises `NoPoint` if the sweep has
    no more.
    """
    path = sweep.chosen_point(group)
    if not path.exists():
        if sweep.search_exhausted.exists():
            raise NoPoint(NO_MORE)
        _run_agent(name, path, python)
    answer: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if answer.get("point") is None:
        path.replace(sweep.search_exhausted)
        raise NoPoint(NO_MORE)
    return answer


def tracking_of(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the project and entity of the sweep's runs, which override `[tracking]`."""
    names = {"wandb_project": "WANDB_PROJECT", "wandb_entity": "WANDB_ENTITY"}
    return {key: variables[name] for key, name in names.items() if name in variables}


def _run_agent(name: str, path: Path, python: TrialPython) -> None:
    path.parent.mkdir(exist_ok=True)
    log = path.with_suffix(".log")
    home = str(Path(paceline.__file__).parent.parent)  # the zip, in a job
    known = os.environ.get("PYTHONPATH")
    environ = {
        **os.environ,
        **python.variables,
        "PYTHONPATH": f"{home}{os.pathsep}{known}" if known else home,
        # where its agent writes the point: all nodes see this folder
        "WANDB_DIR": str(path.parent),
        "WANDB_CONSOLE": "off",
    }
    argv = [python.executable, "-m", "paceline.runtime.trackers.wandb_points", name, str(path)]
    problem = "returned no point"
    with open(log, "ab") as output:
        try:
            subprocess.run(
                argv,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=WANDB_TIMEOUT,
            )
        except subprocess.TimeoutExpired:
            problem = f"did not respond within {WANDB_TIMEOUT:.0f} s"
    if not path.exists():
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "no output")
        raise LaunchError(f"The W&B sweep {name} {problem}: {last}", hint=f"See the log: {log}")
    log.unlink()
