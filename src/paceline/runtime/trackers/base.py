"""What was asked of trackers, what a tracker is told of its run, and the three methods that it has."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import RunFolder


@dataclass(frozen=True)
class Tracking:
    """`[tracking]` of paceline.toml and the flags over it: what was said only."""

    wandb: bool | None = None
    wandb_project: str | None = None
    wandb_group: str | None = None
    wandb_entity: str | None = None
    wandb_mode: str | None = None
    wandb_all_processes: bool = False
    tensorboard: bool = False
    trackers: tuple[str, ...] = ()

    @classmethod
    def of(cls, launch_spec: LaunchSpec | None) -> Tracking:
        said: Mapping[str, Any] = launch_spec.tracking if launch_spec else {}
        known = {each.name for each in fields(cls)}
        values = {key: value for key, value in said.items() if key in known and value is not None}
        return cls(**{**values, "trackers": tuple(values.get("trackers", ()))})

    @property
    def wants_wandb(self) -> bool:
        """Who names a project wants it."""
        return self.wandb if self.wandb is not None else self.wandb_project is not None


@dataclass(frozen=True)
class RunInfo:
    """The run, as trackers are told of it."""

    run_id: str = ""  # the same after every resume; empty where no agent gave one
    project: str = ""
    experiment: str = ""
    folder: Path | None = None  # the run folder
    rank: int = 0
    world_size: int = 1
    attempt: int = 1
    already: int = 0  # bytes of metrics.jsonl that earlier attempts have written
    params: dict[str, Any] = field(default_factory=dict)  # run.params
    config: dict[str, Any] = field(
        default_factory=dict
    )  # what the run was asked to be: nodes, style, seed, ...
    best: tuple[str, str] | None = None  # the metric that decides, and "max" or "min"

    @property
    def place(self) -> Path | None:
        """Where trackers keep their files."""
        return RunFolder(self.folder).trackers if self.folder else None


@runtime_checkable
class Tracker(Protocol):
    """Gets the lines of metrics.jsonl. Lives in a thread of its own: its calls come one after the other.

    An error in any of them costs one warning and this tracker, never the run.
    """

    def start(self, run: RunInfo) -> None:
        """Before everything else; also when the run goes on after a stop, with the same `run.run_id`."""

    def log(self, step: int, values: dict[str, float | str]) -> None:
        """One line: what was logged at a step, and `epoch`, `time`, `seconds`, `samples_per_second`."""

    def finish(self, status: str) -> None:
        """After everything else: "done", "stopped" (it will go on later) or "failed"."""


def warn(text: str) -> None:
    print(f"paceline: {text}", file=sys.stderr, flush=True)


def first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
