"""A run to start, new or again, here or on Slurm: which one it is, and what its folder gets."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.redaction import REDACTED
from paceline.contract.run_folder import RunFolder, write_atomically
from paceline.errors import EnvironmentProblem
from paceline.launch.code_snapshot import Snapshot, identify_code, list_code
from paceline.launch.launch_spec import launch_spec_text, run_record
from paceline.launch.links import check_args, find_links
from paceline.launch.run_folder import new_run_path
from paceline.launch.run_half_zip import write_run_half
from paceline.launch.secrets import read_secrets, secret_files
from paceline.spec.job import Job
from paceline.spec.run_path import RunPath, run_path_of
from paceline.staging.working_directory import WorkingDirectory

LOCAL, SLURM = "local", "slurm"


@dataclass(frozen=True)
class EarlierRun:
    """A run that is over and goes on: what it was before."""

    folder: RunFolder
    record: dict[str, Any]  # run.json
    launch_spec: LaunchSpec
    keeps_code: bool  # whether it goes on with the copy of the code that it has


class Submission:
    """What a run on this machine and one on Slurm have in common.

    With `earlier`, that run goes on. With `in_copy`, the ranks work in a copy of the project.
    """

    def __init__(
        self,
        job: Job,
        *,
        in_copy: bool,
        earlier: EarlierRun | None = None,
        run_path: RunPath | None = None,
        after: Sequence[str] = (),
    ) -> None:
        starts_from = job.runtime.start_from is not None or job.runtime.start_continue
        if starts_from and (earlier is None or job.is_typed("runtime.start_from")):
            from paceline.launch.checks.start_source import resolve_start

            job = resolve_start(job, os.environ, after=after)
        self.job, self.earlier, self.in_copy = job, earlier, in_copy
        if earlier is not None:
            run_path = run_path_of(earlier.folder)
        self.run_path = run_path or new_run_path(job, os.environ)
        self.secrets = read_secrets(job, os.environ)
        self.notes: list[str] = []  # for the user, besides the plan's
        if earlier is not None:
            environment = earlier.record["spec"].get("environment") or {}
            hidden = (
                name
                for name, text in (environment.get("variables") or {}).items()
                if text == REDACTED
            )
            known = {*self.secrets.values, *self.job.environment.variables, *os.environ}
            if lost := sorted(set(hidden) - known):
                self.notes.append(
                    "secrets are not stored, so pass these --env variables again if needed: "
                    f"{', '.join(lost)}"
                )

    @property
    def folder(self) -> RunFolder:
        return self.run_path.folder

    def path_in_job(self, path: Path) -> Path:
        """Return where the ranks find a file of the project."""
        return path_in_run(path, job=self.job, run_path=self.run_path) if self.in_copy else path


def path_in_run(path: Path, *, job: Job, run_path: RunPath) -> Path:
    """Return where a job finds a file of the project; paths outside the project stay unchanged."""
    if not job.project.snapshot:
        return path
    absolute, project = Path(os.path.abspath(job.cwd / path)), job.folder.absolute()
    if not absolute.is_relative_to(project):
        return absolute
    work = run_path.folder.work / project.name
    base = run_path.folder.code if job.project.workdir == "project" else work
    return base / absolute.relative_to(project)


# -- what a run folder gets
# ----------------------------------------------------------------------------------------


def fill_folder(
    job: Job,
    *,
    run_path: RunPath,
    launch_spec: LaunchSpec,
    command: Sequence[str],
    backend: str,
    in_copy: bool,
    earlier: EarlierRun | None = None,
) -> list[str]:
    """Write the code, the run half, the launch spec and run.json into an open run folder; return
    notes for the user.

    With `in_copy` the ranks run the copy of the code, so that code which cannot be copied is an
    error; otherwise it is a note.
    """
    folder, notes = run_path.folder, list[str]()
    before = None if earlier is None else earlier.record
    if earlier is not None and earlier.keeps_code:
        launch_spec = replace(launch_spec, work=earlier.launch_spec.work)
        code = earlier.record.get("code", {})
    else:
        if earlier is not None:
            _remove_code(folder, earlier.launch_spec)
        snapshot = take_snapshot(job, run_path, notes, required=in_copy)
        if snapshot is not None and in_copy and job.project.workdir == "snapshot":
            launch_spec = replace(
                launch_spec, work=_plan_work(job, run_path, snapshot, cwd=launch_spec.cwd)
            )
        code = {"folder": str(job.folder), **asdict(identify_code(job.folder))}
        if snapshot is not None:
            code["snapshot"] = snapshot.path.name
            code |= {"bytes": snapshot.size, "files": len(snapshot.names)}
    # agents that this Python starts do not need it
    if backend == SLURM or launch_spec.python != sys.executable:
        compiled = backend == SLURM and job.environment.kind == "current"
        write_run_half(folder.run_half, store=run_path.store, compiled=compiled)
    folder.events.mkdir(exist_ok=True)
    # The launch spec contains the job's variables, which others must not read.
    write_atomically(folder.launch_spec, launch_spec_text(launch_spec), mode=0o600)
    record = run_record(
        job,
        run_path=run_path,
        launch_spec=launch_spec,
        command=command,
        backend=backend,
        code=code,
        before=before,
    )
    # Written last: a folder that has a run.json is a run.
    write_atomically(folder.run_json, record)
    return notes


def run_folders_inside(folder: Path, run_path: RunPath) -> list[Path]:
    """Return the folders that hold runs and may lie inside the project, except those that contain
    the project.
    """
    project = folder.resolve()
    paths = (run_path.scratch, run_path.store.parent, run_path.store, run_path.folder.path.parent)
    return [path for path in paths if not project.is_relative_to(path.resolve())]


def take_snapshot(
    job: Job, run_path: RunPath, notes: list[str], *, required: bool
) -> Snapshot | None:
    """Copy the code if the job wants it, and link the run to the copy; add notes for the user."""
    if not job.project.snapshot:
        return None
    inside = [*run_folders_inside(job.folder, run_path), *secret_files(job, os.environ)]
    try:
        listed = list_code(
            job.folder,
            limit=job.project.snapshot_limit * 10**6,
            exclude=job.project.exclude,
            exclude_paths=inside,
        )
        snapshot = listed.store(run_path.store)
    except EnvironmentProblem as problem:
        if required:
            raise
        notes.append(f"no snapshot of the code was taken: {problem.message}")
        return None
    if listed.skipped_secrets:
        notes.append(f"secrets left out of the code snapshot: {', '.join(listed.skipped_secrets)}")
    os.symlink(os.path.relpath(snapshot.path, run_path.folder.path), run_path.folder.code)
    return snapshot


def _remove_code(folder: RunFolder, launch_spec: LaunchSpec) -> None:
    """Make room for a new copy of the code. What the script has written to its working directory
    stays.
    """
    work = WorkingDirectory.of(launch_spec)
    if work is not None and os.path.isdir(work.code):
        work.prune()
    folder.code.unlink(missing_ok=True)


def _plan_work(job: Job, run_path: RunPath, snapshot: Snapshot, *, cwd: str) -> dict[str, Any]:
    """Return what the head agent fills the working directory with."""
    project = job.folder.absolute()
    inside = run_folders_inside(job.folder, run_path)
    links = find_links(project, snapshot.names, run_folders=inside)
    if job.launch.check and cwd != str(job.cwd):
        args, code = job.program.args, snapshot.names
        check_args(args, cwd=job.cwd, project=project, code=code, links=links)
    return {"code": str(run_path.folder.code), "project": str(project), "links": links}
