"""Read the records of runs, with a single query to the scheduler for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.contract.checkpoint.marker import find_checkpoints
from paceline.contract.checkpoint.names import checkpoint_step
from paceline.contract.claims import Holder, find_holder
from paceline.contract.files.foreign_records import NUMBER, Fields, keep_valid, read_object
from paceline.contract.run_folder import RunFolder
from paceline.contract.run_path import is_fetched, list_folders
from paceline.contract.verdict import read_verdict
from paceline.errors import ClusterError
from paceline.slurm import commands as slurm
from paceline.slurm.job_states.meanings import ENDED, WAITING, JobState
from paceline.watch import origin
from paceline.watch.metrics.latest import read_latest
from paceline.watch.records.fetched import explain_status
from paceline.watch.records.record import Record
from paceline.watch.records.run_status import LOST, OVER, find_status
from paceline.watch.scheduler.evidence import Evidence, read_evidence
from paceline.watch.scheduler.shared_answer import query_states
from paceline.watch.silence import seconds_run, shows_life

QueryStates = Callable[[Iterable[str]], Mapping[str, JobState]]

# What we read of run.json, which may be another user's or another version's.
RUN_FIELDS: Fields = {
    "run_id": str,
    "project": str,
    "experiment": str,
    "name": str,
    "created": NUMBER,
    "program": str,
    "command": list,
    "nodes": int,
    "nproc": int,
    "style": str,
    "host": str,
    "code": dict,
    "spec": dict,
    "args": list,
    "earlier": list,
    "slurm_conf": str,
}


def find_runs(scratch: Path) -> list[RunFolder]:
    """Return the runs in a scratch folder, newest first (run ids sort by time)."""
    return [RunFolder(Path(path)) for path in list_folders(scratch, "run.json")]


def read_records(folders: Iterable[RunFolder], query: QueryStates = query_states) -> list[Record]:
    """Return the records of runs. If the scheduler does not respond, the states of its jobs are
    unknown.
    """
    return list(iterate_records(folders, query))


def iterate_records(
    folders: Iterable[RunFolder], query: QueryStates = query_states
) -> Iterator[Record]:
    """Yield the same records one by one: thousands of them need not be in memory at once."""
    listed = list(folders)
    return map(record_maker(listed, query), listed)


def record_maker(
    listed: Sequence[RunFolder], query: QueryStates = query_states
) -> Callable[[RunFolder], Record]:
    """Ask the scheduler about these runs, once, and return what makes the record of each."""
    jobs = {folder.path: slurm.read_job_id(folder) for folder in listed}
    submitted = read_evidence(
        (folder, job) for folder in listed if (job := jobs[folder.path]) is not None
    )
    states: Mapping[str, JobState] = {}
    problem = None
    if submitted:
        try:
            states = {
                job: state
                for job, state in query(submitted).items()
                if job not in submitted or not _is_another(state, submitted[job])
            }
        except ClusterError as error:
            problem = error
    return lambda folder: _record(folder, jobs[folder.path], states, problem)


def _is_another(state: JobState, evidence: Evidence) -> bool:
    """Return whether a job with the id of a run that was over long ago is not the run's: it started
    after that.

    Slurm gives ids away again, and so does another cluster. One that goes on since then hangs.
    """
    if not evidence.is_closed or not evidence.verdict or state.phase == ENDED:
        return False
    return state.phase == WAITING or origin.now() - seconds_run(state) > evidence.verdict


def read_record(folder: RunFolder, query: QueryStates = query_states) -> Record:
    return read_records([folder], query)[0]


def _record(
    folder: RunFolder, job: str | None, states: Mapping[str, JobState], problem: ClusterError | None
) -> Record:
    state = states.get(job) if job is not None else None
    holder = find_holder(folder)
    status = find_status(folder, job, state, holder, reachable=problem is None)
    if (
        job is not None
        and (state is not None or status in (LOST, "unknown"))
        and is_fetched(folder)
    ):
        # Its job is another cluster's, whatever this one says about the number.
        state, problem = None, explain_status(folder)
        status = find_status(folder, job, None, holder, reachable=False)
    elif (
        status == "unknown"
        and holder is not None
        and holder.job == job
        and _goes_on(folder, holder)
    ):
        status = "running"
    is_over = state.phase == ENDED if state is not None else status in OVER
    latest = read_latest(f"{folder.path}/metrics.jsonl", with_pace=not is_over)
    return Record(
        folder=folder,
        details=keep_valid(read_json(f"{folder.path}/run.json"), RUN_FIELDS),
        status=status,
        job=job,
        state=state,
        attempts=len(folder.attempt_numbers()),
        step=_step(folder) if latest.step is None else latest.step,
        no_answer=problem
        if job is not None and state is None and status in ("unknown", "running")
        else None,
        holder=holder,
        newest=latest,
    )


def _goes_on(folder: RunFolder, holder: Holder) -> bool:
    """Return whether a run is certainly running, although Slurm does not respond: it writes, and
    has not ended.
    """
    return read_verdict(f"{holder.path}/verdict") is None and shows_life(folder)


def read_json(path: Path | str) -> dict[str, Any]:
    """Read a JSON object; return an empty one if the file is missing or invalid."""
    try:
        return read_object(path)
    except (OSError, ValueError):
        return {}


def _step(folder: RunFolder) -> int | None:
    """Return the step of the newest checkpoint."""
    found = find_checkpoints(folder.path)
    return checkpoint_step(found[0].name) if found else None
