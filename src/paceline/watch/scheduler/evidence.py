"""What a run folder says about its job, so that the scheduler is asked only for what the folder
cannot say.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.contract.claims import find_holder
from paceline.contract.run_folder import TRIALS, RunFolder
from paceline.contract.verdict import DONE, FAILED, read_verdict

# seconds after its verdict for which the job of a finished run may still be ending
CLOSED_AGE = 900.0


@dataclass(frozen=True)
class Evidence:
    """The signs of a job in its run folder. Times are those of files; 0 if there is no such
    file.
    """

    submitted: float = 0.0
    started: float = 0.0  # its newest start
    verdict: float = 0.0  # of that start, or when the run was cancelled
    is_final: bool = False  # the verdict ends the run, or the user has cancelled it
    is_closed: bool = False  # and the job has had the time to end: nobody needs to ask for it


def read_evidence(runs: Iterable[tuple[RunFolder, str]]) -> dict[str, Evidence]:
    """Return what the folders of runs say about their jobs. Of several trials in one job, an open
    one counts.
    """
    found: dict[str, Evidence] = {}
    for folder, job in runs:
        each = _read(folder, job)
        if job not in found or not each.is_closed:
            found[job] = each
    return found


def _read(folder: RunFolder, job: str) -> Evidence:
    holder = find_holder(folder)
    submitted, cancelled = _modified(folder.job), _modified(folder.cancelled)
    if holder is None or holder.job != job:
        return Evidence(submitted, is_final=bool(cancelled))
    job_start = holder.job_start
    verdict = read_verdict(job_start.verdict)
    # A run that failed may still go back into the queue, for other nodes.
    is_final = (
        bool(cancelled) or verdict == DONE or (verdict == FAILED and not job_start.requeue.exists())
    )
    is_trial = folder.path.parent.name == TRIALS  # its job goes on with the next trial
    written = (
        0.0
        if is_trial
        else max(cancelled, _modified(job_start.verdict) if verdict is not None else 0.0)
    )
    is_closed = is_final and (is_trial or time.time() - written > CLOSED_AGE)
    return Evidence(
        submitted, _modified(folder.claims / str(holder.number)), written, is_final, is_closed
    )


def gather_evidence(jobs: Iterable[str] | Mapping[str, Evidence]) -> dict[str, Evidence]:
    """Return the evidence of jobs by job; for ids alone there is none."""
    return dict(jobs) if isinstance(jobs, Mapping) else dict.fromkeys(jobs, Evidence())


def _modified(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0
