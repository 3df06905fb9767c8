"""What this process looks at: the runs on this machine, or a mirror of those on a cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from paceline.contract.quote import quote
from paceline.contract.typed_command import meant_for, to_type
from paceline.errors import ClusterError, EnvironmentProblem, PacelineError
from paceline.slurm.job_states.meanings import JobState
from paceline.ssh.mirror.job_states import read_states
from paceline.ssh.mirror.mirror_folder import Mirror

FRESH = 45.0  # seconds after a word from the cluster during which its clock is known


@dataclass(frozen=True)
class Viewpoint:
    """The mirror of a cluster."""

    cluster: str
    mirror: Mirror
    # does something to a run on the cluster: the verb and the run's name
    act: Callable[[str, str], str]
    found: Mapping[str, str] = field(default_factory=dict)  # what the names mean that were typed
    status: Callable[[], str] = lambda: ""  # why nothing new comes, in one line; empty if it does
    end: Callable[[], PacelineError | None] = lambda: None  # why nothing will come any more

    @property
    def scratch(self) -> Path:
        return self.mirror.folder

    def states(self, jobs: Iterable[str]) -> dict[str, JobState]:
        return read_states(self.mirror.base, jobs)

    def not_here(self, what: str) -> ClusterError:
        return ClusterError(
            f"The {what} of {self.cluster} is not mirrored.", hint=f"Use: {to_type('doctor')}"
        )


_current: Viewpoint | None = None


def current() -> Viewpoint | None:
    """Return the mirror that this process looks at; None if it looks at runs of this machine."""
    return _current


@contextmanager
def look_at(viewpoint: Viewpoint) -> Iterator[None]:
    """Let everything in this process that reads runs read a mirror."""
    global _current
    before, _current = _current, viewpoint
    try:
        with meant_for(viewpoint.cluster):
            yield
    finally:
        _current = before


def now(run: Path | str = "") -> float:
    """Return the time by the clock of whoever writes the runs.

    Without news from there, return when the last news came: of a run, if its folder is given.
    """
    if _current is None:
        return time.time()
    heard = _current.mirror.heard()
    if _is_fresh(heard.here):
        return heard.there + time.time() - heard.here
    return heard.there - (heard.here - copied(run) if _current.status() else 0.0)


def _is_fresh(heard: float) -> bool:
    """Return whether the last word from the cluster, by the clock of here, tells what time it is
    there.
    """
    return 0 <= time.time() - heard < FRESH and not status()


def clock() -> dict[str, float | bool]:
    """Return the clock of whoever writes the runs, for a page to count by. Without news from
    there, it stands still.
    """
    return {"now": now(), "runs": _current is None or _is_fresh(_current.mirror.heard().here)}


def copied(run: Path | str = "") -> float:
    """Return when the copy of a run was last complete but for its logs; without one, when the
    cluster was heard of.
    """
    if _current is None:
        return time.time()
    heard = _current.mirror.heard().here
    return min(heard, (_current.mirror.seen(run) if run else 0.0) or heard)


def age(run: Path | str) -> float:
    """Return how old the copy of a run is, in seconds, if there is no connection to its cluster;
    else 0.
    """
    return (
        max(0.0, time.time() - copied(run)) if _current is not None and _current.status() else 0.0
    )


def origin(path: Path | str) -> str:
    """Return where a file is: of a mirror, on which cluster and where there."""
    there = path_there(path)
    return there if _current is None or there == str(path) else f"{_current.cluster}:{there}"


def path_there(path: Path | str) -> str:
    """Return the path of a file where it is written: of a mirror, the path on the cluster."""
    if _current is None:
        return str(path)
    try:
        inner = Path(path).relative_to(_current.mirror.folder)
    except ValueError:
        return str(path)
    return str(Path(_current.mirror.heard().scratch) / inner)


def require_code(run: str) -> None:
    """Raise an error that says where the code of a run is if it is not on this machine."""
    if _current is not None:
        bring = to_type(f"fetch {quote(run)} --all")
        raise EnvironmentProblem(
            f"The code is on {_current.cluster}.", hint=f"To compare it here, fetch it: {bring}"
        )


def status() -> str:
    """Return why nothing new comes, in one line; empty if it does."""
    return "" if _current is None else _current.status()


def end() -> PacelineError | None:
    """Return why nothing new will come any more; None if something may."""
    return None if _current is None else _current.end()


def require_news() -> None:
    """Raise an error if nothing new will come any more: whoever waits for it would wait for
    ever.
    """
    if (problem := end()) is not None:
        raise problem
