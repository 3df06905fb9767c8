"""Asks Slurm for the states of jobs: the queue, then accounting."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from paceline.errors import ClusterError
from paceline.slurm import commands as slurm
from paceline.slurm.job_states import JobState, normalize_state

_SQUEUE = ("%i", "%T", "%r", "%N", "%S", "%M")
_SACCT = ("JobID", "State", "Reason", "NodeList", "Start", "Elapsed", "ExitCode")


def states(jobs: Iterable[str]) -> dict[str, JobState]:
    """Ask for job states, in the queue or, failing that, in accounting. Unknown jobs are left out.

    Commands that only look use `paceline.watch.scheduler` instead, which asks less often.
    """
    wanted = dict.fromkeys(jobs)
    if not wanted:
        return {}
    found = {job: state for job, state in queue().items() if job in wanted}
    return found | accounting([job for job in wanted if job not in found])


def queue() -> dict[str, JobState]:
    """Return all of the user's jobs that the controller still remembers, in a single call."""
    form = f"--format={slurm.SEPARATOR.join(_SQUEUE)}"
    argv = [
        "squeue",
        "--all",
        "--noheader",
        "--states=all",
        "--array",
        f"--user={os.getuid()}",
        form,
    ]
    done = slurm.call(argv, environ={**os.environ, "SLURM_TIME_FORMAT": "standard"})
    return _parse(done.stdout, fields=len(_SQUEUE))


def accounting(jobs: Sequence[str]) -> dict[str, JobState]:
    """Return job states from accounting; empty if the cluster has none or does not allow
    queries.
    """
    found: dict[str, JobState] = {}
    for start in range(0, len(jobs), slurm.JOBS_PER_CALL):
        found |= _account(jobs[start : start + slurm.JOBS_PER_CALL])
    return found


def _account(jobs: Sequence[str]) -> dict[str, JobState]:
    try:
        done = slurm.call(
            [
                "sacct",
                "--noheader",
                "--parsable2",
                f"--delimiter={slurm.SEPARATOR}",
                "--allocations",
                f"--jobs={','.join(jobs)}",
                f"--format={','.join(_SACCT)}",
            ],
            check=False,
        )
    except ClusterError:
        return {}
    return _parse(done.stdout, fields=len(_SACCT)) if done.returncode == 0 else {}


def _parse(text: str, *, fields: int) -> dict[str, JobState]:
    found = {}
    for line in text.splitlines():
        values = [value.strip() for value in line.split(slurm.SEPARATOR)]
        if len(values) == fields:
            job, state, reason, *rest = values
            known = "" if reason in ("None", "none", "(null)") else reason
            found[job] = JobState(job, normalize_state(state), known, *rest)
    return found


def knows(job: str) -> bool:
    """Return whether the controller knows a job, anybody's, that is in the queue or has ended a
    moment ago.
    """
    done = slurm.call(
        ["squeue", "--all", "--noheader", "--states=all", f"--jobs={job}", "--format=%i"],
        check=False,
    )
    return (
        bool(done.stdout.strip()) if done.returncode == 0 else "Invalid job id" not in done.stderr
    )


def numeric_job_id(job: str) -> str:
    """Return the numeric id that srun needs: an array task (`ARRAY_TASK`) has one of its own."""
    if job.isdigit():
        return job
    done = slurm.call(["squeue", "--all", "--noheader", f"--jobs={job}", "--format=%A"])
    return (done.stdout.split() or [job])[0]
