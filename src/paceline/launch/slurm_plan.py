"""A Job on Slurm: the launch spec, the batch script, and the arguments of sbatch. Pure: a dry run
prints this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath

from paceline.contract.launch_spec import LaunchSpec
from paceline.errors import UsageError
from paceline.launch.environment.activation import (
    activation_lines,
    environment_file,
    forwarded_names,
    interpreter,
    module_section,
)
from paceline.launch.environment.container import container_entry
from paceline.launch.launch_spec import RankCounts, make_launch_spec
from paceline.launch.secrets import NO_SECRETS, Secrets, choose_secrets, plain_variables
from paceline.slurm.array_script import Trials, array_script
from paceline.slurm.batch_script import EnvironmentSection, ScriptPlan, job_script
from paceline.slurm.sbatch import BatchJob
from paceline.slurm.sbatch_directives import count_tasks, directives, require_plain_path
from paceline.slurm.submission_environment import submission_environment
from paceline.spec.job import Job
from paceline.spec.run_path import RunPath
from paceline.spec.shell_text import command_line

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

    def show(self, *, stop: str = "", advice: Sequence[str] | None = None) -> str:
        """Return what a dry run prints: the script as it would be submitted, then the command.

        `stop` says how the ranks are asked to stop; `advice` replaces what the header says that the
        reader can do with the script: without a run folder, Slurm cannot run it.
        """
        script = self.sections if advice is None else replace(self.sections, advice=advice)
        spec = self.launch_spec
        program = [*(["-m"] if spec.is_module else []), spec.program, *spec.args]
        notes = [
            *(f"note: {note}" for note in self.notes),
            f"each rank runs: python {command_line(program)}",
        ]
        if stop:
            notes.append(f"signal that asks each rank to stop: {stop}")
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
    submission = submission_environment(environ, options)
    secrets = choose_secrets(job, environ=environ, file_secrets=file_secrets)
    launch_spec = make_launch_spec(
        job,
        run_path=run_path,
        rank_counts=RankCounts(counts.nodes, counts.nproc, counts.gpus, counts.cpus_per_rank),
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
