"""`paceline submit`: run a script on Slurm."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import console, runs, typer_options
from paceline.contract import env
from paceline.contract.run_folder import (
    DONE,
    DONE_UNSAVED,
    STOPPED,
    STOPPED_EXIT,
    UNSETTLED_EXIT,
    UNWATCHED_EXIT,
)
from paceline.errors import NoAnswer, UsageError
from paceline.spec.option import OUTPUT, RESOURCES, UNTIL_DONE
from paceline.spec.shell_text import cluster, to_type
from paceline.watch.failure import describe_start, submit_again

if TYPE_CHECKING:
    from paceline.cli.forwarding import Forwarded
    from paceline.contract.run_folder import RunFolder
    from paceline.launch.slurm_job import SlurmJob, Submitted


Resume = Annotated[
    str | None,
    typer.Option(
        "--resume",
        metavar="RUN",
        help="Resume a run that has ended: its id, its name, its job, or `last`.",
        rich_help_panel=UNTIL_DONE,
    ),
]
After = Annotated[
    list[str] | None,
    typer.Option(
        "--after",
        metavar="RUN",
        help="Start after this run is done; repeatable.",
        rich_help_panel=RESOURCES,
    ),
]
ScriptOnly = Annotated[
    Path | None,
    typer.Option(
        "--script-only",
        metavar="FILE",
        help="Prepare the run and write its script to FILE; submit nothing.",
        rich_help_panel=OUTPUT,
    ),
]
Wait = Annotated[
    bool,
    typer.Option(
        "--wait", help="Wait for the end; exit with the run's status.", rich_help_panel=OUTPUT
    ),
]
Follow = Annotated[
    bool, typer.Option("--follow", help="Wait, and print rank 0's output.", rich_help_panel=OUTPUT)
]
First = Annotated[
    bool,
    typer.Option(
        "--first",
        help="With --on A,B: train on the cluster that starts first, cancel the others.",
        rich_help_panel=RESOURCES,
    ),
]
Finish = Annotated[
    str | None,
    typer.Option(
        "--finish",
        metavar="ID",
        help="Finish a --first that was interrupted.",
        rich_help_panel=RESOURCES,
    ),
]


@typer_options.takes_settings("submit", script=True)
def command(
    args: typer_options.ScriptArgs = None,
    *,
    settings: typer_options.Settings,
    module: typer_options.Module = False,
    resume: Resume = None,
    after: After = None,
    dry_run: typer_options.DryRun = False,
    script_only: ScriptOnly = None,
    wait: Wait = False,
    follow: Follow = False,
    first: First = False,
    finish: Finish = None,
) -> int:
    """Run a script on Slurm.

    Options of Paceline go before the script; everything after it is passed on unchanged. Shortly before the time limit
    the run saves a checkpoint, requeues itself and resumes.

    \b
      paceline submit --nodes 2 --gpus 8 --time 4h train.py --lr 0.1
      paceline submit -N 2 --gpus 8 -t 1-12 -p gpu -A project train.py
      paceline submit --gpus 1 --follow train.py         print rank 0's output
      paceline submit --dry-run --gpus 8 train.py        print the exact script
      paceline submit --after last --gpus 8 evaluate.py  start when the newest run is done
      paceline submit --resume last --time 8h            resume a run, with a longer limit
      paceline submit --resume last train.py --epochs 20  resume with other arguments and today's code
      paceline submit --on alps,cedar --first train.py   whichever cluster starts first
    """
    from paceline.launch.slurm_job import find_repeated

    if first or finish is not None:
        return _race(finish)
    if script_only is not None and (resume or wait or follow):
        raise UsageError(
            "--script-only cannot be combined with --resume, --wait or --follow.",
            hint="It prepares a new run and submits nothing. Omit one of the two.",
        )
    if script_only is not None and script_only.exists() and not script_only.is_file():
        raise UsageError(
            f"--script-only writes a file for sbatch, and {script_only} is none.",
            hint="Name a file, such as job.sbatch. To print the script, use --dry-run.",
        )
    submission = _find_job(args, settings, is_module=module, resume=resume, after=after or ())
    if dry_run:
        return _show(submission, is_new=resume is None)
    try:
        repeated = find_repeated(submission.run_path.scratch)
    except NoAnswer as problem:  # there may be a job
        console.say_error(problem)
        return UNSETTLED_EXIT
    if repeated is not None:
        folder, job = repeated
        print(
            f"submitted {folder.key} as job {job}, when you typed this command earlier; not submitted again\n"
            f"  folder  {folder.path}\n  logs    {to_type(f'logs -f {folder.key}')}\n"
            "To submit one more job, repeat the command.",
            flush=True,
        )
    else:
        for finding in submission.check():
            console.say_note(f"{finding.text}{f' ({finding.hint})' if finding.hint else ''}")
        submitted = submission.submit(["paceline", *sys.argv[1:]], script_only=script_only)
        describe(submitted, script_only)
        folder = submitted.folder
    if not (follow or wait):
        return 0
    try:
        return wait_until_done(folder, follow=follow)
    except KeyboardInterrupt:
        if os.environ.get(env.REQUEST):  # tells the laptop that its answer has arrived
            return UNWATCHED_EXIT
        raise


def _show(submission: SlurmJob, *, is_new: bool) -> int:
    """Print what a dry run shows."""
    instead = "To submit it, leave out --dry-run."
    if is_new and not cluster():
        instead = "For one that you can submit by hand, type: paceline submit --script-only job.sbatch ..."
    advice = [
        "This is a preview: nothing has been written, so sbatch cannot run it.",
        instead,
        f"Slurm has not checked the job. To check it, type: {to_type('doctor --job')} ...",
    ]
    plan = submission.plan
    print(plan.show(advice=advice), end="")
    if not submission.partitions and not submission.job.resources.cpus_per_gpu:
        console.say_note(
            "no Slurm here: the script requests 1 core per GPU instead of a fair share of a node's cores"
        )
    return 0


def forwarded(asked: Forwarded) -> int:
    """Submit to the cluster that `--on` names, or to several if the first to start is wanted."""
    from paceline.cli.on_cluster import forward

    first, finish = asked.values.get("first"), asked.values.get("finish")
    return _race(finish, asked) if first or finish else forward(asked)


def _race(finish: str | None, asked: Forwarded | None = None) -> int:
    from paceline.cli import submit_first

    return submit_first.start(asked) if finish is None else submit_first.finish(finish)


def _find_job(
    args: list[str] | None,
    settings: typer_options.Settings,
    *,
    is_module: bool,
    resume: str | None,
    after: Sequence[str],
) -> SlurmJob:
    """Return the new run to submit, or the one to go on with."""
    from paceline.launch.launch_spec import SLURM
    from paceline.launch.slurm_job import SlurmJob

    cwd = Path.cwd()
    if resume is None:
        found = settings.find_program(args, is_module=is_module, cwd=cwd, command="submit")
        return SlurmJob(settings.load(found, cwd=cwd), after=after)

    job, earlier, note = settings.find_earlier(
        resume, args, is_module=is_module, cwd=cwd, backend=SLURM
    )
    submission = SlurmJob(job, earlier=earlier, after=after)
    if note:
        console.say_note(note)
    console.say_note(f"{submission.run_path.run_id} continues with its code: {submission.code}")
    return submission


def describe(submitted: Submitted, script_only: Path | None) -> None:
    """Print where the run is and what to type next."""
    for note in submitted.notes:
        console.say_note(note)
    plan, job_id = submitted.plan, submitted.job_id
    run, counts = plan.run_path.run_id, plan.task_counts
    if job_id is None:
        print(f"prepared {run}; submit it: sbatch {script_only}")
    else:
        nodes, ranks = f"node{'s' * (counts.nodes > 1)}", f"rank{'s' * (counts.nproc > 1)}"
        print(f"submitted {run} as job {job_id}: {counts.nodes} {nodes} x {counts.nproc} {ranks}")
    print(f"  folder  {submitted.folder.path}")
    if plan.launch_spec.cwd.startswith(f"{submitted.folder.work}/"):
        print(f"  files   {plan.launch_spec.cwd}")
    if job_id is not None:
        print(f"  logs    {to_type(f'logs -f {run}')}\n  state   {to_type('ps')}")
        print(f"  cancel  {to_type(f'cancel {run}')}", flush=True)


def wait_until_done(folder: RunFolder, *, follow: bool) -> int:
    """Wait for the end of a run; return its status as an exit code."""
    from paceline.cli.commands.logs import LogPrinter, WaitNotes, follow_until_over
    from paceline.watch.events import had_nothing_left, read_events
    from paceline.watch.run_log import RunLog, wait_until_over

    with runs.goes_on(folder):
        if follow:
            record = follow_until_over(RunLog(folder), LogPrinter(sys.stdout), rank=0)
        else:
            record = wait_until_over(folder, WaitNotes().update)
    colour = console.GREEN if record.status == DONE else console.RED
    left = ", with nothing left to do" if had_nothing_left(read_events(folder.events)) else ""
    console.say(
        f"paceline: {record.run_id} (job {record.job}): {record.status}{left}", colour=colour
    )
    if record.status == DONE:
        return 0
    if record.requeue_problem or record.status == DONE_UNSAVED:
        console.say_note(record.detail)
    if record.status not in (STOPPED, DONE_UNSAVED):
        runs.say_failure(folder)
    console.say_note(f"output of the job: {folder.slurm_log}")
    console.say_note(f"to continue: {submit_again(folder)} ({describe_start(folder)})")
    return STOPPED_EXIT if record.status == STOPPED else 1
