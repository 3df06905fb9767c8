"""Trials into the queue: one call of sbatch per array, as few arrays as the cluster allows."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.cluster.slurm.arrays import JOB_LIMIT_REACHED, array_size_limit, max_new_jobs, submit_array
from paceline.contract.run_folder import write_atomically
from paceline.errors import JobRejected
from paceline.plan.slurm.plan import SlurmPlan
from paceline.sweep.folder import Ledger
from paceline.sweep.tasks import Chunk, cut, group


def plan_chunks(numbers: Sequence[int], *, pack: int, largest: int, most: int | None) -> list[Chunk]:
    """The arrays that these trials make. Where not so many jobs are allowed, a task runs several, one by one."""
    return cut(group(numbers, pack=pack, most_tasks=most), most=largest)


def fewest(*limits: int | None) -> int | None:
    """The one of several limits that counts; None where there is none."""
    return min((limit for limit in limits if limit is not None), default=None)


class Submission:
    """One submission of trials, array by array."""

    def __init__(
        self, ledger: Ledger, plan: SlurmPlan, *, pack: int, parallel: int | None, tasks: int | None = None
    ) -> None:
        self.ledger, self.plan, self.pack, self.tasks = ledger, plan, pack, tasks
        # What is throttled are tasks, and what was asked for are trials.
        self.throttle = None if parallel is None else max(1, math.ceil(parallel / pack))
        self.jobs: list[str] = []
        self.submitted = 0  # trials

    def give(self, numbers: Sequence[int], *, account: str | None) -> None:
        """All of them. A refusal because of the number of jobs makes tasks longer and fewer; others are errors."""
        largest, most = array_size_limit(), fewest(max_new_jobs(account, wanted=len(numbers)), self.tasks)
        left = list(numbers)
        while left:
            chunks = plan_chunks(left, pack=self.pack, largest=largest, most=most)
            for chunk in chunks:
                try:
                    self._give(chunk)
                except JobRejected as refusal:
                    tasks = math.ceil(len(left) / max(1, len(chunk.trials) // len(chunk.tasks)))
                    if not JOB_LIMIT_REACHED.search(refusal.reason) or tasks < 2:
                        raise
                    most = tasks // 2
                    break
                left = left[len(chunk.trials) :]

    def _give(self, chunk: Chunk) -> None:
        kit = self.plan.run_path.folder.path
        listing = f"tasks-{len(self.jobs) + 1}"
        write_atomically(kit / listing, chunk.listing())
        # Each array would be throttled for itself: they follow each other, so that all together keep to it.
        after = self.jobs[-1:] if self.throttle is not None else []
        job = submit_array(self.plan, array=chunk.array(self.throttle), listing=listing, after=after)
        self.jobs.append(job)
        self.submitted += len(chunk.trials)
        self.ledger.note_job(job, submission=kit.name, tasks=chunk.tasks)
