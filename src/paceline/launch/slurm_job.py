"""A run on Slurm, from its job to an id in the queue: its plan (pure: a dry run prints it), its
checks, and the call of sbatch.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from paceline.contract import env
from paceline.contract.claims import find_holder
from paceline.contract.foreign_records import read_objects
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.redaction import redact_text
from paceline.contract.run_folder import (
    DONE,
    FAILED,
    SUBMITTING,
    RunFolder,
    read_verdict,
    write_atomically,
)
from paceline.errors import ClusterError, JobRejected, NoAnswer, NoSlurm, UsageError
from paceline.launch.checks import check_job
from paceline.launch.environment.activation import (
    activation_lines,
    container_entry,
    environment_file,
    forwarded_names,
    interpreter,
    module_section,
)
from paceline.launch.environment.store import resolve_environment
from paceline.launch.launch_spec import SLURM, RankCounts, make_launch_spec
from paceline.launch.run_folder import find_run, open_run_folder, require_not_running
from paceline.launch.secrets import NO_SECRETS, Secrets, choose_secrets, plain_variables
from paceline.launch.submission import Submission, fill_folder
from paceline.slurm import commands as slurm
from paceline.slurm import sbatch, squeue_and_sacct
from paceline.slurm.batch_script import EnvironmentSection, ScriptPlan, job_script, shell_library
from paceline.slurm.job_states import ENDED, JobState
from paceline.slurm.limits import explain_rejection
from paceline.slurm.partitions import Partition, fair_cpus, find_partitions, select_partitions
from paceline.slurm.sbatch import BatchJob, Trials, array_script, submission_environment
from paceline.slurm.sbatch_directives import count_tasks, directives, require_plain_path
from paceline.spec.findings import PROBLEM, WARNING, Finding
from paceline.spec.job import Job
from paceline.spec.run_path import RunPath, list_folders
from paceline.spec.shell_text import command_line, to_type

if TYPE_CHECKING:
    from paceline.launch.resume import EarlierRun

DEFAULT_ATTEMPTS = 3


@dataclass(frozen=True)
class SlurmPlan(BatchJob):
    """Everything that a submission writes and calls."""

    run_path: RunPath
    launch_spec: LaunchSpec
    environment: EnvironmentSection
    environment_file: str = field(repr=False)  # environment.sh, which the script sources
    notes: tuple[str, ...] = ()
    secrets: str = ""  # their names, and where each comes from
    after: tuple[str, ...] = ()  # jobs that it waits for

    @property
    def rank_counts(self) -> RankCounts:
        counts = self.task_counts
        return RankCounts(counts.nodes, counts.nproc, counts.gpus, self.launch_spec.threads)

    def show(self, *, advice: Sequence[str] | None = None) -> str:
        """Return what a dry run prints: the script as it would be submitted, then the command.

        `advice` replaces what the header says that the reader can do with the script: without a run
        folder, Slurm cannot run it.
        """
        script = self.sections if advice is None else replace(self.sections, advice=advice)
        spec = self.launch_spec
        program = [*(["-m"] if spec.is_module else []), spec.program, *spec.args]
        notes = [
            *(f"note: {note}" for note in self.notes),
            f"each rank runs: python {command_line(program)}",
        ]
        if self.secrets:
            notes.append(f"secrets, whose values are only in environment.sh: {self.secrets}")
        notes.append(
            "stop_and_requeue.sh, which the script sources, is in the run folder, and the same "
            "for every run"
        )
        return "".join(
            [
                f"{script}\n",
                *(f"# {note}\n" for note in notes),
                f"# submitted by: {command_line(self.sbatch)}\n",
            ]
        )


def plan_slurm(
    job: Job,
    *,
    run_path: RunPath,
    environ: Mapping[str, str],
    python: str,
    fair_cpus: int = 1,
    after: Sequence[str] = (),
    file_secrets: Secrets = NO_SECRETS,
    path_in_job: Callable[[Path], Path] = lambda path: path,
    trials: Trials | None = None,
) -> SlurmPlan:
    """Return the plan. `after` are ids of jobs that must have succeeded; `python` is the
    interpreter that runs this.

    `file_secrets` are those that files hold. With `trials`, the launch spec is what all trials of a
    sweep share.
    """
    require_plain_path(str(run_path.folder.path), "run folder")
    counts = count_tasks(job, fair_cpus=fair_cpus)
    task_counts = counts if trials is None else trials.task_counts(job, counts)
    options = directives(job, task_counts, run_path.folder)
    if trials is not None:
        options = trials.directives(job, options, run_path.folder.path)
    threads = counts.cpus_per_task * counts.tasks_per_node // counts.nproc
    submission = submission_environment(environ, options)
    secrets = choose_secrets(job, environ=environ, file_secrets=file_secrets)
    launch_spec = make_launch_spec(
        job,
        run_path=run_path,
        rank_counts=RankCounts(counts.nodes, counts.nproc, counts.gpus, max(1, threads)),
        python=interpreter(job, environ, python),
        path_in_job=path_in_job,
        # secrets are in environment.sh alone: the launch spec is an ordinary file
        variables=plain_variables(job),
        max_restarts=(job.resume.max_attempts or DEFAULT_ATTEMPTS) - 1,
    )
    entry = container_entry(job, run_path, gpus=counts.gpus)
    environment = EnvironmentSection(
        modules=module_section(job.environment),
        activation=activation_lines(job, environ),
        setup=job.environment.setup,
        container=entry.definition,
    )
    uses_mpirun = job.launch.style == "mpirun"
    name = run_path.run_id if trials is None else f"trials of {trials.sweep.name}"
    program = PurePath(job.program.name).name.replace("\n", " ")
    nodes = f"{counts.nodes} node{'s' if counts.nodes > 1 else ''}"
    ranks = f"{counts.nproc} rank{'s' if counts.nproc > 1 else ''}"
    script_plan = ScriptPlan(
        title=f"{name}: {program} on {nodes} x {ranks}, style {job.launch.style}",
        folder=run_path.folder,
        python=launch_spec.python,
        task_counts=counts,
        directives=options,
        environment=environment,
        container=entry,
        mpirun=uses_mpirun,
        forwarded=forwarded_names(job, environ, secrets) if uses_mpirun else (),
        requeue=bool(job.resume.requeue),
        exclude=job.resources.exclude or "",
        step_options=[str(each) for each in options if each.option == "gpus-per-task"],
    )
    return SlurmPlan(
        folder=run_path.folder,
        run_path=run_path,
        task_counts=task_counts,
        launch_spec=launch_spec,
        directives=tuple(options),
        environment=environment,
        sections=job_script(script_plan) if trials is None else array_script(script_plan, trials),
        environment_file=environment_file(job, environ, secrets),
        arguments=tuple(_dependency(job, after)),
        submitter=submission.variables,
        notes=tuple(
            f"{name} sets {option} to {environ[name]!r}"
            for name, option in submission.defaults.items()
        ),
        secrets=secrets.describe(),
        after=tuple(after),
    )


def _dependency(job: Job, after: Sequence[str]) -> list[str]:
    """On the command line, not in the script: a script that is submitted again by hand should wait
    for nobody.
    """
    if job.resources.dependency is not None and after:
        raise UsageError(
            f"{job.source('job.dependency')} and --after both set what the job waits for.",
            hint="Use only one of them.",
        )
    if after:  # and do not wait for ever if one of them fails
        return [f"--dependency=afterok:{':'.join(after)}", "--kill-on-invalid-dep=yes"]
    return [f"--dependency={job.resources.dependency}"] if job.resources.dependency else []


@dataclass(frozen=True)
class Submitted:
    """A run that is prepared and, unless only its script was wanted, in the queue."""

    plan: SlurmPlan
    job_id: str | None  # None when nothing was submitted
    notes: tuple[str, ...]

    @property
    def folder(self) -> RunFolder:
        return self.plan.folder


class SlurmJob(Submission):
    """A run to submit, new or again. With `trials`, it is the array of a sweep."""

    def __init__(
        self,
        job: Job,
        *,
        earlier: EarlierRun | None = None,
        run_path: RunPath | None = None,
        after: Sequence[str] = (),
        trials: Trials | None = None,
    ) -> None:
        job = resolve_environment(job, os.environ)
        super().__init__(job, in_copy=True, earlier=earlier, run_path=run_path, after=after)
        self.partitions: list[Partition] = find_partitions()
        resources = job.resources
        names = resources.partition or os.environ.get("SBATCH_PARTITION")
        fair = fair_cpus(
            select_partitions(self.partitions, names),
            gpus=resources.gpus_per_node or 0,
            gpu_type=resources.gpu_type,
            nproc=job.launch.nproc or 1,
        )
        awaited = [self._awaited_job(name) for name in after]
        self.plan: SlurmPlan = plan_slurm(
            self.job,
            run_path=self.run_path,
            environ=os.environ,
            python=sys.executable,
            fair_cpus=fair,
            after=[each for each in awaited if each is not None],
            file_secrets=self.secrets,
            path_in_job=self.path_in_job,
            trials=trials,
        )

    @property
    def code(self) -> str:
        """Which code the job runs, for people."""
        if self.earlier is not None and self.earlier.keeps_code:
            return "the copy that the run already has; name the script to take a new one"
        if self.job.project.snapshot:
            return f"a new copy of {self.job.folder}"
        return f"{self.job.folder} itself, as it is when the job starts"

    def findings(self) -> list[Finding]:
        job = self.job
        if self.earlier is not None and self.earlier.keeps_code:
            # check that script, and not the one in the project
            job = replace(job, cwd=self.folder.code / os.path.relpath(job.cwd, job.folder))
        return check_job(job, self.plan, self.partitions)

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
        """Open the run folder, fill it and submit it. If Slurm rejects the job, everything is as it
        was.

        `command` is recorded as what the user typed. With `script_only`, write the script there
        instead of submitting.
        """
        plan, folder, job_id = self.plan, self.folder, None
        is_new = self.earlier is None
        sole = nullcontext() if is_new else self._sole_submitter()
        with sole, open_run_folder(self.run_path, is_new=is_new):
            notes = fill_folder(
                self.job,
                run_path=self.run_path,
                launch_spec=plan.launch_spec,
                command=command,
                backend=SLURM,
                in_copy=True,
                earlier=self.earlier,
            )
            write_files(plan)
            if script_only is not None:
                write_script(script_only.absolute(), plan.script)
                return Submitted(plan, None, (*self.notes, *plan.notes, *notes))
            # the job may start at once; the mark is back if Slurm rejects the job
            folder.cancelled.unlink(missing_ok=True)
            try:
                job_id = submit_plan(plan)
            except NoAnswer as problem:
                raise ClusterError(
                    problem.message,
                    hint="Submit it again once Slurm responds. The run's folder is kept and marked "
                    "as cancelled, so that the job ends immediately if it exists after all: "
                    f"{folder.path}",
                ) from None
            except JobRejected as rejected:
                raise explain_rejection(self.job, plan, self.partitions, rejected.reason) from None
        return Submitted(plan, job_id, (*self.notes, *plan.notes, *notes))

    @contextmanager
    def _sole_submitter(self) -> Iterator[None]:
        """Keep out other commands that submit this run. A command that is killed leaves no lock,
        and on a file system without locks, nobody is kept out.
        """
        folder, name = self.folder, self.run_path.run_id
        with open(folder.events / "launch.jsonl", "a", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    f"Another command is submitting run {name} now.",
                    hint=f"To see its status: {to_type(f'show {name}')}",
                ) from None
            except OSError:
                pass
            require_not_running(folder)
            if job := find_unconfirmed_job(folder):
                raise UsageError(
                    f"Run {name} has job {job}, which Slurm had not confirmed.",
                    hint=f"End it: scancel {job}",
                )
            (folder.path / SUBMITTING).unlink(missing_ok=True)
            yield

    def _awaited_job(self, name: str) -> str | None:
        """Return the job that `--after` waits for; None if it is done already. `name` is a run's,
        or a job id.

        Raises UsageError if it can no longer succeed.
        """
        folder = None
        try:
            folder = find_run(name, self.run_path.scratch)
        except UsageError:
            if not name.replace("_", "").isdigit():
                raise
        job = name if folder is None else slurm.read_job_id(folder)
        if job is None:
            raise UsageError(
                f"Invalid --after {name}: that run is not a Slurm job.",
                hint="Name a run that was started by `paceline submit`, or a job id.",
            )
        state, is_known = None, True
        with suppress(ClusterError):  # Slurm may not answer now
            state = squeue_and_sacct.states([job]).get(job)
            is_known = state is not None or folder is not None or squeue_and_sacct.knows(job)
        if not is_known:
            raise UsageError(
                f"Invalid --after {name}: Slurm knows no job {name}, and no run has that id.",
                hint="Use a run or a job in the queue (`squeue` lists jobs). If the job is done, "
                "omit --after. To wait for a job that you are not allowed to see, use --dependency "
                f"afterok:{name}.",
            )
        ended = _ended(folder, state)
        if ended == DONE:
            self.notes.append(f"{name} is already done, so the job does not wait for it")
            return None
        if ended is not None:
            again = "run it again"
            if folder is not None:
                again = f"continue it (`{to_type(f'submit --resume {folder.path.name}')}`)"
            raise UsageError(
                f"Invalid --after {name}: {'that run' if folder else f'job {job}'} has ended: "
                f"{ended}.",
                hint=f"Either {again} first, or omit --after.",
            )
        return job


def _ended(folder: RunFolder | None, state: JobState | None) -> str | None:
    """Return how a run or a job has ended; None if it has not, or if nobody knows."""
    if state is not None and state.phase != ENDED:
        return None
    holder = find_holder(folder) if folder is not None else None
    verdict = read_verdict(holder.job_start.verdict) if holder is not None else None
    if verdict == DONE:
        return DONE
    if folder is not None and folder.cancelled.exists():
        return "cancelled"
    return state.label if state is not None else FAILED if verdict == FAILED else None


# -- the files of a submission
# ----------------------------------------------------------------------------------------


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


def submit_plan(plan: SlurmPlan) -> str:
    """Submit a run's script and record the job id in the run folder."""
    folder = plan.folder
    known = slurm.known_jobs(folder)
    with sbatch.withdrawn_on_failure(plan, folder.cancelled, known=known):
        job = sbatch.run_sbatch(plan.sbatch, plan.submitter, folder=folder.path, known=known)
    try:
        # the job does the same when it starts
        write_atomically(folder.job, f"{job}\n")
        line = {"time": time.time(), "event": "queued", "job": job}
        if plan.after:
            line["after"] = list(plan.after)
        if request := os.environ.get(env.REQUEST):
            line["request"] = request
        with open(folder.events / "launch.jsonl", "a", encoding="utf-8") as events:
            events.write(json.dumps(line) + "\n")
    # the run folder is removed or restored on errors, and the job cannot run with that
    except BaseException:
        slurm.call(["scancel", job], environ=plan.submitter, check=False)
        raise
    return job


