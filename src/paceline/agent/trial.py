"""One trial of a sweep: its run folder is made where it begins, and its result is written where it ends.

The batch script calls this before and after the agents: `python paceline.zip trial open SWEEP KIT NUMBER`. So a
submission writes a few files, however many trials it has.
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

from paceline.agent.failures import Failure
from paceline.agent.wandb_point import Asking, ask_wandb, place_in_wandb
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import write_atomically
from paceline.contract.sweep_folder import (
    DONE,
    FAILED,
    NO_POINT,
    PRUNED,
    NoPoint,
    Point,
    Search,
    SweepFolder,
    TrialFolder,
    last_value,
    read_lines,
)
from paceline.contract.verdict import STOPPED
from paceline.errors import LaunchError, PacelineError

NOTHING_TO_DO = 3  # the exit code of an opening that found no point left
PLACE = re.compile(r"\{([^{}]+)\}")


def main(words: Sequence[str]) -> int:
    try:
        if len(words) == 4 and words[0] == "open":
            open_trial(SweepFolder(Path(words[1])), Path(words[2]), int(words[3]))
        elif len(words) == 4 and words[0] == "close":
            close_trial(SweepFolder(Path(words[1])), int(words[2]), words[3])
        else:
            raise LaunchError(
                f"trial {' '.join(words)}: expected open SWEEP KIT NUMBER, or close SWEEP NUMBER VERDICT"
            )
    except NoPoint:
        print("paceline: the search has no more points")
        return NOTHING_TO_DO
    except PacelineError as problem:
        print(f"paceline: {problem}", file=sys.stderr)
        return 1
    except OSError as problem:
        print(f"paceline: {problem.strerror}: {problem.filename}", file=sys.stderr)
        return 1
    return 0


# -- opening ---------------------------------------------------------------------------------------------


def open_trial(
    sweep: SweepFolder, kit: Path, number: int, *, variables: Mapping[str, str] | None = None
) -> TrialFolder:
    """Fill the trial's run folder. One that was begun before goes on with the same point.

    `variables` are those that a job's environment would have, where this is no job: a service may want a key.
    """
    search = sweep.read_search()
    point = _point(sweep, number)
    trial = sweep.trial(number)
    trial.events.mkdir(parents=True, exist_ok=True)
    launch_spec = json.loads((kit / "launch.json").read_text(encoding="utf-8"))
    try:
        told = _told(sweep, search, point, trial, Asking(launch_spec["python"], variables or {}))
    except NoPoint:
        write_atomically(trial.result, json.dumps({"state": NO_POINT}) + "\n")
        raise
    write_atomically(trial.trial, json.dumps(told) + "\n")
    launch_spec["programs"] = _read(kit / "programs.json")
    made = _order(sweep, search, point, launch_spec, told)
    write_atomically(trial.launch_spec, json.dumps(asdict(made), indent=1) + "\n", mode=0o600)
    _link(kit / "code", trial.code)
    _link(kit / "paceline.zip", trial.run_half)
    run = json.loads((kit / "run.json").read_text(encoding="utf-8"))
    if not trial.run_json.exists():
        run |= {
            "run_id": made.run_id,
            "experiment": made.experiment,
            "created": time.time(),
            "args": made.args,
        }
        run |= {"sweep": sweep.name, "trial": told}
        write_atomically(trial.run_json, json.dumps(run, indent=1) + "\n")
    trial.result.unlink(missing_ok=True)
    trial.pruned.unlink(missing_ok=True)  # of a start that came to no end: the pruner is asked anew
    return trial


def _point(sweep: SweepFolder, number: int) -> Point:
    for line in read_lines(sweep.points):
        if line.get("number") == number:
            return Point(**line)
    raise LaunchError(f"{sweep.points} has no trial {number}", hint="was the file changed by hand?")


def _told(
    sweep: SweepFolder, search: Search, point: Point, trial: TrialFolder, asking: Asking
) -> dict[str, Any]:
    """trial.json: what a trial that begins is told, by the list or by the sampler."""
    values, known, variables = point.point, None, {}
    if search.sampler == "wandb":
        answer = ask_wandb(sweep, search.wandb_sweep, point.group, asking)
        values, variables = answer["point"], answer["variables"]
    if search.needs_optuna:
        from paceline.contract import optuna_study

        if values is None:
            shared = point.seed is not None
            values, known = optuna_study.point_of_group(sweep, search, point.group, shared=shared)
        else:
            known = _read(trial.trial).get("optuna")
            if known is None or optuna_study.is_over(sweep, search, known):
                known = optuna_study.begin(sweep, search, point.number)
    assert values is not None
    return {
        "number": point.number,
        "group": point.group,
        "point": values,
        "seed": point.seed,
        "optuna": known,
        **({"variables": variables} if variables else {}),
    }


def _order(
    sweep: SweepFolder, search: Search, point: Point, kit: dict[str, Any], told: dict[str, Any]
) -> LaunchSpec:
    launch_spec = LaunchSpec.from_json(json.dumps(kit))
    runtime = dict(launch_spec.runtime)
    if point.seed is not None:
        runtime["seed"] = point.seed
    program, args = launch_spec.program, arguments(search, told["point"], point.seed)
    if point.args is not None:
        args = point.args
        program = kit["programs"][point.program]  # as it lies in the copy of the code
    trial = {
        "sweep": str(sweep.path),
        "prune": search.prune,
        "metric": search.metric,
        "optuna": told["optuna"],
    }
    return replace(
        launch_spec, run_id=f"{sweep.name}-{point.number}", program=program, args=args, runtime=runtime,
        params=overlaid(launch_spec.params, told["point"]), trial=trial,
        variables={**launch_spec.variables, **told.get("variables", {})},
        tracking={**launch_spec.tracking, **place_in_wandb(told.get("variables", {}))},
    )  # fmt: skip


def arguments(search: Search, point: dict[str, Any], seed: int | None) -> list[str]:
    """The script's words: the template with its places filled, then the keys that it does not name.

    A key that does not apply to this point takes its word along, and the option before it.
    """
    values = {**point, **({} if seed is None else {"seed": seed})}
    words: list[str] = []
    for word in search.args:
        names = [name for name in PLACE.findall(word) if name in search.space or name == "seed"]
        if all(name in values for name in names):
            words.append(
                PLACE.sub(lambda match: shown(values[match[1]]) if match[1] in values else match[0], word)
            )
        elif words and words[-1].startswith("-") and word == f"{{{names[0]}}}":
            words.pop()
    if search.arguments == "none":
        return words
    named = {name for word in search.args for name in PLACE.findall(word)}
    for key, value in point.items():
        if key not in named:
            words += option(key, value)
    return words


def option(key: str, value: Any) -> list[str]:
    """`--key value`; a truth value is `--key` or nothing, as in argparse's store_true."""
    if isinstance(value, bool):
        return [f"--{key}"] if value else []
    return [f"--{key}", *map(shown, value)] if isinstance(value, list) else [f"--{key}", shown(value)]


