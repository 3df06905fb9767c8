"""Secrets that are still in the folders of finished runs and sweeps because their jobs were
killed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.contract.claims import find_holder
from paceline.contract.files.environment_file import forget_secrets, read_secret_names
from paceline.contract.files.file_owner import is_own_folder
from paceline.contract.run_folder import RunFolder
from paceline.contract.sweep.folder import SweepFolder
from paceline.contract.verdict import STOPPED
from paceline.errors import ClusterError
from paceline.slurm import squeue_and_sacct
from paceline.slurm.job_states import LIVE, UNKNOWN, WAITING
from paceline.watch.records import QueryStates, Record, find_runs, read_records
from paceline.watch.run_status import newest_verdict

REQUEUE_AGE = 7 * 86400.0  # seconds after which nobody requeues a job that stopped or lost its node


@dataclass(frozen=True)
class EndedSecrets:
    """An `environment.sh` that is no longer needed."""

    path: Path
    reason: str

    def remove(self) -> bool:
        return forget_secrets(self.path)


def find_ended_secrets(
    scratch: Path, query: QueryStates = squeue_and_sacct.states
) -> list[EndedSecrets]:
    """Return the files of runs and sweeps in a scratch folder that are certainly over."""
    own = [folder for folder in find_runs(scratch) if is_own_folder(folder.path)]
    runs = [folder for folder in own if read_secret_names(folder.environment)]
    found = [
        EndedSecrets(
            record.folder.environment,
            f"{_names(record.folder.environment)}; the run {record.status_phrase}",
        )
        for record in read_records(runs, query)
        if record.is_over and not _may_requeue(record)
    ]
    submissions = sorted(scratch.glob("*/*/*/submissions/*/environment.sh"))
    ours = (
        path
        for path in submissions
        if is_own_folder(path.parent) and is_own_folder(path.parent.parent.parent)
    )
    return found + list(_of_sweeps((path for path in ours if read_secret_names(path)), query))


def _may_requeue(record: Record) -> bool:
    """Whether a job that has ended may come back: Slurm or its own script may requeue it, or a
    person submit it.
    """
    if record.status == "cancelled":
        return False
    if (
        record.status not in ("preempted", "node failed")
        and newest_verdict(record.folder) != STOPPED
    ):
        return False
    holder = find_holder(record.folder)
    try:
        return (
            holder is not None and time.time() - holder.job_start.path.stat().st_mtime < REQUEUE_AGE
        )
    except OSError:
        return False


def _of_sweeps(paths: Iterable[Path], query: QueryStates) -> Iterator[EndedSecrets]:
    for path in paths:
        sweep = SweepFolder(path.parent.parent.parent)
        tasks = {
            f"{line.get('job')}_{index}": trials
            for line in sweep.read_jobs()
            if line.get("submission") == path.parent.name and isinstance(line.get("tasks"), dict)
            for index, trials in line["tasks"].items()
        }
        open_tasks = [
            task
            for task, trials in tasks.items()
            if not all(_has_ended(sweep, each) for each in trials)
        ]
        try:
            states = query(open_tasks) if open_tasks else {}
        except ClusterError:
            continue
        if not any(state.phase in (LIVE, WAITING, UNKNOWN) for state in states.values()):
            yield EndedSecrets(path, f"{_names(path)}; its trials have ended")


def _has_ended(sweep: SweepFolder, number: int) -> bool:
    trial = RunFolder(sweep.trials / str(number))
    return any((trial.path / name).exists() for name in ("result.json", "cancelled"))


def _names(path: Path) -> str:
    return f"secrets: {', '.join(read_secret_names(path))}"
