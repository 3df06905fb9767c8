"""A sweep's file: `[sweep]` says how to search, `[space]` where, and every table of paceline.toml may stand beside."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from paceline.errors import SpecError
from paceline.spec.load import Flag, read_file
from paceline.spec.tables import Count, FolderName, Line, Table, Tables, Words
from paceline.spec.validation_errors import explain, explain_flag, nearest, show

RANGES = ("grid", "uniform", "log_uniform", "integer")
BESIDE = ("step", "log", "when")  # what may stand beside a range


class SweepTable(Table):
    name: FolderName | None = None
    """The sweep's name and that of its folder; else the file's."""
    metric: Line | None = None
    """The number to look at: as it is logged by `run.log`, or given to `run.report`."""
    direction: Literal["minimize", "maximize"] = "minimize"
    """Which way is better."""
    sampler: Literal["grid", "random", "tpe"] = "grid"
    """How points are chosen: all combinations, at random, or by what the trials before found (TPE)."""
    wandb_sweep: Line | None = None
    """Instead: the W&B sweep that chooses them, ENTITY/PROJECT/ID. `parallel` agents ask for `count` points each."""
    count: Count | None = None
    """How many points; a grid has as many as it has, at the most so many."""
    parallel: Count | None = None
    """Trials at the same time; else as many as the cluster gives, 4 for tpe, and what this machine has locally."""
    seeds: Count = 1
    """Runs of each point, each with a seed of its own."""
    seed: int = 0
    """The sampler's own seed."""
    prune: Literal["none", "halving", "median"] = "none"
    """Which trials are ended early, by what they report: successive halving, or those worse than the median."""
    prune_after: Count = 1
    """Reports that every trial may make before it can be ended early."""
    pack: Count = 1
    """Small trials that share one job, side by side on one node."""
    script: Line | None = None
    """The script, relative to this file."""
    module: Line | None = None
    """Instead of a script: a module, as in python -m."""
    args: Words = ()
    """The script's arguments; {key} stands for a value of the point, {seed} for the seed."""
    arguments: Literal["options", "none"] = "options"
    """Whether keys that args does not name follow as --key value; run.params has them in any case."""


@dataclass(frozen=True)
class SweepFile:
    path: Path
    table: SweepTable
    space: dict[str, dict[str, Any]]  # key -> {"grid": [...]} or another range, and perhaps "when"
    tables: dict[str, Any] = field(default_factory=dict)  # the rest: as in paceline.toml

    @property
    def name(self) -> str:
        return self.table.name or self.path.stem


def load_sweep(path: Path, flags: Iterable[Flag] = ()) -> SweepFile:
    """Read and check a sweep's file, with what was typed over it. Errors name the file and the key, or the flag."""
    values = read_file(path)
    told = values.pop("sweep", {})
    space = values.pop("space", None)
    for name, table in (("sweep", told), ("space", space or {})):
        if not isinstance(table, dict):
            raise SpecError(
                f"{path}: [{name}]: found {show(table)}, expected a table", hint=f"write [{name}]"
            )
    for key in values:
        if key not in Tables.model_fields:
            known = ["sweep", "space", *Tables.model_fields]
            close = nearest(key, known)
            hint = f"the nearest known key is {close!r}" if close else f"it may have: {', '.join(known)}"
            raise SpecError(f"{path}: the file has no key {key!r}", hint=hint)
    table = with_flags(_table_of(told, path), flags)
    found = SweepFile(path, table, _read_space(space or {}, path), values)
    check_sweep(found)
    return found


def _table_of(told: Mapping[str, Any], path: Path) -> SweepTable:
    try:
        return SweepTable.model_validate(told)
    except ValidationError as problem:
        raise explain(problem, where=str(path), prefix=("sweep",), root=SweepTable) from None


def with_flags(table: SweepTable, flags: Iterable[Flag]) -> SweepTable:
    """What was typed wins; but which sweep of W&B's it is, the file says where it says so."""
    values = table.model_dump()
    for flag in flags:
        if flag.value is None or (flag.key == "wandb_sweep" and table.wandb_sweep is not None):
            continue
        try:
            SweepTable.model_validate({flag.key: flag.value})
        except ValidationError as problem:
            raise explain_flag(problem, flag.name) from None
        values[flag.key] = flag.value
    return SweepTable.model_validate(values)


