"""`paceline env`: build the environments of runs."""

from __future__ import annotations

import os
import time as clock
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import typer

from paceline.cli import console, typer_options
from paceline.cli.parser import GroupedCommand, make_group
from paceline.errors import NoSlurm
from paceline.launch.environment import build as builds
from paceline.launch.environment import store as stored
from paceline.launch.environment.build import BuildProgress
from paceline.launch.environment.build_script import BuildResources
from paceline.launch.environment.store import EnvironmentInputs, StoredEnvironment
from paceline.slurm import commands as slurm
from paceline.spec.job import Job, Program
from paceline.spec.load import validate_flag
from paceline.spec.option import PATH, Flag
from paceline.spec.quantities import show_seconds
from paceline.spec.settings import FILE
from paceline.spec.shell_text import cluster, to_type
from paceline.watch.scheduler import query_states

app = make_group("Build the environments of runs.")

FILES = "FILE"  # the source of requirements that were typed
# Keys whose flags set the size of the build job here, and not that of runs.
SIZES = {
    "job.cpus_per_gpu": "cpus",
    "job.gpus_per_node": "gpus",
    "job.mem_per_node": "memory",
    "job.time": "time",
}


@app.command(cls=GroupedCommand)
@typer_options.takes_settings("env")
def build(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE...", help="requirements.txt, pyproject.toml[extra] or a lock file."
        ),
    ] = None,
    *,
    settings: typer_options.Settings,
    local: Annotated[bool, typer.Option("--local", help="Build here instead of in a job.")] = False,
    dry_run: typer_options.DryRun = False,
) -> int:
    """Build the venv or the container image of a project, in a job on the nodes where it will run.

    An environment is built only once for the same requirements, Python and modules. A failed build leaves only its log.

    \b
      paceline env build                       from [environment], requirements.txt, pyproject.toml, ...
      paceline env build requirements.lock     from this file
      paceline env build 'pyproject.toml[gpu]'  its dependencies, and those of an extra
      paceline env build --local               here: for nodes without internet
      paceline env build --dry-run             print the exact script
    """
    flags = [flag for flag in settings.flags if flag.key not in SIZES]
    job = _load(settings, [Flag(FILES, "environment.requirements", files or None, PATH), *flags])
    builds.require_buildable(job)
    inputs = stored.environment_inputs(job, os.environ)
    typed = {SIZES[flag.key]: validate_flag(flag) for flag in settings.flags if flag.key in SIZES}
    plan = builds.plan_build(job, inputs, os.environ, BuildResources(**typed))
    if dry_run:
        print(plan.script, end="")
        return 0
    if plan.target.is_complete:
        print(f"up to date: {plan.target.path}")
        return _print_usage(job, inputs, plan.target)
    began = clock.monotonic()
    watch = _start(plan, local=local)
    watch.check_result(is_shown=follow(watch))
    print(f"built in {show_seconds(clock.monotonic() - began)}: {plan.target.path}")
    return _print_usage(job, inputs, plan.target)


def _load(settings: typer_options.Settings, flags: Sequence[Flag]) -> Job:
    job = settings.load(Program("env"), flags=flags)
    if job.environment.kind == "current":  # a build is for later use: the default is a venv
        environment = job.environment.model_copy(update={"kind": "venv"})
        return replace(job, tables=job.tables.model_copy(update={"environment": environment}))
    return job


def _start(plan: builds.BuildPlan, *, local: bool) -> BuildProgress:
    if local:
        print(f"building {plan.target.path} here", flush=True)
        return BuildProgress(plan.target, plan.folder, process=builds.start_local_build(plan))
    if not slurm.available():
        raise NoSlurm(
            "sbatch was not found.", hint=f"Build here with `{to_type('env build --local')}`."
        )
    number = builds.submit_build(plan)
    print(f"building {plan.target.path} as job {number}", flush=True)
    return BuildProgress(plan.target, plan.folder, job=number, query=query_states)


def follow(watch: BuildProgress) -> bool:
    """Print the build's log as it grows, above a progress line on a terminal; return whether it is one."""
    out = console.console()
    try:
        with out.status("") as status:
            for line in watch.lines():
                if line is not None:
                    out.print(line, markup=False, soft_wrap=True, style="dim")
                status.update(watch.progress())
    except KeyboardInterrupt:
        if watch.process is not None:
            watch.process.wait()  # it got the same signal, and cleans up
        else:
            console.say_note(f"job {watch.job} continues; to cancel it: scancel {watch.job}")
        raise
    return out.is_terminal


def _print_usage(job: Job, inputs: EnvironmentInputs, target: StoredEnvironment) -> int:
    """Print what to write into paceline.toml, unless it is there already."""
    environment, is_set = job.environment, job.is_set("environment.kind")
    if inputs.kind == "container":
        is_set &= environment.image is None
        line = f'image = "{target.image}"'
    else:
        is_set &= job.source("environment.requirements") != FILES and environment.path is None
        is_set &= bool(environment.requirements)
        line = f'path = "{target.path}"'
    # paths of a cluster belong into its profile, since runs elsewhere lack them
    profile = cluster() or job.profile
    table = f"profiles.{profile}.environment" if profile else "environment"
    if is_set:
        print("runs that are submitted from now on use it")
    else:
        print(f'to use it, write into {FILE}:\n\n[{table}]\nkind = "{inputs.kind}"\n{line}')
    return 0
