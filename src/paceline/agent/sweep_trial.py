"""One trial of a sweep: create its run folder when it starts, and write its result when it ends.

The batch script calls this before and after the agents: `python paceline.zip trial open SWEEP
SUBMISSION NUMBER`. So a submission writes only a few files, however many trials it has.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from paceline.agent import sweep_points
from paceline.agent.rank_failures import Failure
from paceline.agent.sweep_points import TrialPython
from paceline.contract.environment_file import forget_secrets
from paceline.contract.foreign_records import read_fields
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.redaction import redact, redact_args, redact_values
from paceline.contract.run_folder import STOPPED, RunFolder, write_atomically
from paceline.contract.sweep_folder import (
    DONE,
    FAILED,
    NO_POINT,
    PRUNED,
    SUBMITTED,
    NoPoint,
    Point,
    Search,
    SweepFolder,
    TrialFolder,
    is_number,
    read_lines,
)
from paceline.errors import LaunchError, PacelineError
from paceline.staging.working_directory import WorkingDirectory

NO_POINT_EXIT = 3  # the exit code of `trial open` when the search has no point left
PLACEHOLDER = re.compile(r"\{([^{}]+)\}")


def main(argv: Sequence[str]) -> int:
    """Carry out `open SWEEP SUBMISSION NUMBER` or `close SWEEP SUBMISSION NUMBER VERDICT`."""
    deed, sweep, submission, number = argv[0], SweepFolder(Path(argv[1])), Path(argv[2]), argv[3]
    try:
        if deed == "open":
            open_trial(sweep, submission, int(number))
        else:
            close_trial(sweep, int(number), argv[4])
            _forget_secrets(sweep, submission)
    except NoPoint as reason:
        print(f"paceline: {reason}")
        return NO_POINT_EXIT
    except PacelineError as problem:
        print(f"paceline: {problem}", file=sys.stderr)
        return 1
    except OSError as problem:
        print(f"paceline: {problem.strerror}: {problem.filename}", file=sys.stderr)
        return 1
    return 0


# -- opening
# ---------------------------------------------------------------------------------------------


def open_trial(
    sweep: SweepFolder, submission: Path, number: int, *, variables: Mapping[str, str] | None = None
) -> TrialFolder:
    """Fill the trial's run folder. A trial that was started before keeps its point.

    Outside of jobs, `variables` are those that the job's environment would have, such as the key of
    a service.
    """
    search = sweep.read_search()
    point = _point(sweep, number)
    trial = sweep.trial(number)
    trial.events.mkdir(parents=True, exist_ok=True)
    if search.prune != "none":
        _check_pruned(sweep, point, trial)
    launch_spec = json.loads((submission / "launch.json").read_text(encoding="utf-8"))
    try:
        record = _choose_point(
            sweep, search, point, TrialPython(launch_spec["python"], variables or {})
        )
    except NoPoint:
        write_atomically(trial.result, json.dumps({"state": NO_POINT}) + "\n")
        raise
    write_atomically(trial.trial, json.dumps(record) + "\n")
    launch_spec["programs"] = read_fields(submission / "programs.json")
    made = _with_own_working_directory(
        _trial_launch_spec(sweep, search, point, launch_spec, record), submission, trial
    )
    _remove_old_copies(trial, submission, made)
    write_atomically(trial.launch_spec, json.dumps(asdict(made), indent=1) + "\n", mode=0o600)
    _link(submission / "code", trial.code)
    _link(submission / "paceline.zip", trial.run_half)
    run = json.loads((submission / "run.json").read_text(encoding="utf-8"))
    if not trial.run_json.exists():
        run |= {"run_id": made.run_id, "experiment": made.experiment, "created": time.time()}
        run |= {
            "sweep": sweep.name,
            "args": redact_args(made.args),
            "trial": _redact_record(record),
        }
        write_atomically(trial.run_json, json.dumps(run, indent=1) + "\n")
    trial.result.unlink(missing_ok=True)
    # of an earlier start that did not end: the pruner decides again
    trial.pruned.unlink(missing_ok=True)
    return trial


def _redact_record(record: dict[str, Any]) -> dict[str, Any]:
    shown = {**record, "point": redact_values(record["point"])}
    if "variables" in record:
        shown["variables"] = {
            name: redact(name, str(value)) for name, value in record["variables"].items()
        }
    return shown


def _point(sweep: SweepFolder, number: int) -> Point:
    for point in sweep.read_points():
        if point.number == number:
            return point
    raise LaunchError(
        f"{sweep.points} has no trial {number}.", hint="Check whether the file was edited."
    )


def _check_pruned(sweep: SweepFolder, point: Point, trial: TrialFolder) -> None:
    """A point that another seed's reports have ended does not start again with this one."""
    seeds = [each for each in _trials_of(sweep, point.group) if each.number != point.number]
    pruned = next((each for each in seeds if each.pruned.exists()), None)
    if pruned is not None:
        record = {**read_fields(pruned.trial), "number": point.number, "seed": point.seed}
        write_atomically(trial.trial, json.dumps(record) + "\n")
        trial.pruned.touch()
        close_trial(sweep, point.number, DONE)
        raise NoPoint(f"trial {point.number} does not start: its point was pruned")


