"""A sweep's file: `[sweep]` (how to search), `[space]` (what to try), and any table of
paceline.toml.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from paceline.contract.redaction import holds_secret
from paceline.errors import SpecError
from paceline.spec.load import read_file
from paceline.spec.settings import Tables, explain, explain_flag, nearest, show
from paceline.spec.training_tables import SweepTable
from paceline.spec.typed_flags import Flag

RANGES = ("grid", "uniform", "log_uniform", "integer")
MODIFIERS = ("step", "log", "when")  # keys that may accompany a range
# An example and the meaning of each, for the reference.
RANGE_HELP = {
    "grid": ("{ grid = [0.1, 0.01] }", "One of these values; the same as a plain list."),
    "uniform": ("{ uniform = [0.0, 0.5] }", "A number between the two."),
    "log_uniform": ("{ log_uniform = [1e-4, 1.0] }", "A number between the two, on a log scale."),
    "integer": ("{ integer = [2, 8] }", "A whole number, both ends included."),
    "step": ("{ integer = [2, 8], step = 2 }", "The step between whole numbers."),
    "log": ("{ integer = [1, 100], log = true }", "Choose whole numbers on a log scale."),
    "when": (
        '{ uniform = [0.5, 0.99], when = { optimizer = "sgd" } }',
        "The parameter applies only if another one has this value, or one of these.",
    ),
}
SECRET = "is a secret, but the points of a sweep are in files that others can read."
SECRET_HINT = (
    "Pass it as an environment variable: put it into .env, or list its name in "
    "[environment] secrets."
)
# What other libraries call ranges. As nested tables they would be parameters of these names.
FOREIGN = ("values", "choice", "choices", "categorical", "randint")
FOREIGN_BOUNDS = ("min", "max", "low", "high", "lower", "upper", "value", "distribution")


@dataclass(frozen=True)
class SweepFile:
    path: Path
    table: SweepTable
    # key -> {"grid": [...]} or another range, and optionally "when"
    space: dict[str, dict[str, Any]]
    tables: dict[str, Any] = field(default_factory=dict)  # other tables, as in paceline.toml

    @property
    def name(self) -> str:
        return self.table.name or self.path.stem


def load_sweep(path: Path, flags: Iterable[Flag] = ()) -> SweepFile:
    """Read and check a sweep's file, overridden by flags. Errors name the file and the key, or the
    flag.
    """
    values = read_file(path)
    sweep = values.pop("sweep", {})
    space = values.pop("space", None)
    for name, table in (("sweep", sweep), ("space", space or {})):
        if not isinstance(table, dict):
            raise SpecError(
                f"Invalid {name} = {show(table)} in {path}: use a table.", hint=f"Write [{name}]."
            )
    for key in values:
        if key not in Tables.model_fields:
            known = ["sweep", "space", *Tables.model_fields]
            raise SpecError(
                f"Unknown key {key!r} in {path}.", hint=_suggest(nearest(key, known), known)
            )
    table = with_flags(_parse_table(sweep, path), flags)
    found = SweepFile(path, table, _read_space(space or {}, path), values)
    check_sweep(found)
    return found


def _parse_table(table: Mapping[str, Any], path: Path) -> SweepTable:
    try:
        return SweepTable.model_validate(table)
    except ValidationError as problem:
        raise explain(problem, where=str(path), prefix=("sweep",), root=SweepTable) from None


def _suggest(close: str | None, known: Sequence[str]) -> str:
    return f"Did you mean {close!r}?" if close else f"The keys are: {', '.join(known)}."


def with_flags(table: SweepTable, flags: Iterable[Flag]) -> SweepTable:
    """Return a table overridden by flags, except that a file's wandb_sweep wins over the flag."""
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


