"""Whether a running job gives no sign of life: its agents have stopped writing to the run folder.

Slurm may take a dead job for a running one for half an hour: after a node has restarted so quickly
that it never counted as down, and above all if the controller restarts too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from paceline.contract.claims import find_holder
from paceline.contract.foreign_records import NUMBER, read_fields
from paceline.contract.run_folder import JobStartFolder, RunFolder
from paceline.contract.verdict import DONE, FAILED
from paceline.slurm.job_states import JobState
from paceline.spec.quantities import parse_seconds, show_seconds
from paceline.watch import origin

# seconds; a file server may show a write a minute late, and a busy node may write late
MIN_SILENCE = 300.0
FRESH = 120.0  # seconds since a sign of life after which nobody can say that a run goes on
MISSED_SAMPLES = 4  # that a node should have written meanwhile
SILENCE_HINT = (
    "If a node restarts quickly, Slurm may show its dead job as running. Check with `paceline "
    "doctor`, which asks the "
    "node. A restart continues from the newest checkpoint."
)


def seconds_silent(folder: RunFolder, state: JobState | None) -> float | None:
    """Return for how long the agents of a running job have written nothing; None if that is no
    reason to worry.

    Only agents that sample the use of their nodes write at intervals, whatever the ranks do.
    Silence means nothing without samples (`--system-metrics 0s`), or before the first one of this
    job start, while the job loads modules or its agents wait for each other.
    """
    if state is None or state.state != "RUNNING" or folder.cancelled.exists():
        return None
    holder = find_holder(folder)
    spec = read_fields(folder.launch_spec, {"system_metrics": NUMBER})
    interval = float(spec.get("system_metrics", 0.0))
    if holder is None or holder.job != state.id or not interval:
        return None
    if spec.get("trial") and holder.job_start.verdict.exists():
        return None  # its job goes on with the next trial
    limit = max(MIN_SILENCE, MISSED_SAMPLES * interval)
    now = origin.now()
    sampled = max(_times(folder.system.glob("*.jsonl")), default=None)
    if sampled is None or not limit <= now - sampled < seconds_run(state):
        return None  # they are new, or an earlier job start's
    silence = now - max(_times(_written(folder, holder.job_start)), default=sampled)
    return silence if silence >= limit else None


def shows_life(folder: RunFolder) -> bool:
    """Return whether ranks or agents have just written what they write at intervals: metrics, or
    samples of a node.
    """
    written = _times((folder.metrics, *folder.system.glob("*.jsonl")))
    return origin.now() - max(written, default=0.0) < FRESH


def describe_silence(seconds: float, *, nodes: str, verdict: str | None, remedy: str) -> str:
    """Return what `paceline ps` shows for a job without a sign of life."""
    cause = "a node may have restarted without Slurm noticing"
    if verdict in (DONE, FAILED):
        cause = f"it is {verdict}, but Slurm has not noticed"
    return f"no sign of life from {nodes} for {show_seconds(seconds)}: {cause}; use {remedy}"


def seconds_run(state: JobState) -> float:
    """Return how long the job has run since its last start; 0 if Slurm does not say."""
    try:
        return parse_seconds(state.elapsed)
    except ValueError:
        return 0.0


def _written(folder: RunFolder, job_start: JobStartFolder) -> Iterator[Path]:
    """Yield what agents, ranks and the batch script of a live run write to."""
    yield from (folder.slurm_log, folder.metrics)
    for parent in (
        folder.system,
        folder.events,
        job_start.path,
        *(each.path for each in folder.attempts()[-1:]),
    ):
        yield from parent.glob("*")


def _times(paths: Iterable[Path]) -> Iterator[float]:
    for path in paths:
        try:
            yield path.lstat().st_mtime
        except OSError:
            continue
