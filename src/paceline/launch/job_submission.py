"""One submission: what the cluster has, the plan for it, its checks, and the call of sbatch."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.contract.claims import find_holder
from paceline.contract.findings import PROBLEM, WARNING, Finding
from paceline.contract.redaction import redact_text
from paceline.contract.run_folder import RunFolder, write_atomically
from paceline.contract.run_path import RunPath
from paceline.contract.typed_command import to_type
from paceline.contract.verdict import DONE, FAILED, read_verdict
from paceline.errors import (
    ClusterError,
    EnvironmentProblem,
    JobRejected,
    NoAnswer,
    NoSlurm,
    UsageError,
)
from paceline.launch import run_folder as folders
from paceline.launch.checks.job import check_job
from paceline.launch.checks.start_source import resolve_start
from paceline.launch.confirmation.submission import note_attempt, note_job
from paceline.launch.environment.store import resolve_environment
from paceline.launch.plan.slurm import SlurmPlan, plan_slurm
from paceline.launch.prepare import path_in_run, prepare, read_launch_spec
from paceline.launch.secrets.secrets import read_secrets
from paceline.slurm import commands as slurm
from paceline.slurm import sbatch
from paceline.slurm.array_script import Trials
from paceline.slurm.batch_script import shell_library
from paceline.slurm.job_states import squeue_and_sacct
from paceline.slurm.job_states.meanings import ENDED
from paceline.slurm.limits import explain_rejection
from paceline.slurm.partitions import Partition, fair_cpus, find_partitions, select_partitions
from paceline.spec import Job


@dataclass(frozen=True)
class Submitted:
    """A run that is prepared and, unless only its script was wanted, in the queue."""

    plan: SlurmPlan
    job_id: str | None  # None when nothing was submitted
    notes: tuple[str, ...]

    @property
    def folder(self) -> RunFolder:
        return self.plan.run_path.folder


class JobSubmission:
    """A job on its way to the queue. With `trials` it is the array of a sweep."""

    def __init__(
        self,
        job: Job,
        *,
        after: Sequence[str] = (),
        trials: Trials | None = None,
        run_path: RunPath | None = None,
        grant_timeout: float = 0.0,
    ) -> None:
        self.trials, self.grant_timeout = trials, grant_timeout
        job = resolve_environment(job, os.environ)
        if run_path is None or job.is_typed("runtime.start_from"):  # otherwise the run has begun
            job = resolve_start(job, os.environ, after=after)
        self.job = job
        self.run_path = run_path or folders.new_run_path(job, os.environ)
        self.secrets = read_secrets(job, os.environ)
        self.partitions: list[Partition] = find_partitions()
        self.notes: list[str] = []
        self.after = [each for name in after if (each := self._awaited_job(name)) is not None]

    def plan(self, run_path: RunPath) -> SlurmPlan:
        job = self.job
        gpus = job.resources.gpus_per_node or 0
        names = job.resources.partition or os.environ.get("SBATCH_PARTITION")
        fair = fair_cpus(
            select_partitions(self.partitions, names),
            gpus=gpus,
            gpu_type=job.resources.gpu_type,
            nproc=job.launch.nproc or 1,
        )

        def path_in_job(path: Path) -> Path:
            return path_in_run(path, job=job, run_path=run_path)

        plan = plan_slurm(
            job,
            run_path=run_path,
            environ=os.environ,
            python=sys.executable,
            fair_cpus=fair,
            after=self.after,
            file_secrets=self.secrets,
            path_in_job=path_in_job,
            trials=self.trials,
        )
        return replace(
            plan, launch_spec=replace(plan.launch_spec, grant_timeout=self.grant_timeout)
        )

    def findings(self) -> list[Finding]:
        return check_job(self.job, self.plan(self.run_path), self.partitions)

    def check(self) -> list[Finding]:
        """Raise an error for every problem found, unless checks are off; return the warnings."""
        if not slurm.available():
            raise NoSlurm(
                "sbatch was not found.",
                hint="Run this on a login node of your cluster, or start a local Slurm with "
                "`paceline sandbox up`.",
            )
        found = self.findings() if self.job.launch.check else []
        problems = [
            UsageError(each.text, hint=each.hint) for each in found if each.level == PROBLEM
        ]
        if problems:
            last = problems[-1]
            hint = last.hint or "To submit anyway, add --no-check."
            raise UsageError(last.message, hint=hint, earlier=problems[:-1])
        return [each for each in found if each.level == WARNING]

    def submit(self, command: Sequence[str], *, script_only: Path | None = None) -> Submitted:
        """Create the run folder and submit it; if Slurm rejects the job, nothing stays behind.

        `command` is recorded as what the user typed. With `script_only`, write the script there
        instead of submitting.
        """
        job, job_id = self.job, None
        with folders.create_run_folder(self.run_path) as run_path:
            plan = self.plan(run_path)
            prepared = prepare(
                job,
                run_path=run_path,
                rank_counts=plan.rank_counts,
                launch_spec=plan.launch_spec,
                command=list(command),
                backend="slurm",
                snapshot_required=True,
                compiled=job.environment.kind == "current",
            )
            write_files(plan)
            if script_only is not None:
                write_script(script_only.absolute(), plan.script)
            else:
                job_id = self._sbatch(plan)
        self._note_job(plan.run_path.folder, job_id)
        return Submitted(plan, job_id, (*self.notes, *plan.notes, *prepared.notes))

    def _sbatch(self, plan: SlurmPlan, *, known: Sequence[str] = ()) -> str:
        folder = plan.run_path.folder
        try:
            note_attempt(folder, known=known)
            return submit_plan(plan, known=known)
        except NoAnswer as problem:
            raise ClusterError(
                problem.message,
                hint="Submit it again once Slurm responds. The run's folder is kept and marked as "
                "cancelled, so that"
                f" the job ends immediately if it exists after all: {plan.run_path.folder.path}",
            ) from None
        except JobRejected as rejected:
            raise explain_rejection(self.job, plan, self.partitions, rejected.reason) from None

    def _note_job(self, folder: RunFolder, job: str | None) -> None:
        """Record the job for the machine that has sent this. Whatever happens here, the job and
        its folder stay.
        """
        if job is not None and (note := note_job(folder, job)):
            self.notes.append(note)

    def _awaited_job(self, name: str) -> str | None:
        """Return the job that `--after` waits for; None if it is done already. `name` is a run's,
        or a job id.

        Raises UsageError if it can no longer succeed.
        """
        folder = None
        try:
            folder = folders.find_run(name, self.run_path.scratch)
        except UsageError:
            if not name.replace("_", "").isdigit():
                raise
        found = name if folder is None else slurm.read_job_id(folder)
        outcome = _outcome(folder, found)
        if outcome == DONE:
            self.notes.append(f"{name} is already done, so the job does not wait for it")
        elif found is None:
            raise UsageError(
                f"Invalid --after {name}: that run is not a Slurm job.",
                hint="Name a run that was started by `paceline submit`, or a job id.",
            )
        elif outcome is not None:
            again = (
                f"continue it (`{to_type(f'submit --resume {folder.path.name}')}`)"
                if folder
                else "run it again"
            )
            raise UsageError(
                f"Invalid --after {name}: {f'job {found}' if folder is None else 'that run'} has "
                f"ended: {outcome}.",
                hint=f"Either {again} first, or omit --after.",
            )
        elif folder is None and not _may_exist(name):
            raise UsageError(
                f"Invalid --after {name}: Slurm knows no job {name}, and no run has that id.",
                hint="Use a run or a job in the queue (`squeue` lists jobs). If the job is done, "
                "omit --after. To"
                " wait for a job that you are not allowed to see, use --dependency "
                f"afterok:{name}.",
            )
        if folder is not None:
            self._note_new_files(folder)
        return None if outcome == DONE else found

    def _note_new_files(self, folder: RunFolder) -> None:
        with suppress(EnvironmentProblem):  # the run may be another user's
            earlier = read_launch_spec(folder)
            if earlier.work:
                self.notes.append(
                    f"{folder.path.name} writes new files to {earlier.cwd}; read them from there"
                )


def _may_exist(job: str) -> bool:
    """Return whether Slurm knows a job, or does not answer."""
    try:
        return bool(squeue_and_sacct.states([job])) or squeue_and_sacct.knows(job)
    except ClusterError:
        return True


def _outcome(folder: RunFolder | None, job: str | None) -> str | None:
    """Return how a run or a job has ended; None if it has not, or if nobody knows."""
    try:
        state = squeue_and_sacct.states([job]).get(job) if job is not None else None
    except ClusterError:
        state = None
    if state is not None and state.phase != ENDED:
        return None
    holder = find_holder(folder) if folder is not None else None
    verdict = read_verdict(holder.job_start.verdict) if holder is not None else None
    if verdict == DONE:
        return DONE
    if folder is not None and folder.cancelled.exists():
        return "cancelled"
    if state is not None:
        return state.label
    return FAILED if verdict == FAILED else None


def write_files(plan: SlurmPlan) -> None:
    """Write the batch script, and the files beside it, into the run folder."""
    folder = plan.folder
    write_atomically(folder.environment, plan.environment_file, mode=0o600)
    write_atomically(folder.shell_library, shell_library())
    write_script(folder.shell_setup, "\n".join([*plan.sections.environment, ""]))
    write_script(folder.script, plan.script)


def write_script(path: Path, text: str) -> None:
    """Write lines of bash. If a line of `setup` has a secret, only its owner can read them."""
    write_atomically(path, text, mode=0o644 if redact_text(text) == text else 0o600)


def submit_plan(plan: SlurmPlan, *, known: Sequence[str] = ()) -> str:
    """Submit a run's script and record the job id in the run folder. `known` are the run's earlier
    jobs.
    """
    folder = plan.folder
    with sbatch.withdrawn_on_failure(plan, folder.cancelled, known=known):
        job = sbatch.run_sbatch(plan.sbatch, plan.submitter, folder=folder.path, known=known)
    try:
        # the job does the same with its id when it starts
        write_atomically(folder.job, f"{job}\n")
        waits = {"after": list(plan.after)} if plan.after else {}
        line = json.dumps({"time": time.time(), "event": "queued", "job": job, **waits})
        with open(folder.events / "launch.jsonl", "a", encoding="utf-8") as events:
            events.write(line + "\n")
    # the run folder is removed or restored on errors, and the job cannot run with that
    except BaseException:
        slurm.call(["scancel", job], environ=plan.submitter, check=False)
        raise
    return job