def _read_space(space: Mapping[str, Any], path: Path, prefix: str = "") -> dict[str, dict[str, Any]]:
    """Ranges by key; tables within tables are keys with dots."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in space.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and not any(word in value for word in (*RANGES, *BESIDE)):
            close = next((word for each in value for word in RANGES if nearest(each, [word])), None)
            if close is not None and not any(isinstance(each, dict) for each in value.values()):
                raise SpecError(
                    f"{path}: [space] {key} has no key {next(iter(value))!r}",
                    hint=f"the nearest known key is {close!r}",
                )
            found |= _read_space(value, path, f"{key}.")
        else:
            found[key] = _Range(key, value, path).read()
    return found


@dataclass(frozen=True)
class _Range:
    """One key of `[space]`, on its way to a plain dictionary."""

    key: str
    value: Any
    path: Path

    def wrong(self, expected: str, found: Any = None) -> SpecError:
        told = show(self.value if found is None else found)
        return SpecError(
            f"{self.path}: [space] {self.key}: found {told}, expected {expected}",
            hint=f"change {self.key} in {self.path}",
        )

    def read(self) -> dict[str, Any]:
        value = self.value if isinstance(self.value, dict) else {"grid": self.value}
        if not isinstance(self.value, (dict, list)):
            value = {"grid": [self.value]}  # one value: the same in every trial
        ranges = [word for word in RANGES if word in value]
        for word in value:
            if word not in (*RANGES, *BESIDE):
                close = nearest(word, [*RANGES, *BESIDE])
                hint = f"the nearest known key is {close!r}" if close else f"it may have: {', '.join(RANGES)}"
                raise SpecError(f"{self.path}: [space] {self.key} has no key {word!r}", hint=hint)
        if len(ranges) != 1:
            raise self.wrong(f"one of {', '.join(RANGES)}")
        kind = ranges[0]
        for word in ("step", "log"):
            if word in value and kind != "integer":
                raise self.wrong(f"{word} beside integer alone")
        made = {"grid": self._grid, "integer": self._integer}.get(kind, self._interval)(kind, value)
        if "when" in value:
            made["when"] = self._when(value["when"])
        return made

    def _grid(self, kind: str, value: Mapping[str, Any]) -> dict[str, Any]:
        listed = value[kind]
        if not isinstance(listed, list) or not listed or any(isinstance(each, dict) for each in listed):
            raise self.wrong("a list of values such as [0.1, 0.01]")
        return {"grid": listed}

    def _bounds(self, kind: str, value: Mapping[str, Any], *, whole: bool) -> list[Any]:
        bounds: list[Any] = value[kind]
        kinds = (int,) if whole else (int, float)
        fine = isinstance(bounds, list) and len(bounds) == 2
        if not fine or any(isinstance(each, bool) or not isinstance(each, kinds) for each in bounds):
            raise self.wrong(f"two {'whole ' if whole else ''}numbers, such as {kind} = [1, 8]")
        if not all(map(math.isfinite, bounds)) or bounds[0] >= bounds[1]:
            raise self.wrong("a smaller and a larger number")
        return bounds

    def _interval(self, kind: str, value: Mapping[str, Any]) -> dict[str, Any]:
        low, high = self._bounds(kind, value, whole=False)
        if kind == "log_uniform" and low <= 0:
            raise self.wrong("numbers above 0: others have no logarithm")
        return {kind: [float(low), float(high)]}

    def _integer(self, kind: str, value: Mapping[str, Any]) -> dict[str, Any]:
        low, high = self._bounds(kind, value, whole=True)
        step, log = value.get("step", 1), value.get("log", False)
        if isinstance(step, bool) or not isinstance(step, int) or step < 1:
            raise self.wrong("step of at least 1", step)
        if not isinstance(log, bool) or (log and (low < 1 or step != 1)):
            raise self.wrong("log = true with numbers from 1 on and no step")
        return {"integer": [low, high], "step": step, "log": log}

    def _when(self, when: Any) -> dict[str, list[Any]]:
        if not isinstance(when, dict) or not when:
            raise self.wrong('when = { other_key = "value" }', when)
        return {key: each if isinstance(each, list) else [each] for key, each in when.items()}


def check_sweep(file: SweepFile) -> None:
    """Refuse what is fine alone and impossible together."""
    table, path = file.table, file.path
    if (table.script is None) == (table.module is None):
        raise SpecError(
            f"{path}: [sweep] needs a script or a module, and one of them",
            hint='write script = "train.py", relative to this file',
        )
    if table.wandb_sweep is not None:
        if file.space:
            raise SpecError(
                f"{path}: there is a [space], and the points are those of the W&B sweep {table.wandb_sweep}",
                hint="take [space] out, or leave the W&B sweep out",
            )
        check_means(table, path)
        return
    if not file.space and table.seeds == 1:
        raise SpecError(f"{path}: there is no [space], and seeds is 1", hint="write [space] lr = [0.1, 0.01]")
    if table.sampler != "grid" and table.count is None:
        raise SpecError(
            f'{path}: [sweep] sampler is "{table.sampler}", and nothing says how many points',
            hint="write count = 20 in [sweep], or give --count 20",
        )
    check_means(table, path)
    if table.sampler == "grid":
        for key, each in file.space.items():
            if "grid" not in each and not ("integer" in each and not each["log"]):
                raise SpecError(
                    f"{path}: [space] {key} is a range, and a grid needs values",
                    hint=f'list them: {key} = [0.1, 0.01], or choose sampler = "random" or "tpe"',
                )
    _check_conditions(file)
    _check_places(file)


def check_means(table: SweepTable, path: Path) -> None:
    """What a sampler and a pruner need."""
    if table.metric is None and (table.sampler == "tpe" or table.prune != "none"):
        who = 'sampler = "tpe"' if table.sampler == "tpe" else f'prune = "{table.prune}"'
        raise SpecError(
            f"{path}: [sweep] {who} needs a metric to go by", hint='write metric = "loss" in [sweep]'
        )
    if table.sampler == "tpe" and table.prune != "none" and table.seeds > 1:
        raise SpecError(
            f"{path}: [sweep] seeds is {table.seeds}: tpe goes by the mean of a point's runs, and prune would end some",
            hint='leave prune at "none", or seeds at 1',
        )


def _check_conditions(file: SweepFile) -> None:
    for key, each in file.space.items():
        for parent, values in each.get("when", {}).items():
            if parent not in file.space:
                close = nearest(parent, list(file.space))
                raise SpecError(
                    f"{file.path}: [space] {key}: when names {parent!r}, which is no key of [space]",
                    hint=f"did you mean {close!r}?" if close else f"the keys are: {', '.join(file.space)}",
                )
            known = file.space[parent].get("grid")
            for value in values:
                if known is not None and value not in known:
                    raise SpecError(
                        f"{file.path}: [space] {key}: when {parent} is {show(value)}, which it never is",
                        hint=f"{parent} is one of {show(known)}",
                    )
    in_order(file.space, where=str(file.path))


def _check_places(file: SweepFile) -> None:
    """Braces may stand for themselves; those that look like a key that was misspelt do not."""
    for name in (name for word in file.table.args for name in re.findall(r"\{([^{}]+)\}", word)):
        close = nearest(name, list(file.space))
        if name not in file.space and name != "seed" and close is not None:
            raise SpecError(
                f"{file.path}: [sweep] args names {{{name}}}, which is no key of [space]",
                hint=f"did you mean {{{close}}}?",
            )


def in_order(space: Mapping[str, dict[str, Any]], *, where: str = "[space]") -> list[str]:
    """The keys, each after those that it depends on; otherwise as they are written."""
    done: list[str] = []
    left = list(space)
    while left:
        ready = [key for key in left if all(parent in done for parent in space[key].get("when", {}))]
        if not ready:
            raise SpecError(
                f"{where}: {', '.join(left)} depend on each other", hint="take one of their `when` away"
            )
        done.append(ready[0])
        left.remove(ready[0])
    return done
