"""Fill a run folder, for any backend: the code, the run half, the launch spec and run.json."""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.contract.files.foreign_records import read_bounded, read_object
from paceline.contract.files.sent_code import keep_sent
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import RunFolder, write_atomically
from paceline.contract.run_path import RunPath
from paceline.errors import EnvironmentProblem
from paceline.launch.code_identity import identify_code
from paceline.launch.code_snapshot import CodeList, Snapshot, list_code
from paceline.launch.links import Links, check_args, find_links
from paceline.launch.local.machine import host_details
from paceline.launch.plan.local import launch_spec_text
from paceline.launch.plan.rank_counts import RankCounts
from paceline.launch.plan.run_record import run_record
from paceline.launch.run_half_zip import write_run_half
from paceline.launch.secrets.secrets import secret_files
from paceline.spec import Job
from paceline.staging.working_directory import WorkingDirectory

SHOWN_LINKS = 5
SHOWN_FILES = 5
SPARE_SPACE = 256 << 20  # bytes; with less, the code is copied before the run starts


@dataclass(frozen=True)
class PreparedRun:
    run_path: RunPath
    snapshot: Snapshot | None
    notes: tuple[str, ...]  # to print for the user
    # for when the agents have started, if the code is to be copied later
    keep_code: Callable[[], list[str]]


@dataclass(frozen=True)
class EarlierStart:
    """What a run that is submitted again was before."""

    record: dict[str, Any]  # run.json
    launch_spec: LaunchSpec
    keeps_code: bool  # whether the run goes on with the copy of the code that it has


def prepare(
    job: Job,
    *,
    run_path: RunPath,
    rank_counts: RankCounts,
    launch_spec: LaunchSpec,
    command: Sequence[str],
    backend: str,
    snapshot_required: bool,
    compiled: bool = False,
    earlier: EarlierStart | None = None,
    code_later: bool = False,
) -> PreparedRun:
    """Write everything a run folder needs before its agents start. Call this inside
    `folder.create_run_folder`.

    With `snapshot_required` the ranks run the snapshot, so code that is too large is an error
    rather than a note. With `earlier`, the run exists already, and is to go on: its record keeps
    what its earlier starts ran. With `code_later`, the code is only listed: call `keep_code` of the
    result once the agents have started.
    """
    folder = run_path.folder
    keeps_code = earlier is not None and earlier.keeps_code
    if earlier is not None and not keeps_code:
        _remove_code(folder, earlier.launch_spec)
    listed, notes = (
        (None, []) if keeps_code else _list_code(job, run_path, required=snapshot_required)
    )
    # otherwise, see first if it fits
    code_later = code_later and shutil.disk_usage(folder.path).free > SPARE_SPACE
    snapshot, links = None, None
    if not code_later:
        snapshot = _take_code(listed, job, run_path, notes, required=snapshot_required)
    if earlier is not None and keeps_code:
        launch_spec = replace(launch_spec, work=earlier.launch_spec.work)
    if snapshot is not None and snapshot_required and job.project.workdir == "snapshot":
        links = find_links(
            job.folder.absolute(),
            snapshot.names,
            run_folders=run_folders_inside(job.folder, run_path),
        )
        notes += links.notes
        launch_spec = _with_working_directory(launch_spec, job, snapshot, links, run_path)
    if not launch_spec.work:
        keep_sent(job.folder)
    # it may be a link to the store's, which must not be overwritten
    folder.run_half.unlink(missing_ok=True)
    # another interpreter runs the agent from it
    if not code_later or launch_spec.python != sys.executable:
        write_run_half(folder.run_half, store=run_path.store, compiled=compiled)
    folder.events.mkdir(exist_ok=True)
    # The launch spec contains the job's variables, which others must not read.
    write_atomically(folder.launch_spec, launch_spec_text(launch_spec), mode=0o600)
    facts = {**host_details(), "backend": backend, "style": launch_spec.style}
    if backend == "slurm":
        facts["slurm_conf"] = os.environ.get("SLURM_CONF", "")  # for shells that lack it
    before = earlier.record if earlier is not None else None
    record = {
        "rank_counts": rank_counts,
        "command": command,
        "time": time.time(),
        "facts": facts,
        "before": before,
    }
    write_record = functools.partial(_write_record, job, run_path=run_path, **record)
    code = {"folder": str(job.folder)} if code_later else _code(job, snapshot, links)
    if before is not None and keeps_code:
        code = before.get("code", code)
    # Written last: a folder that has a run.json is a run.
    write_record(code=code)
    keep_code = (
        functools.partial(_keep_code, job, run_path, listed, write_record) if code_later else list
    )
    return PreparedRun(run_path, snapshot, tuple(notes), keep_code)


