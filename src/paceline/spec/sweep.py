"""A sweep's file: `[sweep]` (how to search), `[space]` (what to try), and any table of
paceline.toml.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from paceline.contract.redaction import redact_values
from paceline.errors import SpecError
from paceline.spec.option import Flag
from paceline.spec.settings import Tables, check, explain_flag, nearest, read_file
from paceline.spec.training_tables import SweepTable
from paceline.spec.values import Count, Table

RANGES = ("grid", "uniform", "log_uniform", "integer")
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
# What other libraries call ranges. As nested tables they would be parameters of these names.
FOREIGN = ("values", "choice", "choices", "categorical", "randint")


def _bounds(value: list[float]) -> list[float]:
    if len(value) != 2 or not all(map(math.isfinite, value)) or value[0] >= value[1]:
        raise ValueError("two numbers, a smaller and a larger one, such as [1, 8]")
    return value


def _conditions(value: object) -> object:
    if not isinstance(value, dict) or not value:
        raise ValueError('when = { other_key = "value" }')
    return {key: each if isinstance(each, list) else [each] for key, each in value.items()}


class Range(Table):
    """What to try for one key of `[space]`."""

    grid: Annotated[list[Any], Field(min_length=1)] | None = None
    uniform: Annotated[list[float], AfterValidator(_bounds)] | None = None
    log_uniform: Annotated[list[float], AfterValidator(_bounds)] | None = None
    integer: Annotated[list[int], AfterValidator(_bounds)] | None = None
    step: Count = 1
    log: bool = False
    when: Annotated[dict[str, list[Any]], BeforeValidator(_conditions)] | None = None

    @model_validator(mode="after")
    def check_words(self) -> Range:
        if len(self.model_fields_set & set(RANGES)) != 1:
            raise ValueError(f"one of {', '.join(RANGES)}")
        if self.integer is None and self.model_fields_set & {"step", "log"}:
            raise ValueError("step and log only with integer")
        if self.log_uniform is not None and self.log_uniform[0] <= 0:
            raise ValueError("numbers above 0")
        if self.integer is not None and self.log and (self.integer[0] < 1 or self.step != 1):
            raise ValueError("log = true only with numbers from 1 and without step")
        return self

    def to_json(self) -> dict[str, Any]:
        unused = {"step", "log"} if self.integer is None else set()
        return self.model_dump(exclude_none=True, exclude=unused)


class _Tables(Tables):
    """The whole file."""

    sweep: SweepTable = Field(default_factory=SweepTable.model_construct)
    space: dict[str, Any] = Field(default_factory=dict)


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
    checked = check(values, path, _Tables)
    others = {key: each for key, each in values.items() if key in Tables.model_fields}
    space = _read_space(checked.space, path)
    found = SweepFile(path, with_flags(checked.sweep, flags), space, others)
    check_sweep(found)
    return found


def with_flags(table: SweepTable, flags: Iterable[Flag]) -> SweepTable:
    """Return a table overridden by flags, except that a file's wandb_sweep wins over the flag."""
    values = table.model_dump()
    for flag in flags:
        if flag.value is None or (flag.key == "wandb_sweep" and table.wandb_sweep is not None):
            continue
        values[flag.key] = flag.value
        try:
            SweepTable.model_validate(values)
        except ValidationError as problem:
            raise explain_flag(problem, flag.name) from None
    return SweepTable.model_validate(values)


def _read_space(space: Mapping[str, Any], path: Path, prefix: str = "") -> dict[str, Any]:
    """Return the ranges of all keys; those of nested tables have dots."""
    found: dict[str, Any] = {}
    for name, value in space.items():
        key, words = f"{prefix}{name}", value if isinstance(value, dict) else {}
        is_range = words.keys() & {*Range.model_fields, *FOREIGN} or any(
            nearest(word, RANGES) for word in words
        )
        is_table = words and all(isinstance(each, (dict, list)) for each in words.values())
        if is_table and not is_range:
            found |= _read_space(words, path, f"{key}.")
            continue
        listed = value if isinstance(value, list) else [value]
        each = check(words or {"grid": listed}, f"{key} in [space] of {path}", Range).to_json()
        if any(isinstance(value, dict) for value in each.get("grid", ())):
            raise SpecError(f"Invalid {key} in [space] of {path}: use values, not tables.")
        shown = redact_values({key: each.get("grid")})
        if shown[key] != each.get("grid"):
            raise SpecError(
                f"{path}: [space] {key} is a secret, but the points of a sweep are in files that "
                "others can read.",
                hint="Pass it as an environment variable: put it into .env, or list its name in "
                "[environment] secrets.",
            )
        found[key] = each
    return found


def check_sweep(file: SweepFile) -> None:
    """Raise for settings that are valid by themselves but not together."""
    table, path = file.table, file.path
    if (table.script is None) == (table.module is None):
        raise SpecError(
            f"[sweep] of {path} needs either a script or a module.",
            hint='Write script = "train.py", relative to this file.',
        )
    check_metric(table, path)
    if table.wandb_sweep is not None:
        if file.space:
            raise SpecError(
                f"[space] of {path} and the W&B sweep {table.wandb_sweep} both define points.",
                hint="Remove [space] or the W&B sweep.",
            )
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
    if table.sampler == "grid":
        for key, each in file.space.items():
            if "grid" not in each and not ("integer" in each and not each["log"]):
                raise SpecError(
                    f"{key} in [space] of {path} is a range, but a grid needs values.",
                    hint=f'List them: {key} = [0.1, 0.01], or set sampler = "random" or "tpe".',
                )
    _check_conditions(file)


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
        for parent in each.get("when", {}):
            if parent not in file.space:
                raise SpecError(
                    f"Unknown key {parent!r} in `when` of {key} in [space] of {file.path}.",
                    hint=f"The keys are: {', '.join(file.space)}.",
                )
    in_order(file.space, where=str(file.path))


def in_order(space: Mapping[str, dict[str, Any]], *, where: str = "[space]") -> list[str]:
    """Return the keys, each after those that it depends on."""
    try:
        sorter = TopologicalSorter({key: each.get("when", {}) for key, each in space.items()})
        return list(sorter.static_order())
    except CycleError as problem:
        raise SpecError(
            f"{', '.join(problem.args[1][1:])} in {where} depend on each other.",
            hint="Remove one of their `when`.",
        ) from None
