"""`paceline env`: build, list and remove the environments of runs."""

from __future__ import annotations

import json
import os
import re
import sys
import time as clock
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any

import typer

from paceline.cli import console, typer_options
from paceline.cli.console import print_json
from paceline.cli.parser import GroupedCommand
from paceline.errors import NoSlurm, UsageError
from paceline.launch.environment import build as builds
from paceline.launch.environment import store as stored
from paceline.launch.environment.build import BuildProgress
from paceline.launch.environment.build_script import DEFAULT_CPUS, BuildResources
from paceline.launch.environment.store import EnvironmentInputs, StoredEnvironment
from paceline.slurm import commands as slurm
from paceline.slurm.partitions import find_partitions, select_partitions
from paceline.spec.job import Job, Program
from paceline.spec.load import FILE, load_job, validate_flag
from paceline.spec.option import PATH
from paceline.spec.quantities import show_seconds
from paceline.spec.shell_text import cluster, to_type
from paceline.spec.typed_flags import Flag
from paceline.watch.scheduler import query_states

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Build, list and remove the environments of runs.",
)

FILES = "FILE"  # the source of requirements that were typed
# Keys whose flags set the size of the build job here, and not that of runs.
SIZES = {
    "job.cpus_per_gpu": "cpus",
    "job.gpus_per_node": "gpus",
    "job.mem_per_node": "memory",
    "job.time": "time",
}


@app.callback()
def group() -> None:
    """Build, list and remove the environments of runs."""


@app.command(cls=GroupedCommand)
@typer_options.takes_settings("env")
def build(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE", help="requirements.txt, pyproject.toml[extra] or a lock file."
        ),
    ] = None,
    *,
    settings: typer_options.Settings,
    local: Annotated[bool, typer.Option("--local", help="Build here instead of in a job.")] = False,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Submit the build and return.")
    ] = False,
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
    if local and no_wait:
        raise UsageError(
            "--no-wait cannot be combined with --local: it applies to a build in a job.",
            hint="Use only one of them.",
        )
    flags = [flag for flag in settings.flags if flag.key not in SIZES]
    job = _load(settings, [Flag(FILES, "environment.requirements", files or None, PATH), *flags])
    builds.require_buildable(job)
    inputs = stored.environment_inputs(job, os.environ)
    for note in inputs.requirements.notes:
        console.say_note(note)
    typed = {SIZES[flag.key]: validate_flag(flag) for flag in settings.flags if flag.key in SIZES}
    size = BuildResources(**{"cpus": _cores(job), **typed})
    plan = builds.plan_build(job, inputs, os.environ, size)
    if dry_run:
        print(plan.script, end="")
        return 0
    if plan.target.is_complete:
        print(f"up to date: {plan.target.path}")
        return _print_usage(job, inputs, plan.target)
    began = clock.monotonic()
    watch = _start(plan, local=local)
    if no_wait and not local:
        print(f"  log     {watch.folder.log}")
        return 0
    watch.check_result(is_shown=follow(watch))
    print(f"built in {show_seconds(clock.monotonic() - began)}: {plan.target.path}")
    return _print_usage(job, inputs, plan.target)


def _load(settings: typer_options.Settings, flags: Sequence[Flag]) -> Job:
    job = settings.load(Program("env"), flags=flags)
    if job.environment.kind == "current":  # a build is for later use: the default is a venv
        environment = job.environment.model_copy(update={"kind": "venv"})
        return replace(job, tables=job.tables.model_copy(update={"environment": environment}))
    return job


def _cores(job: Job) -> int:
    """Return the default number of cores, or what a node of the partition has if that is less."""
    kinds = [
        kind
        for each in select_partitions(find_partitions(), job.resources.partition)
        for kind in each.kinds
    ]
    return min(DEFAULT_CPUS, max((kind.cpus for kind in kinds), default=DEFAULT_CPUS))


def _start(plan: builds.BuildPlan, *, local: bool) -> BuildProgress:
    if local:
        print(f"building {plan.target.path} here", flush=True)
        return BuildProgress(plan.target, plan.folder, process=builds.start_local_build(plan))
    if not slurm.available():
        raise NoSlurm(
            "sbatch was not found.", hint=f"Build here with `{to_type('env build --local')}`."
        )
    live = builds.find_live_build(plan.target)
    folder, number = live or (plan.folder, builds.submit_build(plan))
    is_new = f"building {plan.target.path} as job {number}"
    is_live = f"job {number} is already building it; following that job"
    print(is_live if live else is_new, flush=True)
    return BuildProgress(plan.target, folder, job=number, query=query_states)


def follow(watch: BuildProgress) -> bool:
    """Print the build's log as it grows, with a progress line on a terminal; return whether errors follow it there."""
    out = console.console(stderr=True)
    try:
        if not out.is_terminal:
            for line in watch.lines():
                if line is not None:
                    print(line, flush=True)
            return False
        with out.status("") as status:
            for line in watch.lines():
                if line is not None:
                    out.print(line, markup=False, soft_wrap=True, style="dim")
                status.update(watch.progress())
        return True
    except KeyboardInterrupt:
        if watch.process is not None:
            watch.process.wait()  # it got the same signal, and cleans up
        else:
            again = to_type("env build")
            console.say_note(
                f"job {watch.job} continues; to cancel it: scancel {watch.job}; to follow it: {again}"
            )
        raise


