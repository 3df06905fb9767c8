"""`paceline run`: run a script on this machine."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import console, typer_options
from paceline.contract.run_folder import (
    DONE,
    DONE_UNSAVED,
    FAILED,
    STOPPED,
    STOPPED_EXIT,
    read_verdict,
)
from paceline.errors import UsageError
from paceline.spec.option import UNTIL_DONE, Flag
from paceline.spec.settings import options_of
from paceline.spec.shell_text import quote

if TYPE_CHECKING:
    from paceline.contract.run_folder import RunFolder
    from paceline.launch.local_run import LocalRun
    from paceline.spec.job import Program

# What was typed for these has an effect only in a session.
SESSION_KEYS = ("runtime.max_steps", "runtime.seed", "runtime.precision", "checkpoint.every_steps")
COLOURS = {
    DONE: console.GREEN,
    DONE_UNSAVED: console.RED,
    STOPPED: console.GREY,
    FAILED: console.RED,
}


@typer_options.takes_settings("run", script=True)
def command(
    args: typer_options.ScriptArgs = None,
    *,
    settings: typer_options.Settings,
    module: typer_options.Module = False,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="RUN",
            help="Resume a run: its id, its name, its folder, or `last`.",
            rich_help_panel=UNTIL_DONE,
        ),
    ] = None,
    here: Annotated[
        bool,
        typer.Option(
            "--here",
            help="With --resume: continue a Slurm run on this machine, even on a login node.",
            rich_help_panel=UNTIL_DONE,
        ),
    ] = False,
    dry_run: typer_options.DryRun = False,
) -> int:
    """Run a script on this machine, with one process (rank) per GPU.

    Options of Paceline go before the script; everything after it is passed on unchanged. The script gets the variables
    that torchrun sets (RANK, WORLD_SIZE, MASTER_ADDR, ...). Logs, checkpoints and metrics go to a run folder.

    \b
      paceline run train.py --lr 0.1              one rank per GPU, or two on the CPU
      paceline run --nproc 4 --cpu train.py       four ranks on the CPU
      paceline run -m my.package.train --lr 0.1   a module, as in python -m
      paceline run --nodes 2 --nproc 2 train.py   simulate two nodes
      paceline run --max-restarts 3 train.py      restart after a failure
      paceline run --resume last                  resume the newest run
    """
    from paceline.launch.launch_spec import LOCAL
    from paceline.launch.local_run import LocalRun, current_folder

    cwd = current_folder()
    if resume is None:
        program = settings.find_program(args, is_module=module, cwd=cwd)
        run = LocalRun(settings.load(program, cwd=cwd, here=True))
    else:
        job, earlier, _ = settings.find_earlier(
            resume, args, is_module=module, cwd=cwd, backend=LOCAL
        )
        run = LocalRun(job, earlier=earlier)
    if dry_run:
        return _show(run)
    if resume is not None and not here:
        require_place(run.folder)
    for note in run.prepare(["paceline", *sys.argv[1:]]):
        console.say_note(note)
    return _launch(run, settings.flags)


def _show(run: LocalRun) -> int:
    """Print what a dry run shows."""
    from paceline.launch.agents import describe_cold

    copies = f"a copy of {run.job.folder}" if run.job.project.snapshot else "no copy is kept"
    print(run.plan.show(code=copies))
    for note in describe_cold(run.plan.launch_spec, warm=run.job.launch.warm):
        console.say_note(note)
    return 0


def require_place(folder: RunFolder) -> None:
    """Raise an error if this would train a run of Slurm on a login node."""
    from paceline.slurm import commands as slurm
    from paceline.watch.failure import submit_again

    job = slurm.read_job_id(folder)
    if job is not None and "SLURM_JOB_ID" not in os.environ and slurm.available():
        raise UsageError(
            f"Run {folder.path.name} was submitted to Slurm (job {job}), but this command does not run in a Slurm job.",
            hint=f"Use `{submit_again(folder)}`, or add --here to train on this machine.",
        )


def _launch(run: LocalRun, flags: Sequence[Flag]) -> int:
    """Run the agents until they are done; print the verdict and the run folder."""
    from paceline.contract.claims import local_job_start_name
    from paceline.launch.agents import find_zygote, run_agents
    from paceline.spec.quantities import show_seconds

    started, plan = time.monotonic(), run.plan
    folder = plan.run_path.folder
    prestarted, notes = find_zygote(plan, warm=run.job.launch.warm)
    for note in notes:
        console.say_note(note)
    if sys.stderr.isatty():  # the first rank's line may take long: who watches should know why
        console.say_note(f"starting {plan.rank_counts}")
    code = run_agents(plan, prestarted=prestarted)
    from paceline.watch.events import had_nothing_left, had_session, read_events
    from paceline.watch.goodput import compute_goodput

    job_start = folder.job_start(local_job_start_name())
    verdict = read_verdict(job_start.verdict) or FAILED
    events = read_events(folder.events)
    # as `paceline show` counts, from the arrival of the agents
    starts = compute_goodput(events).job_starts[-1:]
    took = show_seconds(starts[0].ended - starts[0].began if starts else time.monotonic() - started)
    if verdict == DONE and had_nothing_left(events):
        took += ", with nothing left to do"
    ignored = [flag.name for flag in flags if flag.key in SESSION_KEYS]
    if verdict == DONE and ignored and not had_session(events):
        listed = " and ".join(ignored)
        console.say_note(f"{listed} had no effect: the script does not use paceline.session")
    if verdict == DONE and job_start.unsaved.exists():
        code, verdict = 1, DONE_UNSAVED
    # as other commands call it
    word = "cancelled" if verdict == STOPPED and folder.cancelled.exists() else verdict
    console.say(f"paceline: {word} after {took}: {folder.path}", colour=COLOURS[verdict])
    if verdict != DONE:
        _say_next(folder, run.job.program, failed=verdict == FAILED)
    return code or {DONE: 0, STOPPED: STOPPED_EXIT}.get(verdict, 1)


def _say_next(folder: RunFolder, program: Program, *, failed: bool) -> None:
    """Print how to go on, and what to type instead if the command line itself was the mistake."""
    from paceline.contract.checkpoint import find_checkpoints
    from paceline.watch.failure import describe_start, is_usage_error, read_failure

    attempts = folder.attempts()
    failure = read_failure(attempts[-1]) if failed and attempts else {}
    again = f"paceline run --resume {folder.path.name}"
    if is_usage_error(failure):
        words = re.split(r"""[\s:'"=]+""", str(failure.get("last_line", "")))
        flags = {flag for _, option in options_of("run") for flag in option.all_flags}
        typed = dict.fromkeys(arg.partition("=")[0] for arg in program.args)
        if ours := [flag for flag in typed if flag in flags and flag in words]:
            console.say_note(
                f"the script got {', '.join(ours)}: options of Paceline go before the script"
            )
        if not find_checkpoints(folder.path):
            name = f"{'-m ' if program.is_module else ''}{quote(program.name)}"
            console.say_note(f"to continue with other arguments: {again} {name} ARGUMENTS")
            return
    console.say_note(f"to continue: {again} ({describe_start(folder)})")