def shown(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else json.dumps(value)


def overlaid(params: dict[str, Any], point: dict[str, Any]) -> dict[str, Any]:
    """`run.params`: those of the file, and over them the point; a key with dots lies in tables."""
    made: dict[str, Any] = json.loads(json.dumps(params))
    for key, value in point.items():
        table = made
        *tables, name = key.split(".")
        for each in tables:
            if not isinstance(table.get(each), dict):
                table[each] = {}
            table = table[each]
        table[name] = value
    return made


def _link(target: Path, link: Path) -> None:
    if not target.exists():
        return
    partial = link.with_name(f".{link.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    os.symlink(os.path.relpath(target, link.parent), partial)
    os.replace(partial, link)


# -- closing ---------------------------------------------------------------------------------------------


def close_trial(sweep: SweepFolder, number: int, verdict: str, *, error: str = "") -> dict[str, Any]:
    """Write the result of a trial that has ended for good, and tell the sampler. `error`: where it never began."""
    search, trial = sweep.read_search(), sweep.trial(number)
    told = _read(trial.trial)
    state = DONE if verdict == DONE else FAILED
    if state == DONE and trial.pruned.exists():
        state = PRUNED
    value, step = last_value(trial, search.metric)
    if state == FAILED:
        error = error or _why(trial, verdict)
    elif state == DONE and value is None and search.metric:
        error = f"it ended with no number as its {search.metric}"
    result = {
        "state": state, "value": value, "step": step, "started": _read(trial.run_json).get("created"),
        "ended": time.time(), "error": error,
        "point": told.get("point"), "seed": told.get("seed"),
    }  # fmt: skip
    write_atomically(trial.result, json.dumps(result) + "\n")
    if told.get("optuna") is not None:
        from paceline.contract import optuna_study

        if not search.asks:
            optuna_study.tell(sweep, search, told["optuna"], state=state, value=value)
        elif (mean := _of_group(sweep, told["group"])) is not None:
            group_state, group_value = mean
            optuna_study.tell(sweep, search, told["optuna"], state=group_state, value=group_value)
    return result


def _of_group(sweep: SweepFolder, group: int) -> tuple[str, float | None] | None:
    """What the sampler hears of a point: the mean over its seeds, once the last of them has ended."""
    results = []
    for line in read_lines(sweep.points):
        if line.get("group") == group:
            result = _read(sweep.trial(line["number"]).result)
            if not result:
                return None
            results.append(result)
    values = [
        result["value"] for result in results if result["state"] == DONE and result["value"] is not None
    ]
    if values:
        return DONE, sum(values) / len(values)
    return (PRUNED if any(result["state"] == PRUNED for result in results) else FAILED), None


def _why(trial: TrialFolder, verdict: str) -> str:
    """The first line of what went wrong in the newest attempt."""
    if verdict == STOPPED:
        return "stopped before its end"
    for attempt in reversed(trial.attempts()):
        if failure := _read(attempt.failure):
            return Failure(**failure).error
    try:  # no rank was started: what the agent or the batch script said last
        said = trial.slurm_log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        return ""
    # Hints stand below what they are about.
    words = [
        line.removeprefix("paceline: ").removeprefix("error: ")
        for line in said
        if not line.startswith(("paceline: job ", "  "))
    ]
    return words[-1] if words else ""


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