def _print_usage(job: Job, inputs: EnvironmentInputs, target: StoredEnvironment) -> int:
    """Print what to write into paceline.toml, unless it is there already."""
    environment = job.environment
    if inputs.kind == "container":
        is_set = environment.image is None
        lines = ['kind = "container"', f'image = "{target.image}"']
    else:
        is_set = job.source("environment.requirements") != FILES and environment.path is None
        is_set &= bool(environment.requirements) and job.is_set("environment.kind")
        names = ", ".join(f'"{name}"' for name in inputs.requirements.files)
        lines = ['kind = "venv"', f"requirements = [{names}]"]
        for key, flag in (("base_python", "--python"), ("constraints", "--constraints")):
            if job.source(f"environment.{key}") == flag:
                lines.append(f'{key} = "{getattr(environment, key)}"')
        lines += ["horovod = true"] if inputs.horovod else []
    if is_set:
        print("runs that are submitted from now on use it")
        return 0
    if environment.path is not None and inputs.kind == "venv":
        source = job.source("environment.path")
        console.say_note(f"{source} is {environment.path}: remove it to use the new environment")
    print(f"to use it, write into {_file_and_table(job)}")
    print("\n".join(lines))
    if inputs.kind == "venv":
        print(f'# or just this one, whatever the files say later: path = "{target.path}"')
    return 0


def _file_and_table(job: Job) -> str:
    """Return where to write settings: paths of a cluster belong into its profile, since runs elsewhere lack them."""
    name = cluster() or job.profile
    if name and not re.fullmatch(r"[\w-]+", name, re.ASCII):
        name = json.dumps(name)
    file = job.file.name if job.file is not None else FILE
    prefix = "tool.paceline." if file == "pyproject.toml" else ""
    return f"{file}:\n\n[{prefix}{f'profiles.{name}.' if name else ''}environment]"


@app.command("list", cls=GroupedCommand)
def show_all(
    *,
    config: typer_options.Config = None,
    cluster_profile: typer_options.ClusterProfile = None,
    as_json: typer_options.AsJson = False,
) -> int:
    """List the environments that were built for this project."""
    job = load_job(
        Program("env"), config=config, profile=cluster_profile, cluster=typer_options.this_cluster()
    )
    store = stored.store_path(job, os.environ)
    found = stored.list_environments(store)
    if as_json:
        print_json(store=str(store), environments=[_describe(each) for each in found])
        return 0
    for each in found:
        if not (record := each.record()):
            builder = _builder(each)
            rest = "not complete: the next build removes it"
            print(f"{each.key}  {f'{builder} is building it' if builder else rest}")
            continue
        when = datetime.fromtimestamp(record["built"]).strftime("%Y-%m-%d %H:%M")
        what = f"python {record['python']}" if record["kind"] == "venv" else record["base"]
        modules = f", modules {' '.join(record['modules'])}" if record["modules"] else ""
        horovod = ", horovod" if record["horovod"] else ""
        print(f"{each.key}  {when}  {', '.join(record['from']) or '-'}  ({what}{modules}{horovod})")
    print(f"in {store}" if found else f"no environments in {store}")
    return 0


def _describe(each: StoredEnvironment) -> dict[str, Any]:
    record = each.record()
    return {
        "key": each.key,
        "path": str(each.path),
        "is_complete": bool(record),
        "builder": None if record else _builder(each),
        "record": record or {},
    }


def _builder(each: StoredEnvironment) -> str | None:
    """Return the job or process that is building it, if that is alive."""
    builder = each.builder
    return builder if builder is not None and builds.may_be_building(builder) else None


@app.command(cls=GroupedCommand)
def remove(
    keys: Annotated[
        list[str], typer.Argument(metavar="KEY", help="Keys from `paceline env list`.")
    ],
    *,
    yes: typer_options.Yes = False,
    config: typer_options.Config = None,
    cluster_profile: typer_options.ClusterProfile = None,
) -> int:
    """Remove environments. Queued runs that use one of them will fail."""
    job = load_job(
        Program("env"), config=config, profile=cluster_profile, cluster=typer_options.this_cluster()
    )
    found = {
        each.key: each for each in stored.list_environments(stored.store_path(job, os.environ))
    }
    for key in keys:
        if key not in found:
            raise UsageError(
                f"There is no environment {key!r}.", hint=f"List them with `{to_type('env list')}`."
            )
        if (builder := _builder(found[key])) is not None:
            raise UsageError(
                f"{key} is being built by {builder}.", hint="Wait for it, or cancel it first."
            )
    if not yes and not (sys.stdin.isatty() and typer.confirm(f"remove {', '.join(keys)}?")):
        console.say_note("nothing was removed; use --yes to remove them")
        return 0
    for key in keys:
        stored.remove(found[key])
    print(f"removed {len(keys)}")
    return 0