def _trials_of(sweep: SweepFolder, group: int) -> list[TrialFolder]:
    """Return the trials of a point, one per seed."""
    return [sweep.trial(point.number) for point in sweep.read_points() if point.group == group]


def _choose_point(
    sweep: SweepFolder, search: Search, point: Point, python: TrialPython
) -> dict[str, Any]:
    """Return trial.json, with the point from the list or from the sampler."""
    values, known, variables = point.point, None, {}
    if search.sampler == "wandb":
        answer = sweep_points.request_point(sweep, search.wandb_sweep, point.group, python)
        values, variables = answer["point"], answer["variables"]
    if search.sampler == "tpe":
        values, known = sweep_points.choose_point(sweep, search, point.group)
    if values is None:
        raise LaunchError(
            f"Trial {point.number} in {sweep.points} has no point.", hint="Was the file edited?"
        )
    return {
        "number": point.number,
        "group": point.group,
        "point": values,
        "seed": point.seed,
        "optuna": known,
        **({"variables": variables} if variables else {}),
    }


def _trial_launch_spec(
    sweep: SweepFolder, search: Search, point: Point, shared: dict[str, Any], record: dict[str, Any]
) -> LaunchSpec:
    """Return the trial's launch spec: the one that all trials share, with this trial's point."""
    launch_spec = LaunchSpec.from_json(json.dumps(shared))
    runtime = dict(launch_spec.runtime)
    if point.seed is not None:
        runtime["seed"] = point.seed
    # sweep.json hides secrets in its arguments, and anybody may read it; the launch spec is the
    # user's alone.
    search = replace(search, args=launch_spec.args)
    program, args = launch_spec.program, arguments(search, record["point"], point.seed)
    if point.args is not None:
        args = point.args
        program = shared["programs"].get(point.program)  # its path in the snapshot of the code
        if not isinstance(program, str):
            raise LaunchError(
                f"Trial {point.number} names the script {point.program!r}, which is not in its "
                "sweep."
            )
    trial = {
        "sweep": str(sweep.path),
        "prune": search.prune,
        "metric": search.metric,
        "number": point.number,
    }
    return replace(
        launch_spec,
        run_id=f"{sweep.name}-{point.number}",
        program=program,
        args=args,
        runtime=runtime,
        params=merge_params(launch_spec.params, record["point"]),
        trial=trial,
        variables={**launch_spec.variables, **record.get("variables", {})},
        tracking={**launch_spec.tracking, **sweep_points.tracking_of(record.get("variables", {}))},
    )


def _with_own_working_directory(
    launch_spec: LaunchSpec, submission: Path, trial: TrialFolder
) -> LaunchSpec:
    """Each trial has a working directory of its own: trials must not overwrite each other's
    files.
    """
    if not launch_spec.work:
        return launch_spec
    shared = str(RunFolder(submission).work)

    def move(path: str) -> str:
        return f"{trial.work}{path[len(shared) :]}" if path.startswith(f"{shared}/") else path

    return replace(
        launch_spec,
        program=move(launch_spec.program),
        cwd=move(launch_spec.cwd),
        source=move(launch_spec.source),
        import_path=[move(path) for path in launch_spec.import_path],
        work={**launch_spec.work, "code": str(trial.code)},
    )


def _remove_old_copies(trial: TrialFolder, submission: Path, made: LaunchSpec) -> None:
    """Remove the code and the links of an earlier submission from the working directory, if they
    are not the same.
    """
    try:
        before = WorkingDirectory.of(
            LaunchSpec.from_json(trial.launch_spec.read_text(encoding="utf-8"))
        )
    except FileNotFoundError:
        return
    now = WorkingDirectory.of(
        replace(made, work={**made.work, "code": str(submission / "code")}) if made.work else made
    )
    if before is not None and before != now:
        before.prune()


def arguments(search: Search, point: dict[str, Any], seed: int | None) -> list[str]:
    """Return the script's arguments: `args` with its placeholders filled, then the keys that it
    doesn't name.

    If a key doesn't apply to this point, its placeholder and the flag before it are dropped.
    """
    values = {**point, **({} if seed is None else {"seed": seed})}
    args: list[str] = []
    for arg in search.args:
        names = [
            name for name in PLACEHOLDER.findall(arg) if name in search.space or name == "seed"
        ]
        if all(name in values for name in names):
            args.append(
                PLACEHOLDER.sub(
                    lambda match: to_text(values[match[1]]) if match[1] in values else match[0], arg
                )
            )
        elif args and args[-1].startswith("-") and arg == f"{{{names[0]}}}":
            args.pop()
    if search.arguments == "none":
        return args
    named = {name for arg in search.args for name in PLACEHOLDER.findall(arg)}
    for key, value in point.items():
        if key not in named:
            args += option(key, value)
    return args


