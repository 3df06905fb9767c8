"""W&B's own sweep file (`sweep.yml`), as far as it says what a trial is; the search itself stays W&B's."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import EnvironmentProblem, SpecError

SUFFIXES = (".yml", ".yaml")
# W&B's words for how values reach the script, that are not `--key value`.
_OTHER_WORDS = ("${args_no_hyphens}", "${args_json}", "${args_json_file}", "${args_no_boolean_flags}")


@dataclass(frozen=True)
class WandbFile:
    path: Path
    config: dict[str, Any] = field(repr=False)  # as W&B is told it
    program: str
    args: tuple[str, ...] = ()  # that every trial has
    arguments: str = "options"  # whether the point follows as --key value: options | none
    metric: str | None = None
    direction: str = "minimize"

    @property
    def name(self) -> str:
        told = self.config.get("name")
        return told if isinstance(told, str) and told else self.path.stem

    @property
    def points(self) -> int | None:
        """How many points the search has at the most, where that is known beforehand."""
        cap = self.config.get("run_cap")
        sizes = [_size(each) for each in self.config["parameters"].values()]
        grid = self.config.get("method") == "grid" and None not in sizes
        known = [cap] if isinstance(cap, int) else []
        if grid:
            known.append(math.prod(size or 1 for size in sizes))
        return min(known, default=None)


def load_wandb_file(path: Path) -> WandbFile:
    """Read a sweep.yml. Errors name the file and the key."""
    config = _read(path)
    for key, example in (
        ("program", "train.py"),
        ("method", "random"),
        ("parameters", "{lr: {values: [0.1, 0.01]}}"),
    ):
        if not config.get(key):
            raise SpecError(f"{path}: there is no {key!r}", hint=f"write {key}: {example}")
    if not isinstance(config["parameters"], dict):
        raise SpecError(
            f"{path}: parameters is no table", hint="write a line for each: lr: {values: [0.1, 0.01]}"
        )
    metric = config.get("metric") or {}
    if not isinstance(metric, dict):
        raise SpecError(f"{path}: metric is no table", hint="write metric: {name: loss, goal: minimize}")
    args, arguments = _words(config.get("command"), path)
    return WandbFile(
        path, config, program=str(config["program"]), args=args, arguments=arguments,
        metric=metric.get("name"), direction=metric.get("goal") or "minimize",
    )  # fmt: skip


def _read(path: Path) -> dict[str, Any]:
    try:
        import yaml  # type: ignore[import-untyped]  # it comes with wandb
    except ImportError:
        raise EnvironmentProblem(
            f"{path} is a sweep of W&B, and wandb is not installed here",
            hint='install it: pip install "paceline[wandb]"',
        ) from None
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise SpecError(
            f"cannot read {path}: {problem.strerror}", hint="give the path of a sweep.yml"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as problem:
        raise SpecError(
            f"{path} is no YAML: {' '.join(str(problem).split())}", hint="correct the file"
        ) from None
    if not isinstance(config, dict):
        raise SpecError(f"{path} is no table", hint="write program:, method: and parameters:")
    return config


def _words(command: Any, path: Path) -> tuple[tuple[str, ...], str]:
    """What stands behind the program in `command`: words for every trial, and whether the point is among them."""
    if command is None:
        return (), "options"
    if not isinstance(command, list) or "${program}" not in command:
        raise SpecError(
            f"{path}: command names no ${{program}}",
            hint="write [..., ${program}, ${args}], or leave command out",
        )
    behind = [str(word) for word in command[command.index("${program}") + 1 :]]
    for word in behind:
        if word in _OTHER_WORDS:
            raise SpecError(
                f"{path}: command has {word}, which trials of Paceline do not get",
                hint="write ${args}: each parameter as --key value; run.params and wandb.config have them too",
            )
    return tuple(word for word in behind if word != "${args}"), "options" if "${args}" in behind else "none"


def _size(parameter: Any) -> int | None:
    """How many values a parameter has; None where it has a range."""
    if not isinstance(parameter, dict):
        return None
    if isinstance(parameter.get("parameters"), dict):
        sizes = [_size(each) for each in parameter["parameters"].values()]
        return None if None in sizes else math.prod(size or 1 for size in sizes)
    if isinstance(parameter.get("values"), list):
        return len(parameter["values"])
    if "value" in parameter:
        return 1
    bounds = (parameter.get("min"), parameter.get("max"))
    whole = all(isinstance(bound, int) for bound in bounds)
    return int(bounds[1]) - int(bounds[0]) + 1 if whole and "q" not in parameter else None  # type: ignore[arg-type]
