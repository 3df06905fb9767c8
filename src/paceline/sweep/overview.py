"""One row per sweep, as `paceline ps` shows it: its trials by state, and the best one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.cluster.runs.folder import list_folders
from paceline.contract.run_folder import RunFolder
from paceline.contract.sweep.folder import SweepFolder
from paceline.sweep.results import PENDING, RUNNING, Sweep, finished, read_sweep
from paceline.watch.records import QueryStates
from paceline.watch.scheduler.shared_answer import query_states


@dataclass(frozen=True)
class SweepOverview:
    """A sweep in one row. Times are in seconds since 1970; what is not known is None."""

    name: str
    project: str
    experiment: str
    path: str
    is_over: bool
    metric: str
    direction: str  # minimize or maximize
    created: float | None
    trials: int
    counts: dict[str, int]  # trials by state: done, pruned, failed, missing, running, pending; none without trials
    best: float | None
    best_trial: int | None

    @property
    def status(self) -> str:
        """What most concerns you about it, in one word."""
        for state, word in ((RUNNING, "running"), (PENDING, "queued")):
            if state in self.counts:
                return word
        return next((state for state in ("failed", "missing") if state in self.counts), "done")

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def find_sweeps(scratch: Path) -> Iterator[SweepFolder]:
    """Yield the sweeps in a scratch folder."""
    return (SweepFolder(Path(path)) for path in list_folders(scratch, "sweep.json"))


def read_sweep_overview(folder: SweepFolder, query: QueryStates = query_states) -> SweepOverview:
    return make_sweep_overview(read_sweep(folder, query))


def make_sweep_overview(sweep: Sweep) -> SweepOverview:
    path = sweep.folder.path
    ends = [(trial.value, trial.number) for trial in finished(sweep.trials) if trial.value is not None]
    best = (max if sweep.maximizes else min)(ends, default=None)
    return SweepOverview(
        name=sweep.name,
        project=path.parent.parent.name,
        experiment=path.parent.name,
        path=str(path),
        is_over=not {RUNNING, PENDING} & sweep.counts.keys(),
        metric=sweep.metric,
        direction="maximize" if sweep.maximizes else "minimize",
        created=sweep.spec.get("created"),
        trials=len(sweep.trials),
        counts=sweep.counts,
        best=best[0] if best else None,
        best_trial=best[1] if best else None,
    )


def started_trials(folder: SweepFolder) -> list[RunFolder]:
    """Return the run folders of the trials that have started, by number."""
    numbers = sorted(int(path.name) for path in folder.trials.glob("*") if path.name.isdigit())
    return [folder.trial(number) for number in numbers if folder.trial(number).run_json.is_file()]