def option(key: str, value: Any) -> list[str]:
    """Return `--key value`; for a boolean `--key` or nothing, as with argparse's store_true."""
    if isinstance(value, bool):
        return [f"--{key}"] if value else []
    return (
        [f"--{key}", *map(to_text, value)]
        if isinstance(value, list)
        else [f"--{key}", to_text(value)]
    )


def to_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else json.dumps(value)


def merge_params(params: dict[str, Any], point: dict[str, Any]) -> dict[str, Any]:
    """Return `run.params`: the file's, overridden by the point. A dot in a key names a nested
    table.
    """
    merged: dict[str, Any] = json.loads(json.dumps(params))
    for key, value in point.items():
        table = merged
        *parents, name = key.split(".")
        for parent in parents:
            if not isinstance(table.get(parent), dict):
                table[parent] = {}
            table = table[parent]
        table[name] = value
    return merged


def _link(target: Path, link: Path) -> None:
    if not target.exists():
        return
    partial = link.with_name(f".{link.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    os.symlink(os.path.relpath(target, link.parent), partial)
    os.replace(partial, link)


# -- closing
# ---------------------------------------------------------------------------------------------


def close_trial(
    sweep: SweepFolder, number: int, verdict: str, *, error: str = ""
) -> dict[str, Any]:
    """Write the result of a trial that has ended, also to the sampler's study. `error`: why it
    never started. If its ranks never did, readers find the reason in the run folder.
    """
    search, trial = sweep.read_search(), sweep.trial(number)
    record = read_fields(trial.trial)
    state = DONE if verdict == DONE else FAILED
    if state == DONE and trial.pruned.exists():
        state = PRUNED
    value, step = _last_value(trial, search.metric)
    if verdict == STOPPED:
        error = "stopped before it finished"
    elif state == FAILED:
        failures = (read_fields(attempt.failure) for attempt in reversed(trial.attempts()))
        failure = next(filter(None, failures), None)
        error = error if failure is None else Failure(**failure).summary
    elif state == DONE and value is None and search.metric:
        error = f"it ended without a value for {search.metric}"
    result = {
        "state": state,
        "value": value,
        "step": step,
        "started": read_fields(trial.run_json).get("created"),
        "ended": time.time(),
        "error": error,
        "point": record.get("point"),
        "seed": record.get("seed"),
    }
    write_atomically(trial.result, json.dumps(result) + "\n")
    ended = _group_result(sweep, record["group"]) if record.get("optuna") is not None else None
    if ended is not None:
        sweep_points.finish_trial(sweep, search, record["optuna"], state=ended[0], value=ended[1])
    return result


def _forget_secrets(sweep: SweepFolder, submission: Path) -> None:
    """Remove the secrets of a submission once all of its arrays are in the queue, and all trials
    have ended for good. Those of a cancelled sweep are removed by whoever cancels it.
    """
    if not (submission / SUBMITTED).exists():
        return
    for path in submission.glob("tasks-*"):
        # each line is a task and its trials; the last ones are the last to end
        for line in reversed(path.read_text(encoding="utf-8").splitlines()):
            for trial in map(sweep.trial, map(int, line.split()[1:])):
                if not any(each.exists() for each in (trial.result, trial.cancelled)):
                    return
    forget_secrets(submission / "environment.sh")


def _last_value(trial: TrialFolder, metric: str | None) -> tuple[float | None, int | None]:
    """Return a trial's value and its step: the last report, or else the metric's last line in
    metrics.jsonl.

    If that is not a finite number, the trial has no value: earlier ones don't count.
    """
    lines = [("value", line) for line in read_lines(trial.reports)]
    if not lines and metric:
        lines = [(metric, line) for line in read_lines(trial.metrics) if metric in line]
    for name, line in lines[-1:]:
        if is_number(line.get(name)):
            return float(line[name]), line.get("step")
    return None, None


def _group_result(sweep: SweepFolder, group: int) -> tuple[str, float | None] | None:
    """Return a point's state and its mean over seeds; None until all seeds have ended. Pruned
    points have no mean.
    """
    results = [read_fields(trial.result) for trial in _trials_of(sweep, group)]
    if not all(results):
        return None
    values = [
        result["value"]
        for result in results
        if result["state"] == DONE and result["value"] is not None
    ]
    if any(result["state"] == PRUNED for result in results):
        return PRUNED, None
    return (DONE, sum(values) / len(values)) if values else (FAILED, None)