# -- a submission whose answer was lost
# ----------------------------------------------------------------------------------------


def find_unconfirmed_job(folder: RunFolder) -> str | None:
    """Return the job of a submission that Slurm never confirmed, if it has left one after all."""
    if not (folder.path / SUBMITTING).exists():
        return None
    known = slurm.known_jobs(folder)
    return sbatch.find_job(folder.path, os.environ, known=known, pauses=(0.0,))


def find_repeated(scratch: Path) -> tuple[RunFolder, str] | None:
    """Return the run and the job of this very submission, if it came from another machine before
    and its answer was lost there.

    A run of it that has no job is marked as cancelled, so that no job of it ever starts.
    """
    request = os.environ.get(env.REQUEST)
    if not request or not os.environ.get(env.REPEATED):
        return None
    for path in list_folders(scratch, "run.json"):
        folder = RunFolder(Path(path))
        if f'"{request}"' not in folder.run_json.read_text(encoding="utf-8", errors="replace"):
            continue
        if folder.cancelled.exists():  # the command there noticed that its connection was lost
            continue
        events = read_objects(folder.events / "launch.jsonl")
        jobs = [str(each["job"]) for each in events if each.get("request") == request]
        job = jobs[-1] if jobs else find_unconfirmed_job(folder)
        if job is not None:
            return folder, job
        write_atomically(folder.cancelled, f"{time.time():.0f}\n")
    return None