def _read_space(
    space: Mapping[str, Any], path: Path, prefix: str = ""
) -> dict[str, dict[str, Any]]:
    """Return the range of each key. Nested tables become keys with dots."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in space.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and not any(word in value for word in (*RANGES, *MODIFIERS)):
            is_range = any(
                word in FOREIGN
                or (word in FOREIGN_BOUNDS and not isinstance(each, list))
                or nearest(word, RANGES)
                for word, each in value.items()
            )
            if is_range and not any(isinstance(each, dict) for each in value.values()):
                raise SpecError(
                    f"Invalid {key} = {show(value)} in [space] of {path}: it is not a range.",
                    hint="Write a list of values, or for example { uniform = [0.0, 1.0] }; ranges"
                    f" are {', '.join(RANGES)}. Constants are lists of one value.",
                )
            found |= _read_space(value, path, f"{key}.")
        else:
            found[key] = _Range(key, value, path).read()
    return found


@dataclass(frozen=True)
class _Range:
    """Parses one key of `[space]` into a plain dictionary."""

    key: str
    value: Any
    path: Path

    def error(self, expected: str, found: Any = None) -> SpecError:
        value = show(self.value if found is None else found)
        return SpecError(
            f"Invalid {self.key} = {value} in [space] of {self.path}: use {expected}.",
            hint="See the ranges in the documentation: Sweeps.",
        )

    def read(self) -> dict[str, Any]:
        value = self.value if isinstance(self.value, dict) else {"grid": self.value}
        if not isinstance(self.value, (dict, list)):
            value = {"grid": [self.value]}  # one value: the same in every trial
        ranges = [word for word in RANGES if word in value]
        for word in value:
            if word not in (*RANGES, *MODIFIERS):
                close = nearest(word, [*RANGES, *MODIFIERS])
                raise SpecError(
                    f"Unknown key {word!r} in {self.key} in [space] of {self.path}.",
                    hint=_suggest(close, RANGES),
                )
        if len(ranges) != 1:
            raise self.error(f"one of {', '.join(RANGES)}")
        kind = ranges[0]
        for word in ("step", "log"):
            if word in value and kind != "integer":
                raise self.error(f"{word} only with integer")
        made = {"grid": self._grid, "integer": self._integer}.get(kind, self._interval)(kind, value)
        if "when" in value:
            made["when"] = self._when(value["when"])
        return made

    def _grid(self, kind: str, value: Mapping[str, Any]) -> dict[str, Any]:
        listed = value[kind]
        if (
            not isinstance(listed, list)
            or not listed
            or any(isinstance(each, dict) for each in listed)
        ):
            raise self.error("a list of values such as [0.1, 0.01]")
        if holds_secret(self.key, listed):
            raise SpecError(f"{self.path}: [space] {self.key} {SECRET}", hint=SECRET_HINT)
        return {"grid": listed}

    def _bounds(self, kind: str, value: Mapping[str, Any], *, whole: bool) -> list[Any]:
        bounds: list[Any] = value[kind]
        kinds = (int,) if whole else (int, float)
        fine = isinstance(bounds, list) and len(bounds) == 2
        if not fine or any(
            isinstance(each, bool) or not isinstance(each, kinds) for each in bounds
        ):
            raise self.error(f"two {'whole ' if whole else ''}numbers, such as {kind} = [1, 8]")
        if not all(map(math.isfinite, bounds)) or bounds[0] >= bounds[1]:
            raise self.error(f"a smaller and a larger number, such as {kind} = [1, 8]")
        return bounds

    def _interval(self, kind: str, value: Mapping[str, Any]) -> dict[str, Any]:
        low, high = self._bounds(kind, value, whole=False)
        if kind == "log_uniform" and low <= 0:
            raise self.error("numbers above 0")
        return {kind: [float(low), float(high)]}

    def _integer(self, kind: str, value: Mapping[str, Any]) -> dict[str, Any]:
        low, high = self._bounds(kind, value, whole=True)
        step, log = value.get("step", 1), value.get("log", False)
        if isinstance(step, bool) or not isinstance(step, int) or step < 1:
            raise self.error("a step of at least 1", step)
        if not isinstance(log, bool) or (log and (low < 1 or step != 1)):
            raise self.error("log = true only with numbers from 1 and without step")
        return {"integer": [low, high], "step": step, "log": log}

    def _when(self, when: Any) -> dict[str, list[Any]]:
        if not isinstance(when, dict) or not when:
            raise self.error('when = { other_key = "value" }', when)
        return {key: each if isinstance(each, list) else [each] for key, each in when.items()}


def check_sweep(file: SweepFile) -> None:
    """Raise for settings that are valid by themselves but not together."""
    table, path = file.table, file.path
    if (table.script is None) == (table.module is None):
        raise SpecError(
            f"[sweep] of {path} needs either a script or a module.",
            hint='Write script = "train.py", relative to this file.',
        )
    if table.wandb_sweep is not None:
        if file.space:
            raise SpecError(
                f"[space] of {path} and the W&B sweep {table.wandb_sweep} both define points.",
                hint="Remove [space] or the W&B sweep.",
            )
        check_metric(table, path)
        return
    if not file.space and table.seeds == 1:
        raise SpecError(
            f"{path} has no [space] to search.",
            hint="Add a table [space], with lines such as lr = [0.1, 0.01].",
        )
    if table.sampler != "grid" and table.count is None:
        raise SpecError(
            f'sampler = "{table.sampler}" in [sweep] of {path} needs a number of points.',
            hint="Write count = 20 in [sweep], or add --count 20.",
        )
    check_metric(table, path)
    if table.sampler == "grid":
        for key, each in file.space.items():
            if "grid" not in each and not ("integer" in each and not each["log"]):
                raise SpecError(
                    f"{key} in [space] of {path} is a range, but a grid needs values.",
                    hint=f'List them: {key} = [0.1, 0.01], or set sampler = "random" or "tpe".',
                )
    _check_conditions(file)
    _check_placeholders(file)


def check_metric(table: SweepTable, path: Path) -> None:
    """Raise if the sampler or the pruner lacks a metric."""
    if table.metric is None and (table.sampler == "tpe" or table.prune != "none"):
        setting = 'sampler = "tpe"' if table.sampler == "tpe" else f'prune = "{table.prune}"'
        raise SpecError(
            f"{setting} in [sweep] of {path} needs a metric.",
            hint='Write metric = "loss" in [sweep].',
        )


def _check_conditions(file: SweepFile) -> None:
    for key, each in file.space.items():
        for parent, values in each.get("when", {}).items():
            if parent not in file.space:
                close = nearest(parent, list(file.space))
                raise SpecError(
                    f"Unknown key {parent!r} in `when` of {key} in [space] of {file.path}.",
                    hint=_suggest(close, list(file.space)),
                )
            known = file.space[parent].get("grid")
            for value in values:
                if known is not None and value not in known:
                    raise SpecError(
                        f"`when` of {key} in [space] of {file.path} never applies: {parent} is "
                        f"never {show(value)}.",
                        hint=f"{parent} is one of {show(known)}.",
                    )
    in_order(file.space, where=str(file.path))


def _check_placeholders(file: SweepFile) -> None:
    """Raise for a placeholder that looks like a misspelt key. Other braces are literal."""
    for name in (name for arg in file.table.args for name in re.findall(r"\{([^{}]+)\}", arg)):
        close = nearest(name, list(file.space))
        if name not in file.space and name != "seed" and close is not None:
            raise SpecError(
                f"args in [sweep] of {file.path} contains {{{name}}}, which is not a key of "
                "[space].",
                hint=f"Did you mean {{{close}}}?",
            )


def in_order(space: Mapping[str, dict[str, Any]], *, where: str = "[space]") -> list[str]:
    """Return the keys, each after those that it depends on, otherwise in the order written."""
    done: list[str] = []
    left = list(space)
    while left:
        ready = [
            key for key in left if all(parent in done for parent in space[key].get("when", {}))
        ]
        if not ready:
            raise SpecError(
                f"{', '.join(left)} in {where} depend on each other.",
                hint="Remove one of their `when`.",
            )
        done.append(ready[0])
        left.remove(ready[0])
    return done
