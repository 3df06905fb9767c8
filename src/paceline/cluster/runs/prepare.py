"""Fill a new run folder, for any backend: the code, the run half, the launch spec and run.json."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.cluster.local.machine import host_details
from paceline.cluster.runs.code_identity import identify_code
from paceline.cluster.runs.links import Links, check_args, find_links
from paceline.cluster.runs.run_half_zip import write_run_half
from paceline.cluster.runs.snapshot import Snapshot, take_snapshot
from paceline.cluster.secrets.secrets import secret_files
from paceline.contract.files.foreign_records import read_bounded
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import RunFolder, write_atomically
from paceline.errors import EnvironmentProblem
from paceline.plan.local import launch_spec_text
from paceline.plan.run_path import RunPath
from paceline.plan.run_record import run_record
from paceline.plan.shape import Shape
from paceline.spec import Job

SHOWN_LINKS = 5


@dataclass(frozen=True)
class PreparedRun:
    run_path: RunPath
    snapshot: Snapshot | None
    notes: tuple[str, ...]  # to print for the user


def prepare(
    job: Job,
    *,
    run_path: RunPath,
    shape: Shape,
    launch_spec: LaunchSpec,
    command: Sequence[str],
    backend: str,
    snapshot_required: bool,
    compiled: bool = False,
) -> PreparedRun:
    """Write everything a run folder needs before its agents start. Call this inside `folder.create_run_folder`.

    With `snapshot_required` the ranks run the snapshot, so code that is too large is an error rather than a note.
    """
    folder = run_path.folder
    notes: list[str] = []
    snapshot = None
    if job.project.snapshot:
        try:
            snapshot = snapshot_code(job, run_path)
        except EnvironmentProblem as problem:
            if snapshot_required:
                raise
            notes.append(f"no snapshot of the code was taken: {problem.message}")
    if snapshot is not None and snapshot.skipped_secrets:
        notes.append(f"secrets left out of the code snapshot: {', '.join(snapshot.skipped_secrets)}")
    if snapshot is not None and snapshot.outside_links:
        named = [f"{name} -> {os.readlink(job.folder / name)}" for name in snapshot.outside_links[:SHOWN_LINKS]]
        named += ["..."] if len(snapshot.outside_links) > SHOWN_LINKS else []
        notes.append(f"links to targets outside the project, which are not in the code snapshot: {', '.join(named)}")
    links = None
    if snapshot is not None and snapshot_required and job.project.workdir == "snapshot":
        links = find_links(job.folder.absolute(), snapshot.names, run_folders=run_folders_inside(job.folder, run_path))
        notes += links.notes
        launch_spec = _with_work_folder(launch_spec, job, snapshot, links, run_path)
    write_run_half(folder.run_half, store=run_path.store, compiled=compiled)
    folder.events.mkdir(exist_ok=True)
    # The launch spec contains the job's variables, which others must not read.
    write_atomically(folder.launch_spec, launch_spec_text(launch_spec), mode=0o600)
    text = run_record(
        job, run_path=run_path, shape=shape, command=command, created=time.time(),
        facts={**host_details(), "backend": backend, "style": launch_spec.style}, code=_code(job, snapshot, links),
    )  # fmt: skip
    # Written last: a folder that has a run.json is a run.
    write_atomically(folder.run_json, text)
    return PreparedRun(run_path, snapshot, tuple(notes))


def read_launch_spec(folder: RunFolder) -> LaunchSpec:
    """Return the launch spec of an existing run."""
    try:
        return LaunchSpec.from_json(read_bounded(folder.launch_spec).decode())
    except (OSError, ValueError) as problem:
        raise EnvironmentProblem(
            f"Cannot read {folder.launch_spec}: {problem}.", hint="Start a new run instead of resuming this one."
        ) from None


def snapshot_code(job: Job, run_path: RunPath) -> Snapshot:
    """Take a snapshot of the project's code and link to it from the run folder."""
    snapshot = take_snapshot(
        job.folder,
        store=run_path.store,
        limit=job.project.snapshot_limit * 2**20,
        exclude=job.project.exclude,
        exclude_paths=[*run_folders_inside(job.folder, run_path), *secret_files(job, os.environ)],
    )
    os.symlink(os.path.relpath(snapshot.path, run_path.folder.path), run_path.folder.code)
    return snapshot


def run_folders_inside(folder: Path, run_path: RunPath) -> list[Path]:
    """Return the folders that hold runs and may lie inside the project, except those that contain the project."""
    project = folder.resolve()
    paths = (run_path.scratch, run_path.store.parent, run_path.store, run_path.folder.path.parent)
    return [path for path in paths if not project.is_relative_to(path.resolve())]


def path_in_run(path: Path, *, job: Job, run_path: RunPath) -> Path:
    """Return where a job finds a file of the project; paths outside the project stay unchanged."""
    if not job.project.snapshot:
        return path
    absolute, project, folder = Path(os.path.abspath(job.cwd / path)), job.folder.absolute(), run_path.folder
    try:
        relative = absolute.relative_to(project)
    except ValueError:
        return absolute
    return (folder.code if job.project.workdir == "project" else folder.work / project.name) / relative


def _with_work_folder(
    launch_spec: LaunchSpec, job: Job, snapshot: Snapshot, links: Links, run_path: RunPath
) -> LaunchSpec:
    """Tell the head agent how to fill the working directory."""
    project = job.folder.absolute()
    if job.launch.check and launch_spec.cwd != str(job.cwd):
        check_args(job.program.args, cwd=job.cwd, project=project, code=snapshot.names, links=links.names)
    work = {"code": str(run_path.folder.code), "project": str(project), "links": links.names}
    return replace(launch_spec, work=work)


def _code(job: Job, snapshot: Snapshot | None, links: Links | None) -> dict[str, Any]:
    identity = identify_code(job.folder)
    details: dict[str, Any] = {
        "folder": str(job.folder),
        "commit": identity.commit,
        "branch": identity.branch,
        "changed": identity.changed,
    }
    if snapshot is not None:
        details |= {"snapshot": snapshot.digest, "files": len(snapshot.names), "bytes": snapshot.size}
    if links is not None and links.in_place:
        details["in_place"] = links.in_place
    return details
