"""`paceline run`: a script on this machine."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

import typer

from paceline.cli import console, options
from paceline.cluster.local.agents import job_start_name, run_agents
from paceline.cluster.local.machine import current_folder, detect_machine, interpreter
from paceline.cluster.runs import folder as folders
from paceline.cluster.runs.prepare import prepare, read_launch_spec
from paceline.cluster.secrets.secrets import read_secrets
from paceline.contract.run_folder import RunFolder, write_atomically
from paceline.contract.verdict import DONE, FAILED, INTERRUPTED_EXIT, STOPPED, read_verdict
from paceline.errors import UsageError
from paceline.plan.local import LocalPlan, launch_spec_text, plan_local
from paceline.plan.redaction import REDACTED
from paceline.spec import Flag, Job, Program, load_job
from paceline.spec.quantities import show_seconds

COLOURS = {DONE: console.GREEN, STOPPED: console.GREY, FAILED: console.RED}


@options.takes_a_script
def command(
    words: options.Words = None,
    *,
    module: options.Module = False,
    nproc: options.Nproc = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", metavar="N", help="Act as N nodes, over loopback.")
    ] = None,
    style: options.Style = None,
    cpu: options.Cpu = False,
    backend: options.Backend = None,
    env: options.Env = None,
    param: options.Param = None,
    experiment: options.Experiment = None,
    name: options.Name = None,
    precision: options.Precision = None,
    seed: options.Seed = None,
    max_steps: options.MaxSteps = None,
    profile: options.Profile = None,
    start_from: options.StartFrom = None,
    preload: options.Preload = None,
    tee: options.Tee = None,
    max_restarts: Annotated[
        int | None,
        typer.Option("--max-restarts", metavar="N", help="Start failed ranks again up to N times."),
    ] = None,
    hang_timeout: options.HangTimeout = None,
    resume: Annotated[
        str | None,
        typer.Option("--resume", metavar="RUN", help="Go on with a run: its folder, id, or `last`."),
    ] = None,
    data: options.Data = None,
    debug: options.Debug = False,
    wandb: options.Wandb = None,
    wandb_project: options.WandbProject = None,
    wandb_group: options.WandbGroup = None,
    wandb_all_processes: options.WandbAllProcesses = False,
    tensorboard: options.Tensorboard = False,
    config: options.Config = None,
    cluster_profile: options.ClusterProfile = None,
    no_snapshot: options.NoSnapshot = False,
    dry_run: options.DryRun = False,
) -> int:
    """Start a script here, on N processes, each a rank.

    All options come before the script; all that follows it is the script's, untouched.

    \b
    paceline run train.py --lr 0.1              one rank per GPU, or two on the CPU
    paceline run --nproc 4 --cpu train.py       four ranks on the CPU
    paceline run -m my.package.train --lr 0.1   a module, as in python -m
    paceline run --nodes 2 --nproc 2 train.py   act as two nodes, to try multi-node code
    paceline run --max-restarts 3 train.py      start again after a failure
    paceline run --resume last                  go on with the newest run
    paceline run --dry-run train.py             print what would be done

    The script gets the variables that torchrun gives (RANK, WORLD_SIZE, MASTER_ADDR, ...). Logs, checkpoints and
    metrics go into a run folder, whose path is printed at the end.
    """
    if max_restarts is not None and max_restarts < 0:
        raise UsageError(f"--max-restarts: found {max_restarts}, expected at least 0", hint="0 means never")
    flags = options.flags_of(
        nproc=nproc, nodes=nodes, style=style, cpu=cpu, backend=backend, env=env, experiment=experiment,
        name=name, precision=precision, seed=seed, max_steps=max_steps, profile=profile,
        start_from=start_from, preload=preload, tee=tee, hang_timeout=hang_timeout, data=data, debug=debug,
        no_snapshot=no_snapshot,
    )  # fmt: skip
    if max_restarts is not None:
        flags.append(Flag("--max-restarts", "resume.max_attempts", max_restarts + 1))
    flags += options.tracking_flags(
        wandb=wandb, project=wandb_project, group=wandb_group, all_processes=wandb_all_processes,
        tensorboard=tensorboard,
    )  # fmt: skip
    cwd = current_folder()

    def load(program: Program) -> Job:
        return load_job(
            program, flags=flags, params=param or (), config=config, profile=cluster_profile, cwd=cwd
        )

    if resume is not None:
        return _go_on(resume, words, is_module=module, load=load, dry_run=dry_run)
    job = load(options.find_program(words, is_module=module, cwd=cwd))
    return _start(job, dry_run=dry_run)


def _start(job: Job, *, dry_run: bool) -> int:
    machine, python = detect_machine(os.environ), interpreter(job)
    run_path = folders.new_run_path(job, os.environ)
    filed = read_secrets(job, os.environ)
    plan = plan_local(
        job, run_path=run_path, machine=machine, python=python, environ=os.environ, file_secrets=filed
    )
    if dry_run:
        return _show(plan, job)
    if plan.launch_spec.data:
        from paceline.cluster.checks.data import refuse_missing

        refuse_missing(job, run_path, os.environ)
    with folders.create_run_folder(run_path) as run_path:
        plan = plan_local(
            job, run_path=run_path, machine=machine, python=python, environ=os.environ, file_secrets=filed
        )
        prepared = prepare(
            job, run_path=run_path, shape=plan.shape, launch_spec=plan.launch_spec, command=["paceline", *sys.argv[1:]],
            backend="local", snapshot_required=False,
        )  # fmt: skip
    for note in (*plan.notes, *prepared.notes):
        console.say_note(note)
    return _carry_out(plan)


def _go_on(
    name: str, words: list[str] | None, *, is_module: bool, load: Callable[[Program], Job], dry_run: bool
) -> int:
    """A run that exists: its order again, with what was typed this time."""
    cwd = current_folder()
    program = options.find_program(words, is_module=is_module, cwd=cwd) if words else None
    job = load(program or Program(""))
    folder = folders.find_run(name, folders.resolve_scratch(job, os.environ))
    old = read_launch_spec(folder)
    folders.require_not_running(folder)
    if program is None:
        job = load(Program(old.program, tuple(old.args), is_module=old.is_module))
    else:
        script = program.name if program.is_module else str(cwd / program.name)
        paths = [str(cwd)] if program.is_module else []
        old = replace(old, program=script, args=list(program.args), is_module=program.is_module,
                      import_path=paths, cwd=str(cwd))  # fmt: skip
    plan = plan_local(
        job, run_path=folders.run_path_of(folder), machine=detect_machine(os.environ), python=interpreter(job), old=old,
        environ=os.environ, file_secrets=read_secrets(job, os.environ),
    )  # fmt: skip
    if dry_run:
        return _show(plan, job)
    folder.cancelled.unlink(missing_ok=True)
    try:
        write_atomically(folder.launch_spec, launch_spec_text(plan.launch_spec), mode=0o600)
    except OSError as error:
        raise folders.path_error("write the run folder", folder.path, error) from None
    for note in plan.notes:
        console.say_note(note)
    if missing := _not_kept(folder, plan):
        console.say_note(
            f"typed at its start and kept nowhere, so to be typed again if needed: {', '.join(missing)}"
        )
    return _carry_out(plan)


def _not_kept(folder: RunFolder, plan: LocalPlan) -> list[str]:
    """Secrets that were given by `--env` when the run was started, and that it would go on without."""
    from paceline.watch.records import read_json

    environment = read_json(folder.run_json).get("spec", {}).get("environment", {})
    hidden = [name for name, text in environment.get("variables", {}).items() if text == REDACTED]
    return [name for name in hidden if name not in plan.secrets and name not in os.environ]


def _show(plan: LocalPlan, job: Job) -> int:
    copies = f"a copy of {job.folder}" if job.project.snapshot else "no copy is kept"
    print(plan.show(code=copies))
    return 0


def _carry_out(plan: LocalPlan) -> int:
    """Launch, wait, and say how it ended and where everything is."""
    began = time.monotonic()
    folder = plan.run_path.folder
    code = run_agents(plan, zygote_socket=_zygote_socket())
    verdict = read_verdict(folder.job_start(job_start_name()).verdict) or FAILED
    word = "interrupted" if code == INTERRUPTED_EXIT else verdict
    took = show_seconds(time.monotonic() - began)
    console.say(f"paceline: {word} after {took}: {folder.path}", colour=COLOURS.get(word, console.GREY))
    if word in ("interrupted", STOPPED):
        console.say_note(f"go on with it: paceline run --resume {plan.run_path.run_id}")
    return code or int(verdict == FAILED)


def _zygote_socket() -> int | None:
    """The zygote that was started before this command's own imports, if one was."""
    module = sys.modules.get("paceline.agent.workers.zygote.prestart")
    descriptor: int | None = module.descriptor() if module is not None else None
    return descriptor