def _keep_code(
    job: Job, run_path: RunPath, listed: CodeList | None, write_record: Callable[..., None]
) -> list[str]:
    """Copy the listed code, and the run half, of a run that has started; return notes for the
    user.
    """
    notes: list[str] = []
    if not run_path.folder.run_half.exists():
        write_run_half(run_path.folder.run_half, store=run_path.store)
    snapshot = _take_code(listed, job, run_path, notes, required=False)
    changed = listed.changed_since() if listed is not None else []
    if changed:
        names = ", ".join(changed[:SHOWN_FILES]) + (", ..." if len(changed) > SHOWN_FILES else "")
        notes.append(
            "these files changed while the run started, so its copy of the code may differ: "
            f"{names}"
        )
    write_record(code=_code(job, snapshot, None))
    return notes


def repair_code(job: Job, run_path: RunPath, *, new_program: bool) -> list[str]:
    """Copy the code, and the run half, of a run whose command was killed before it had; return
    notes for the user.
    """
    folder = run_path.folder
    record = read_object(folder.run_json)
    code = record.get("code")
    # which is known only when the code has been copied
    if not isinstance(code, dict) or "commit" in code:
        return []
    if not folder.run_half.exists():
        write_run_half(folder.run_half, store=run_path.store)
    notes: list[str] = []
    if folder.code.is_dir():
        details = {
            **code,
            "commit": None,
            "branch": None,
            "changed": None,
            "snapshot": folder.code.resolve().name,
        }
    else:
        if not new_program:
            job = replace(job, folder=Path(str(code.get("folder", ""))))
        if not job.folder.is_dir():
            return [
                "this run has no copy of its code: its first command was killed, and "
                f"{job.folder} is gone"
            ]
        folder.code.unlink(missing_ok=True)
        listed, notes = _list_code(job, run_path, required=False)
        snapshot = _take_code(listed, job, run_path, notes, required=False)
        details = _code(job, snapshot, None)
        if snapshot is not None:
            notes.append(
                f"the first command of this run was killed before it had copied {job.folder}: "
                "copied it now"
            )
    write_atomically(folder.run_json, json.dumps({**record, "code": details}, indent=1) + "\n")
    return notes


def _write_record(job: Job, *, run_path: RunPath, **details: Any) -> None:
    write_atomically(run_path.folder.run_json, run_record(job, run_path=run_path, **details))


def _list_code(job: Job, run_path: RunPath, *, required: bool) -> tuple[CodeList | None, list[str]]:
    """List the code if the job wants a snapshot of it; return the list, and notes for the user."""
    if not job.project.snapshot:
        return None, []
    try:
        listed = list_project(job, run_path)
    except EnvironmentProblem as problem:
        if required:
            raise
        return None, [_no_snapshot(problem)]
    secrets = ", ".join(listed.skipped_secrets)
    return listed, [f"secrets left out of the code snapshot: {secrets}"] if secrets else []


