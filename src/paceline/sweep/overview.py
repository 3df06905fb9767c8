"""One row per sweep, as `paceline ps` shows it: its trials by state, and the best one."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.contract.sweep_folder import DONE, FAILED, SweepFolder, TrialFolder
from paceline.errors import PacelineError
from paceline.spec.run_path import list_folders
from paceline.sweep.results import MISSING, PENDING, RUNNING, Sweep, finished, read_sweep
from paceline.watch.events import newest_change
from paceline.watch.records import QueryStates
from paceline.watch.scheduler import query_states

INTERVAL, OVER_INTERVAL = 10.0, 60.0  # seconds between reads of a sweep, and of one that is over
IDLE_SHARE = 20  # reading that takes long is followed by a pause of so many times its duration


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
    # trials by state: done, pruned, failed, missing, running, pending; none without trials
    counts: dict[str, int]
    best: float | None
    best_trial: int | None

    @property
    def status(self) -> str:
        return sweep_status(self.counts)

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "status": self.status}


def sweep_status(counts: Mapping[str, int]) -> str:
    """Return what most concerns you about a sweep, in one word, from its trials by state. All
    views show this one.
    """
    for state, word in ((RUNNING, "running"), (PENDING, "queued")):
        if state in counts:
            return word
    return next((state for state in (FAILED, MISSING) if state in counts), DONE)


def find_sweeps(scratch: Path) -> Iterator[SweepFolder]:
    """Yield the sweeps in a scratch folder."""
    return (SweepFolder(Path(path)) for path in list_folders(scratch, "sweep.json"))


def read_sweep_overview(folder: SweepFolder, query: QueryStates = query_states) -> SweepOverview:
    return make_sweep_overview(read_sweep(folder, query))


def make_sweep_overview(sweep: Sweep) -> SweepOverview:
    path = sweep.folder.path
    ends = [
        (trial.value, trial.number) for trial in finished(sweep.trials) if trial.value is not None
    ]
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


class SweepOverviews:
    """Reads the rows of sweeps again and again: those that are over seldom, unless their files
    change.
    """

    def __init__(self, query: QueryStates) -> None:
        self._query = query
        # rows by folder, with when its files changed, and until when it is not read again otherwise
        self._known: dict[Path, tuple[SweepOverview, tuple[float, ...], float]] = {}

    def read(self, folders: Iterable[SweepFolder]) -> list[SweepOverview]:
        """Return the rows of these sweeps, as far as they can be read."""
        found = {}
        for folder in folders:
            known, began = self._known.get(folder.path), time.monotonic()
            # when trials were added, started or submitted again; those that go on change their own
            paths = (folder.trials, folder.points, folder.jobs, folder.path)
            stamp = tuple(newest_change([path]) for path in paths)
            if known is None or known[1] != stamp or began > known[2]:
                with suppress(PacelineError, OSError, ValueError):
                    row = read_sweep_overview(folder, self._query)
                    pause = OVER_INTERVAL if row.is_over else INTERVAL
                    took = time.monotonic() - began
                    known = (row, stamp, began + max(pause, IDLE_SHARE * took))
            if known is not None:
                found[folder.path] = known
        self._known = found
        return [row for row, _, _ in found.values()]


def started_trials(folder: SweepFolder) -> list[TrialFolder]:
    """Return the run folders of the trials that have started, by number."""
    numbers = sorted(int(path.name) for path in folder.trials.glob("*") if path.name.isdigit())
    return [folder.trial(number) for number in numbers if folder.trial(number).run_json.is_file()]
