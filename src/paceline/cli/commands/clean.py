"""`paceline clean`: what runs have left: files on nodes, secrets in run folders, warm processes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli import console, typer_options
from paceline.cli.console import print_json
from paceline.contract.claims import find_holder
from paceline.contract.files import show_size
from paceline.contract.run_folder import RunFolder
from paceline.contract.sweep_folder import SweepFolder
from paceline.contract.verdict import STOPPED
from paceline.errors import ClusterError, UsageError
from paceline.launch import warm_start
from paceline.launch.checks.data import staging_request
from paceline.launch.environment_file import forget_secrets, read_secret_names
from paceline.launch.run_folder import resolve_scratch
from paceline.slurm import squeue_and_sacct
from paceline.slurm.job_states import LIVE, UNKNOWN, WAITING
from paceline.slurm.node_command import run_on_node
from paceline.spec.file_owner import is_own_folder
from paceline.spec.job import Program
from paceline.spec.load import load_job
from paceline.spec.quantities import show_seconds
from paceline.staging.cleanup import find_leftovers
from paceline.staging.request import StagingRequest, choose_base
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
    node: Annotated[
        list[str] | None,
        typer.Option("--node", metavar="NAME", help="Clean this node instead; repeatable."),
    ] = None,
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
      paceline clean --node n1 --node n2   two nodes of the cluster: list
      paceline clean --node n1 --yes       remove
      paceline clean --json                list as JSON, and ask nothing

    Only your own files are removed, and only if their job or process is known to be over. Results listed in
    collect are copied back first. A run folder keeps its environment.sh without the values of secrets.
    """
    if node and as_json:
        raise UsageError(
            "--json cannot be combined with --node.",
            hint="Run `paceline clean --json` on the node.",
        )
    if node:
        return _clean_nodes(node, folder=folder, cached=cached, yes=yes)
    found: list[Removable] = []
    if not processes:
        found += _find_files(folder, cached=cached)
    if folder is None and "SLURM_JOB_ID" not in os.environ:
        found += map(_warm_process, warm_start.read_status())
    if as_json:
        return _print_json(found, yes=yes)
    if not found:
        print("nothing to clean up")
        return 0
    for each in found:
        print(f"{each.path}  ({each.reason})")
    if not yes and not (sys.stdin.isatty() and typer.confirm(f"Remove these {len(found)}?")):
        console.say_note("nothing was removed; use --yes to remove them")
        return 0
    removed = sum(each.remove() for each in found)
    print(f"removed {removed} of {len(found)}")
    return 0 if removed == len(found) else 1


def _find_files(folder: Path | None, *, cached: bool) -> list[Removable]:
    job = load_job(Program(""), cluster=typer_options.this_cluster())
    scratch = resolve_scratch(job, os.environ)
    request = staging_request(job, scratch=scratch, environ=os.environ)
    found = [
        Removable(str(each.path), each.reason, each.remove)
        for base in ([folder] if folder is not None else _data_folders(request, os.environ))
        for each in find_leftovers(base, os.environ, all_cached=cached)
    ]
    # `--node` looks at the node's own disk alone
    if folder is None and "SLURM_JOB_ID" not in os.environ:
        found += find_ended_secrets(scratch)
    return found


def _warm_process(status: dict[str, Any]) -> Removable:
    """Return a process that `run --warm` keeps. Runs that it has started continue when it ends."""
    reason = "warm process, not responding"
    if status["kind"] != "silent":
        left = show_seconds(status["left"])
        ends = f"{status['running']} running" if status["running"] else f"ends in {left}"
        reason = (
            f"warm process: torch {status['torch']} of {status['python']}, "
            f"{show_size(status['memory'])}, {status['served']} warm starts, {ends}"
        )
    number = status["pid"]
    return Removable(f"process {number}", reason, lambda: bool(warm_start.stop([number])))


def _data_folders(request: StagingRequest, environ: Mapping[str, str]) -> list[Path]:
    """Return the folders where runs that you start here put their data on this machine."""
    folders = [Path(environ.get("TMPDIR") or "/tmp"), Path("/tmp")]
    with suppress(UsageError):  # the folder's path has variables that only a job knows
        folders.insert(0, choose_base(request, environ))
    return list(dict.fromkeys(folders))


def _print_json(leftovers: Iterable[Removable], *, yes: bool) -> int:
    listed = [
        {"path": each.path, "reason": each.reason, "removed": each.remove() if yes else False}
        for each in leftovers
    ]
    print_json(leftovers=listed)
    return 1 if yes and not all(each["removed"] for each in listed) else 0


def _clean_nodes(nodes: list[str], *, folder: Path | None, cached: bool, yes: bool) -> int:
    args = ["clean", *(["--cached"] if cached else []), *(["--yes"] if yes else [])]
    if folder is not None:
        args += ["--folder", str(folder)]
    exit_code = 0
    for node in nodes:
        print(f"{node}:", flush=True)
        exit_code = max(exit_code, run_on_node(node, args))
    return exit_code


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
    submissions = sorted(scratch.glob("*/*/*/submissions/*/environment.sh"))
    ours = (
        path
        for path in submissions
        if is_own_folder(path.parent) and is_own_folder(path.parent.parent.parent)
    )
    return found + list(_of_sweeps((path for path in ours if read_secret_names(path)), query))


def _may_requeue(record: Record) -> bool:
    """Whether a job that has ended may come back: Slurm or its own script may requeue it, or a
    person submit it.
    """
    if record.status == "cancelled":
        return False
    if (
        record.status not in ("preempted", "node failed")
        and newest_verdict(record.folder) != STOPPED
    ):
        return False
    holder = find_holder(record.folder)
    try:
        return (
            holder is not None and time.time() - holder.job_start.path.stat().st_mtime < REQUEUE_AGE
        )
    except OSError:
        return False


def _of_sweeps(paths: Iterable[Path], query: QueryStates) -> Iterator[Removable]:
    for path in paths:
        sweep = SweepFolder(path.parent.parent.parent)
        tasks = {
            f"{line.get('job')}_{index}": trials
            for line in sweep.read_jobs()
            if line.get("submission") == path.parent.name and isinstance(line.get("tasks"), dict)
            for index, trials in line["tasks"].items()
        }
        open_tasks = [
            task
            for task, trials in tasks.items()
            if not all(_has_ended(sweep, each) for each in trials)
        ]
        try:
            states = query(open_tasks) if open_tasks else {}
        except ClusterError:
            continue
        if not any(state.phase in (LIVE, WAITING, UNKNOWN) for state in states.values()):
            yield _secrets_in(path, "its trials have ended")


def _has_ended(sweep: SweepFolder, number: int) -> bool:
    trial = RunFolder(sweep.trials / str(number))
    return any((trial.path / name).exists() for name in ("result.json", "cancelled"))


def _secrets_in(path: Path, over: str) -> Removable:
    names = ", ".join(read_secret_names(path))
    return Removable(str(path), f"secrets: {names}; {over}", partial(forget_secrets, path))