def _take_code(
    listed: CodeList | None, job: Job, run_path: RunPath, notes: list[str], *, required: bool
) -> Snapshot | None:
    """Take a snapshot of the listed code; add notes for the user."""
    if listed is None:
        return None
    try:
        snapshot = _store_code(listed, run_path)
    except EnvironmentProblem as problem:
        if required:
            raise
        notes.append(_no_snapshot(problem))
        return None
    if snapshot.outside_links:
        named = [
            f"{name} -> {os.readlink(job.folder / name)}"
            for name in snapshot.outside_links[:SHOWN_LINKS]
        ]
        named += ["..."] if len(snapshot.outside_links) > SHOWN_LINKS else []
        notes.append(
            "links to targets outside the project, which are not in the code snapshot: "
            f"{', '.join(named)}"
        )
    return snapshot


def _no_snapshot(problem: EnvironmentProblem) -> str:
    return f"no snapshot of the code was taken: {problem.message}"


def _remove_code(folder: RunFolder, launch_spec: LaunchSpec) -> None:
    """Make room for a new copy of the code. What the script has written to its working directory
    stays.
    """
    work = WorkingDirectory.of(launch_spec)
    if work is not None and os.path.isdir(work.code):
        work.prune()
    folder.code.unlink(missing_ok=True)


def read_launch_spec(folder: RunFolder) -> LaunchSpec:
    """Return the launch spec of an existing run."""
    try:
        return LaunchSpec.from_json(read_bounded(folder.launch_spec).decode())
    except (OSError, ValueError) as problem:
        raise EnvironmentProblem(
            f"Cannot read {folder.launch_spec}: {problem}.",
            hint="Start a new run instead of resuming this one.",
        ) from None


def list_project(job: Job, run_path: RunPath) -> CodeList:
    return list_code(
        job.folder,
        limit=job.project.snapshot_limit * 10**6,
        exclude=job.project.exclude,
        exclude_paths=[*run_folders_inside(job.folder, run_path), *secret_files(job, os.environ)],
    )


def _store_code(listed: CodeList, run_path: RunPath) -> Snapshot:
    snapshot = listed.store(run_path.store)
    os.symlink(os.path.relpath(snapshot.path, run_path.folder.path), run_path.folder.code)
    return snapshot


def run_folders_inside(folder: Path, run_path: RunPath) -> list[Path]:
    """Return the folders that hold runs and may lie inside the project, except those that contain
    the project.
    """
    project = folder.resolve()
    paths = (run_path.scratch, run_path.store.parent, run_path.store, run_path.folder.path.parent)
    return [path for path in paths if not project.is_relative_to(path.resolve())]


def path_in_run(path: Path, *, job: Job, run_path: RunPath) -> Path:
    """Return where a job finds a file of the project; paths outside the project stay unchanged."""
    if not job.project.snapshot:
        return path
    absolute, project, folder = (
        Path(os.path.abspath(job.cwd / path)),
        job.folder.absolute(),
        run_path.folder,
    )
    try:
        relative = absolute.relative_to(project)
    except ValueError:
        return absolute
    return (
        folder.code if job.project.workdir == "project" else folder.work / project.name
    ) / relative


def _with_working_directory(
    launch_spec: LaunchSpec, job: Job, snapshot: Snapshot, links: Links, run_path: RunPath
) -> LaunchSpec:
    """Tell the head agent how to fill the working directory."""
    project = job.folder.absolute()
    if job.launch.check and launch_spec.cwd != str(job.cwd):
        check_args(
            job.program.args, cwd=job.cwd, project=project, code=snapshot.names, links=links.names
        )
    work = {"code": str(run_path.folder.code), "project": str(project), "links": links.names}
    return replace(launch_spec, work=work)


def _code(job: Job, snapshot: Snapshot | None, links: Links | None) -> dict[str, Any]:
    identity = identify_code(job.folder, snapshot.names if snapshot is not None else ())
    details: dict[str, Any] = {
        "folder": str(job.folder),
        "commit": identity.commit,
        "branch": identity.branch,
        "changed": identity.changed,
    }
    if snapshot is not None:
        details |= {
            "snapshot": snapshot.digest,
            "files": len(snapshot.names),
            "bytes": snapshot.size,
        }
    if links is not None and links.in_place:
        details["in_place"] = links.in_place
    return details
