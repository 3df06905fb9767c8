"""`paceline shell`: a shell inside an allocation, with a job's exact environment."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from paceline.cli import console, runs, typer_options
from paceline.contract import env
from paceline.errors import UsageError
from paceline.launch.job_steps import allocate_argv, join_argv, setup_from_plan, setup_from_run
from paceline.launch.resume import read_launch_spec
from paceline.launch.slurm_job import SlurmJob
from paceline.launch.submission import stored_run_half
from paceline.slurm import commands as slurm
from paceline.slurm import squeue_and_sacct
from paceline.slurm.sbatch import submission_environment
from paceline.spec.job import Program
from paceline.spec.option import PROJECT, RESOURCES, Flag
from paceline.spec.shell_text import cluster, command_line
from paceline.watch.records import read_record


@typer_options.takes_settings("shell", shown=(RESOURCES, PROJECT, "runtime.cpu"))
def command(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN", help="A run in progress (default: request a new allocation)."
        ),
    ] = None,
    *,
    settings: typer_options.Settings,
    node: Annotated[
        str | None, typer.Option("--node", help="Which node of the run (default: the first).")
    ] = None,
    dry_run: typer_options.DryRun = False,
) -> int:
    """Open a shell on a node, with the exact environment of a job: modules, venv, variables.

    A new allocation takes the options of `paceline submit` for resources and for the environment.

    \b
      paceline shell 1a2b          inside a run, next to its ranks
      paceline shell --gpus 1      in a new allocation
      echo nvidia-smi | paceline shell 1a2b     run commands from a pipe; exits with their code
    """
    terminal = sys.stdin is not None and sys.stdin.isatty()
    _reject_unused(run, node, settings)
    if run is not None:
        argv, setup, environ = _inside(run, node, terminal=terminal)
    else:
        # An interactive job is not requeued, so any time limit fits.
        job = settings.load(
            Program("shell"), flags=[*settings.flags, Flag("shell", "resume.requeue", False)]
        )
        submission = SlurmJob(job)
        plan = submission.plan
        is_current = job.environment.kind == "current"
        half = "" if dry_run else stored_run_half(submission.run_path.store, compiled=is_current)
        setup = setup_from_plan(plan, str(half))
        argv, environ = allocate_argv(plan, terminal=terminal), plan.submitter
    if dry_run:
        print(command_line(argv))
        return 0
    if run is None:
        slurm.require_configured()
    if name := cluster():
        console.say_note(
            f"this shell is on {name}, in a copy of your code: changes there are not copied back to your laptop"
        )
    terminal_variables = {
        name: os.environ[name] for name in ("TERM", "COLORTERM") if name in os.environ
    }
    return slurm.attach(argv, environ={**environ, **terminal_variables, env.SHELL_SETUP: setup})


def _reject_unused(run: str | None, node: str | None, settings: typer_options.Settings) -> None:
    """Raise an error for options of a new allocation with a run, and the other way round: they would do nothing."""
    if run is None and node is not None:
        raise UsageError(
            "--node needs a run.", hint="Pass the run, or use --nodelist for a new allocation."
        )
    typed = [flag.name for flag in settings.flags]
    if run is not None and typed:
        raise UsageError(
            f"{typed[0]} applies to a new allocation, but {run} has one already.",
            hint="Omit the option, or omit the run.",
        )


def _inside(run: str, node: str | None, *, terminal: bool) -> tuple[list[str], str, dict[str, str]]:
    folder = runs.own(run)
    # as it is now: it may have started a moment ago
    record = read_record(folder, squeue_and_sacct.states)
    if record.job is None or record.status != "running":
        status = record.status if record.job else f"{record.status}, and not a Slurm job"
        raise UsageError(
            f"Cannot open a shell in {record.run_id}: it is {status}.",
            hint="Omit the run to open one in a new allocation.",
        )
    setup = setup_from_run(folder, read_launch_spec(folder))
    # The shell gets what the job was submitted with, and nothing else of this shell.
    environ = submission_environment(os.environ, ()).variables
    return (
        join_argv(squeue_and_sacct.numeric_job_id(record.job), node=node, terminal=terminal),
        setup,
        environ,
    )
