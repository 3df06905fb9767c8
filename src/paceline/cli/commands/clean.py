"""`paceline clean`: what runs have left: files on nodes, secrets in run folders, warm processes."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import console, typer_options
from paceline.contract.claims import find_holder
from paceline.contract.environment_file import forget_secrets, read_secret_names
from paceline.contract.run_folder import STOPPED
from paceline.contract.sweep_folder import SweepFolder
from paceline.errors import ClusterError, UsageError
from paceline.launch.agents import read_warm
from paceline.launch.launch_spec import staging_request
from paceline.launch.run_folder import resolve_scratch
from paceline.slurm import squeue_and_sacct
from paceline.slurm.job_states import LIVE, UNKNOWN, WAITING
from paceline.spec.job import Program
from paceline.spec.load import load_job
from paceline.spec.user_files import is_own_folder
from paceline.staging.cleanup import find_leftovers
from paceline.staging.request import choose_base
from paceline.watch.records import QueryStates, Record, find_runs, read_records
from paceline.watch.run_status import newest_verdict

# seconds after which nobody requeues a job that stopped or lost its node
REQUEUE_AGE = 7 * 86400.0


@dataclass(frozen=True)
class Removable:
    """Something that may go, and why."""

    path: str
    reason: str
    remove: Callable[[], bool]


def command(
    *,
    folder: Annotated[
        Path | None,
        typer.Option("--folder", help="The node's data folder [default: from paceline.toml]."),
    ] = None,
    cached: Annotated[
        bool,
        typer.Option(
            "--cached", help="Also remove data cached for later jobs, unless it is in use."
        ),
    ] = False,
    processes: Annotated[
        bool, typer.Option("--processes", help="Only the warm processes that `run --warm` keeps.")
    ] = False,
    yes: typer_options.Yes = False,
    as_json: typer_options.AsJson = False,
) -> int:
    """List and remove leftover files on a node's own disk and secrets in the folders of runs that are over; list and
    end warm processes.

    \b
      paceline clean                       this machine: list, then ask
      paceline clean --processes --yes     end the processes that `run --warm` keeps
      srun --nodelist=n1 paceline clean    a node of the cluster: list
      paceline clean --json                list as JSON, and ask nothing

    Only your own files are removed, and only if their job or process is known to be over. Results listed in
    collect are copied back first. A run folder keeps its environment.sh without the values of secrets.
    """
    found = [] if processes else _find_files(folder, cached=cached)
    if folder is None and "SLURM_JOB_ID" not in os.environ:
        found += map(_warm_process, read_warm())
    if as_json:
        listed = [
            {"path": each.path, "reason": each.reason, "removed": yes and each.remove()}
            for each in found
        ]
        console.print_json(leftovers=listed)
        return 0 if not yes or all(each["removed"] for each in listed) else 1
    for each in found:
        print(f"{each.path}  ({each.reason})")
    if not found:
        print("nothing to clean up")
    elif not yes and not (sys.stdin.isatty() and typer.confirm(f"Remove these {len(found)}?")):
        console.say_note("nothing was removed; use --yes to remove them")
    else:
        removed = sum(each.remove() for each in found)
        print(f"removed {removed} of {len(found)}")
        return 0 if removed == len(found) else 1
    return 0


def _find_files(folder: Path | None, *, cached: bool) -> list[Removable]:
    """Return what runs have left in a data folder of this machine, or in all where runs of yours put
    data, and secrets.
    """
    job = load_job(Program(""), cluster=typer_options.this_cluster())
    scratch = resolve_scratch(job, os.environ)
    bases = {Path(os.environ.get("TMPDIR") or "/tmp"): None, Path("/tmp"): None}
    with suppress(UsageError):  # the folder's path has variables that only a job knows
        request = staging_request(job, scratch=scratch, environ=os.environ)
        bases[choose_base(request, os.environ)] = None
    found = [
        Removable(str(each.path), each.reason, each.remove)
        for base in ([folder] if folder is not None else bases)
        for each in find_leftovers(base, os.environ, all_cached=cached)
    ]
    # in a job, it looks at the node's own disk alone
    if folder is None and "SLURM_JOB_ID" not in os.environ:
        found += find_ended_secrets(scratch)
    return found


def _warm_process(pid: int) -> Removable:
    """Return a process that `run --warm` keeps. Runs that it has started continue when it ends."""

    def end() -> bool:
        with suppress(ProcessLookupError):  # it may have ended since it was listed
            os.kill(pid, signal.SIGTERM)
        return True

    return Removable(f"process {pid}", "warm process: torch stays imported for `run --warm`", end)


# -- secrets in the folders of runs that were killed ----------------------------------------------


def find_ended_secrets(
    scratch: Path, query: QueryStates = squeue_and_sacct.states
) -> list[Removable]:
    """Return the files of runs and sweeps in a scratch folder that are certainly over."""
    own = [folder for folder in find_runs(scratch) if is_own_folder(folder.path)]
    runs = [folder for folder in own if read_secret_names(folder.environment)]
    found = [
        _secrets_in(record.folder.environment, f"the run {record.status_phrase}")
        for record in read_records(runs, query)
        if record.is_over and not _may_requeue(record)
    ]
    for path in sorted(scratch.glob("*/*/*/submissions/*/environment.sh")):
        sweep = SweepFolder(path.parent.parent.parent)
        is_own = is_own_folder(path.parent) and is_own_folder(sweep.path)
        if is_own and read_secret_names(path) and _have_ended(sweep, path.parent.name, query):
            found.append(_secrets_in(path, "its trials have ended"))
    return found


def _may_requeue(record: Record) -> bool:
    """Whether a job that has ended may come back: Slurm or its own script may requeue it, or a
    person submit it.
    """
    comes_back = record.status in ("preempted", "node failed")
    comes_back |= newest_verdict(record.folder) == STOPPED and record.status != "cancelled"
    holder = find_holder(record.folder) if comes_back else None
    return holder is not None and time.time() - holder.job_start.path.stat().st_mtime < REQUEUE_AGE


def _have_ended(sweep: SweepFolder, submission: str, query: QueryStates) -> bool:
    """Whether no trial of a submission is open, or its job is over. False if Slurm does not respond."""
    open_tasks = [
        f"{line.get('job')}_{index}"
        for line in sweep.read_jobs()
        if line.get("submission") == submission and isinstance(line.get("tasks"), dict)
        for index, trials in line["tasks"].items()
        if not all(
            each.result.exists() or each.cancelled.exists() for each in map(sweep.trial, trials)
        )
    ]
    try:
        states = query(open_tasks) if open_tasks else {}
    except ClusterError:
        return False
    return not any(state.phase in (LIVE, WAITING, UNKNOWN) for state in states.values())


def _secrets_in(path: Path, over: str) -> Removable:
    names = ", ".join(read_secret_names(path))
    return Removable(str(path), f"secrets: {names}; {over}", partial(forget_secrets, path))
