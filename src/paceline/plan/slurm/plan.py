"""A Job on Slurm: the order, the batch script, and the words of sbatch. Pure: a dry run prints this and no more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from paceline.contract.launch_spec import LaunchSpec
from paceline.errors import SpecError, UsageError
from paceline.plan.environment.container import wrapping
from paceline.plan.environment.modules import module_lines
from paceline.plan.environment.variables import (
    activation_lines,
    environment_file,
    forwarded_names,
    interpreter,
    submission_environment,
)
from paceline.plan.launch_spec import make_launch_spec
from paceline.plan.quote import command_line
from paceline.plan.run_path import RunPath
from paceline.plan.secrets import NO_SECRETS, Secrets, choose_secrets, plain_variables
from paceline.plan.shape import Shape
from paceline.plan.slurm.array import Trials, render_array
from paceline.plan.slurm.directives import Directive, Layout, directives, lay_out
from paceline.plan.slurm.script import Batch, render_batch
from paceline.spec import Job

USUAL_ATTEMPTS = 3


@dataclass(frozen=True)
class SlurmPlan:
    """All that a submission writes and calls."""

    run_path: RunPath
    layout: Layout
    launch_spec: LaunchSpec
    directives: tuple[Directive, ...]
    script: str  # job.sbatch
    environment: str = field(repr=False)  # environment.sh
    arguments: tuple[str, ...]  # of sbatch, ahead of the script's path
    submitter: dict[str, str]  # the environment that sbatch is called in
    notes: tuple[str, ...] = ()
    secrets: str = ""  # their names, and where each comes from

    @property
    def shape(self) -> Shape:
        return Shape(self.layout.nodes, self.layout.nproc, self.layout.gpus, self.launch_spec.threads)

    @property
    def sbatch(self) -> list[str]:
        return ["sbatch", "--parsable", *self.arguments, str(self.run_path.folder.script)]

    def value(self, option: str) -> str | None:
        """What an option of sbatch was given, if anything."""
        return next((each.value for each in self.directives if each.option == option), None)

    def show(self) -> str:
        """What a dry run prints: the script as it would be submitted, then the command."""
        notes = "".join(f"# note: {note}\n" for note in self.notes)
        if self.secrets:
            notes += f"# secrets, whose values stand in environment.sh alone: {self.secrets}\n"
        return f"{self.script}\n{notes}# submitted by: {command_line(self.sbatch)}\n"


def plan_slurm(
    job: Job,
    *,
    run_path: RunPath,
    environ: Mapping[str, str],
    python: str,
    fair_cpus: int = 1,
    after: Sequence[str] = (),
    filed: Secrets = NO_SECRETS,
    place_of: Callable[[Path], Path] = lambda path: path,
    trials: Trials | None = None,
) -> SlurmPlan:
    """The plan. `after` are ids of jobs that must have ended well; `python` is the interpreter that reads this.

    `filed` are the secrets that files hold. With `trials` it is that of a sweep: its order is what all of them share.
    """
    _check_path(str(run_path.folder.path))
    layout = lay_out(job, fair_cpus=fair_cpus)
    asked = layout if trials is None else trials.whole(job, layout)
    found = directives(job, asked, run_path.folder)
    if trials is not None:
        found = trials.directives(job, found, run_path.folder.path)
    submission = submission_environment(environ, found)
    secrets = choose_secrets(job, environ=environ, filed=filed)
    launch_spec = _order(
        job, run_path=run_path, layout=layout, python=interpreter(job, environ, python), place_of=place_of
    )
    batch = Batch(
        title=_title(job, layout, run_path.run_id if trials is None else f"trials of {trials.sweep.name}"),
        folder=run_path.folder,
        python=launch_spec.python,
        layout=layout,
        directives=found,
        wrapping=wrapping(job, run_path, gpus=layout.gpus),
        modules=module_lines(job.environment),
        activation=activation_lines(job, environ),
        setup=job.environment.setup,
        mpirun=job.launch.style == "mpirun",
        forwarded=forwarded_names(job, environ, secrets) if job.launch.style == "mpirun" else (),
        requeue=job.resume.requeue,
        nodelist=job.resources.nodelist is not None,
        exclude=job.resources.exclude or "",
        step_options=[str(each) for each in found if each.option == "gpus-per-task"],
    )
    deciding = [
        f"{option} is {environ[name]!r}, as {name} says" for name, option in submission.deciding.items()
    ]
    return SlurmPlan(
        run_path=run_path,
        layout=asked,
        launch_spec=launch_spec,
        directives=tuple(found),
        script=render_batch(batch) if trials is None else render_array(batch, trials),
        environment=environment_file(job, environ, secrets),
        arguments=tuple(_dependency(job, after)),
        submitter=submission.variables,
        notes=tuple(deciding),
        secrets=secrets.told(),
    )


def _order(
    job: Job, *, run_path: RunPath, layout: Layout, python: str, place_of: Callable[[Path], Path]
) -> LaunchSpec:  # fmt: skip
    shape = Shape(layout.nodes, layout.nproc, layout.gpus, layout.cpus_per_rank)
    # Secrets stand in environment.sh alone; the order is an ordinary file.
    plain = plain_variables(job)
    restarts = (job.resume.max_attempts or USUAL_ATTEMPTS) - 1
    return make_launch_spec(
        job,
        run_path=run_path,
        shape=shape,
        python=python,
        place_of=place_of,
        variables=plain,
        max_restarts=restarts,
    )


def _check_path(path: str) -> None:
    """What neither sbatch nor PYTHONPATH could carry."""
    for bad, name in ((":", "a colon"), ("\n", "a line break"), (",", "a comma")):
        if bad in path:
            raise SpecError(
                f"the run folder {path!r} has {name} in its path, which Slurm or Python would take for a separator",
                hint="choose another scratch folder: [project] scratch, or PACELINE_SCRATCH",
            )


def _dependency(job: Job, after: Sequence[str]) -> list[str]:
    """On the command line, not in the script: a script submitted again by hand should wait for nobody."""
    if job.resources.dependency is not None and after:
        raise UsageError(
            f"{job.source('job.dependency')} and --after both say what the job waits for",
            hint="leave one of them out",
        )
    if after:
        return [f"--dependency=afterok:{':'.join(after)}"]
    return [f"--dependency={job.resources.dependency}"] if job.resources.dependency else []


def _title(job: Job, layout: Layout, name: str) -> str:
    program = PurePath(job.program.name).name.replace("\n", " ")
    nodes = f"{layout.nodes} node{'s' if layout.nodes > 1 else ''}"
    ranks = f"{layout.nproc} rank{'s' if layout.nproc > 1 else ''}"
    return f"{name}: {program} on {nodes} x {ranks}, style {job.launch.style}"
