"""What a tracker knows about its run, and the three methods of a tracker."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from paceline.contract.run_folder import RunFolder
from paceline.runtime.settings import LaunchContext


@dataclass(frozen=True)
class RunInfo:
    """The run, as `Tracker.start` receives it."""

    run_id: str = ""  # the same after every resume; empty if Paceline did not launch the script
    project: str = ""
    experiment: str = ""
    folder: Path | None = None  # the run folder
    rank: int = 0
    world_size: int = 1
    attempt: int = 1
    params: dict[str, Any] = field(default_factory=dict)  # run.params
    # settings of the run: nodes, style, seed, ...
    config: dict[str, Any] = field(default_factory=dict)
    best: tuple[str, str] | None = None  # the metric to keep the best value of, and "max" or "min"

    @classmethod
    def of(cls, context: LaunchContext, **more: Any) -> RunInfo:
        """Return what a process knows from its agent, and more."""
        spec, folder = context.launch_spec, context.folder
        known: dict[str, Any] = {"attempt": context.attempt, "folder": folder and folder.path}
        if spec is not None:
            known |= {"run_id": spec.run_id, "project": spec.project}
            known |= {"experiment": spec.experiment, "params": dict(spec.params)}
        return cls(**{**known, **more})

    @property
    def trackers_folder(self) -> Path | None:
        """The folder for files that trackers write."""
        return RunFolder(self.folder).trackers if self.folder else None


@runtime_checkable
class Tracker(Protocol):
    """Receives every line of `metrics.jsonl`. Implement these three methods; no base class is
    needed.

        class Printer:
            def start(self, run): print("run", run.run_id)
            def log(self, step, values): print(step, values)
            def finish(self, status): print(status)

        with paceline.session(trackers=[Printer()]) as run: ...

    To use it without changing the script, name it in paceline.toml: `[tracking] trackers =
    ["package.module:Class"]` (constructed without arguments).

    Paceline calls the methods on rank 0 only, one after the other, in a separate thread for each
    tracker, so a slow tracker doesn't slow down training. If a method raises, Paceline prints a
    warning and drops the tracker; the run continues.
    """

    def start(self, run: RunInfo) -> None:
        """Called once per attempt, before anything else. After a resume, `run.run_id` is the same
        as before.
        """

    def log(self, step: int, values: dict[str, float | str]) -> None:
        """Called for each line of metrics.jsonl.

        `values` has what `run.log` logged at this step, averaged over ranks, and `epoch`, `time`,
        `seconds` and
        `samples_per_second`. It may hold nan and inf. After a crash, steps that are repeated are
        logged again.
        """

    def finish(self, status: str) -> None:
        """Called last, with "done", "stopped" (the run will continue later) or "failed".

        You have 30 seconds to return: 15 if the run was stopped, 5 if it failed.
        """


def first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
