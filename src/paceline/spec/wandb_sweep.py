"""W&B's own sweep file (`sweep.yml`): the parts that describe a trial. The search itself is
W&B's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.contract.redaction import holds_secret
from paceline.errors import EnvironmentProblem, SpecError
from paceline.spec.sweep import SECRET, SECRET_HINT

SUFFIXES = (".yml", ".yaml")
# W&B's ways to pass values to the script other than `--key value`.
_UNSUPPORTED = (
    "${args_no_hyphens}",
    "${args_json}",
    "${args_json_file}",
    "${args_no_boolean_flags}",
)


@dataclass(frozen=True)
class WandbFile:
    path: Path
    config: dict[str, Any] = field(repr=False)  # the whole file, for W&B
    program: str
    args: tuple[str, ...] = ()  # of every trial
    arguments: str = "options"  # whether to pass the point as --key value: options | none
    metric: str | None = None
    direction: str = "minimize"

    @property
    def name(self) -> str:
        name = self.config.get("name")
        return name if isinstance(name, str) and name else self.path.stem

    @property
    def points(self) -> int | None:
        """The largest number of points, if known."""
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
            raise SpecError(f"{path} has no {key!r}.", hint=f"Write {key}: {example}")
    if not isinstance(config["parameters"], dict):
        raise SpecError(
            f"Invalid parameters in {path}: use a table.",
            hint="Write a line for each: lr: {values: [0.1, 0.01]}",
        )
    _check_secrets(config["parameters"], path)
    metric = config.get("metric") or {}
    if not isinstance(metric, dict):
        raise SpecError(
            f"Invalid metric in {path}: use a table.",
            hint="Write metric: {name: loss, goal: minimize}",
        )
    args, arguments = _parse_command(config.get("command"), path)
    return WandbFile(
        path,
        config,
        program=str(config["program"]),
        args=args,
        arguments=arguments,
        metric=metric.get("name"),
        direction=metric.get("goal") or "minimize",
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        import yaml  # type: ignore[import-untyped]  # installed with wandb
    except ImportError:
        raise EnvironmentProblem(
            f"{path} is a W&B sweep, but wandb is not installed here.",
            hint='Install it with `pip install "paceline[wandb]"`.',
        ) from None
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise SpecError(
            f"Cannot read {path}: {problem.strerror}.", hint="Check the path."
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as problem:
        raise SpecError(
            f"{path} is not valid YAML: {' '.join(str(problem).split())}", hint="Fix the file."
        ) from None
    if not isinstance(config, dict):
        raise SpecError(
            f"{path} must be a table.", hint="Write the keys program, method and parameters."
        )
    return config


def _check_secrets(parameters: dict[str, Any], path: Path) -> None:
    for name, each in parameters.items():
        if not isinstance(each, dict):
            continue
        if isinstance(each.get("parameters"), dict):
            _check_secrets(each["parameters"], path)
        if holds_secret(str(name), each.get("values")) or holds_secret(
            str(name), each.get("value")
        ):
            raise SpecError(f"{path}: parameters: {name} {SECRET}", hint=SECRET_HINT)


def _parse_command(command: Any, path: Path) -> tuple[tuple[str, ...], str]:
    """Return the arguments after the program in `command`, and whether the point is among them."""
    if command is None:
        return (), "options"
    if not isinstance(command, list) or "${program}" not in command:
        raise SpecError(
            f"command in {path} lacks ${{program}}.",
            hint="Write [..., ${program}, ${args}], or remove command.",
        )
    args = [str(arg) for arg in command[command.index("${program}") + 1 :]]
    for arg in args:
        if arg in _UNSUPPORTED:
            raise SpecError(
                f"command in {path} has {arg}, which Paceline does not support.",
                hint="Write ${args} to pass parameters as --key value; run.params and "
                "wandb.config have them, too.",
            )
    return tuple(
        arg for arg in args if arg != "${args}"
    ), "options" if "${args}" in args else "none"


def _size(parameter: Any) -> int | None:
    """Return the number of a parameter's values; None for a range."""
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
