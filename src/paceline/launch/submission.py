"""A run to start, new or again, here or on Slurm: which one it is, and what its folder gets."""

from __future__ import annotations

import functools
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.contract import env
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.redaction import REDACTED
from paceline.contract.run_folder import RunFolder, write_atomically
from paceline.errors import EnvironmentProblem
from paceline.launch.code_snapshot import CodeList, Snapshot, identify_code, list_code
from paceline.launch.launch_spec import launch_spec_text, run_record
from paceline.launch.links import Links, check_args, find_links
from paceline.launch.machine import host_details
from paceline.launch.run_folder import new_run_path
from paceline.launch.run_half_zip import write_run_half
from paceline.launch.secrets import read_secrets, secret_files
from paceline.spec.job import Job
from paceline.spec.run_path import RunPath, run_path_of
from paceline.staging.working_directory import WorkingDirectory

LOCAL, SLURM = "local", "slurm"
SHOWN = 5  # files that a note names
SPARE_SPACE = 256 << 20  # bytes; with less, the code is copied before the run starts


@dataclass(frozen=True)
class EarlierRun:
    """A run that is over and goes on: what it was before."""

    folder: RunFolder
    record: dict[str, Any]  # run.json
    launch_spec: LaunchSpec
    keeps_code: bool  # whether it goes on with the copy of the code that it has

    @property
    def hidden_variables(self) -> list[str]:
        """The variables of `--env` whose values the record does not have."""
        try:
            variables = dict(self.record["spec"]["environment"]["variables"])
        except (KeyError, TypeError, ValueError):
            return []
        return [name for name, text in variables.items() if text == REDACTED]


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
        known = {*self.secrets.values, *job.environment.variables, *os.environ}
        if earlier is not None and (lost := set(earlier.hidden_variables) - known):
            self.notes.append(
                "secrets are not stored, so pass these --env variables again if needed: "
                f"{', '.join(sorted(lost))}"
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


@dataclass(frozen=True)
class FilledFolder:
    """`keep_code` copies the code once the agents have started, and returns notes on it."""

    notes: tuple[str, ...]
    keep_code: Callable[[], list[str]]


def fill_folder(
    job: Job,
    *,
    run_path: RunPath,
    launch_spec: LaunchSpec,
    command: Sequence[str],
    backend: str,
    in_copy: bool,
    earlier: EarlierRun | None = None,
    code_later: bool = False,
) -> FilledFolder:
    """Write the code, the run half, the launch spec and run.json into an open run folder.

    With `in_copy` the ranks run the copy of the code, so that code which cannot be copied is an
    error; otherwise it is a note. With `code_later` it is only listed: local ranks do not need it,
    and should start first.
    """
    folder, notes = run_path.folder, list[str]()
    listed: CodeList | None = None
    snapshot: Snapshot | None = None
    links: Links | None = None
    code_later = code_later and shutil.disk_usage(folder.path).free > SPARE_SPACE
    if earlier is not None and earlier.keeps_code:
        launch_spec = replace(launch_spec, work=earlier.launch_spec.work)
    else:
        if earlier is not None:
            _remove_code(folder, earlier.launch_spec)
        listed = _list_code(job, run_path, notes, required=in_copy)
        if listed is not None and not code_later:
            snapshot = _store_code(listed, run_path, notes, required=in_copy)
    if snapshot is not None and in_copy and job.project.workdir == "snapshot":
        inside = run_folders_inside(job.folder, run_path)
        links = find_links(job.folder.absolute(), snapshot.names, run_folders=inside)
        notes += links.notes
        launch_spec = _with_work(launch_spec, job, run_path, snapshot, links)
    # it may be a link to the store's, which must not be overwritten
    folder.run_half.unlink(missing_ok=True)
    compiled = backend == SLURM and job.environment.kind == "current"
    # agents that this Python starts do not need it
    half_later = code_later and launch_spec.python == sys.executable
    if not half_later:
        write_run_half(folder.run_half, store=run_path.store, compiled=compiled)
    folder.events.mkdir(exist_ok=True)
    # The launch spec contains the job's variables, which others must not read.
    write_atomically(folder.launch_spec, launch_spec_text(launch_spec), mode=0o600)
    before = earlier.record if earlier is not None else None
    record = functools.partial(
        run_record,
        job,
        run_path=run_path,
        launch_spec=launch_spec,
        command=command,
        time=time.time(),
        facts=_facts(backend, launch_spec, before),
        before=before,
    )
    code: dict[str, Any] = {"folder": str(job.folder)}
    if earlier is not None and earlier.keeps_code:
        code = earlier.record.get("code", code)
    elif not code_later:
        code = _describe_code(job, snapshot, links)
    # Written last: a folder that has a run.json is a run.
    write_atomically(folder.run_json, record(code=code))

    def keep_code() -> list[str]:
        if not code_later:
            return []
        later: list[str] = []
        try:
            if half_later:
                write_run_half(folder.run_half, store=run_path.store)
            snapshot = _store_code(listed, run_path, later, required=False) if listed else None
            if listed is not None and (changed := listed.changed_since()):
                later.append(
                    "these files changed while the run started, so its copy of the code may "
                    f"differ: {_shown(changed)}"
                )
            write_atomically(folder.run_json, record(code=_describe_code(job, snapshot, None)))
        except OSError as error:  # the run itself goes on
            later.append(f"the code of this run could not be copied: {error.strerror or error}")
        return later

    return FilledFolder(tuple(notes), keep_code)


def _facts(
    backend: str, launch_spec: LaunchSpec, before: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return what run.json says about where and for what the run is started."""
    facts = {**host_details(), "backend": backend, "style": launch_spec.style}
    if backend == SLURM:
        facts["slurm_conf"] = os.environ.get("SLURM_CONF", "")  # for shells that lack it
    elif before is not None:  # a job that goes on here can go back into the queue as it was
        facts |= {key: before[key] for key in ("backend", "slurm_conf") if key in before}
    if request := os.environ.get(env.REQUEST):
        facts["request"] = request
    return facts


def list_project(job: Job, run_path: RunPath) -> CodeList:
    """List the code that a run copies."""
    return list_code(
        job.folder,
        limit=job.project.snapshot_limit * 10**6,
        exclude=job.project.exclude,
        exclude_paths=[*run_folders_inside(job.folder, run_path), *secret_files(job, os.environ)],
    )


def run_folders_inside(folder: Path, run_path: RunPath) -> list[Path]:
    """Return the folders that hold runs and may lie inside the project, except those that contain
    the project.
    """
    project = folder.resolve()
    paths = (run_path.scratch, run_path.store.parent, run_path.store, run_path.folder.path.parent)
    return [path for path in paths if not project.is_relative_to(path.resolve())]


def _list_code(job: Job, run_path: RunPath, notes: list[str], *, required: bool) -> CodeList | None:
    """List the code if the job wants a copy of it; add notes for the user."""
    if not job.project.snapshot:
        return None
    try:
        listed = list_project(job, run_path)
    except EnvironmentProblem as problem:
        if required:
            raise
        notes.append(f"no snapshot of the code was taken: {problem.message}")
        return None
    if listed.skipped_secrets:
        notes.append(f"secrets left out of the code snapshot: {', '.join(listed.skipped_secrets)}")
    return listed


def _store_code(
    listed: CodeList, run_path: RunPath, notes: list[str], *, required: bool
) -> Snapshot | None:
    """Take a snapshot of the listed code, and link the run to it; add notes for the user."""
    try:
        snapshot = listed.store(run_path.store)
    except EnvironmentProblem as problem:
        if required:
            raise
        notes.append(f"no snapshot of the code was taken: {problem.message}")
        return None
    folder = run_path.folder
    os.symlink(os.path.relpath(snapshot.path, folder.path), folder.code)
    if outside := snapshot.outside_links:
        named = [f"{name} -> {os.readlink(listed.folder / name)}" for name in outside]
        notes.append(
            "links to targets outside the project, which are not in the code snapshot: "
            f"{_shown(named)}"
        )
    return snapshot


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")


def _remove_code(folder: RunFolder, launch_spec: LaunchSpec) -> None:
    """Make room for a new copy of the code. What the script has written to its working directory
    stays.
    """
    work = WorkingDirectory.of(launch_spec)
    if work is not None and os.path.isdir(work.code):
        work.prune()
    folder.code.unlink(missing_ok=True)


def _with_work(
    launch_spec: LaunchSpec, job: Job, run_path: RunPath, snapshot: Snapshot, links: Links
) -> LaunchSpec:
    """Tell the head agent how to fill the working directory."""
    project = job.folder.absolute()
    if job.launch.check and launch_spec.cwd != str(job.cwd):
        check_args(
            job.program.args, cwd=job.cwd, project=project, code=snapshot.names, links=links.names
        )
    work = {"code": str(run_path.folder.code), "project": str(project), "links": links.names}
    return replace(launch_spec, work=work)


def _describe_code(job: Job, snapshot: Snapshot | None, links: Links | None) -> dict[str, Any]:
    identity = identify_code(job.folder, snapshot.names if snapshot is not None else ())
    details: dict[str, Any] = {"folder": str(job.folder), **asdict(identity)}
    if snapshot is not None:
        details["snapshot"], details["bytes"] = snapshot.digest, snapshot.size
        details["files"] = len(snapshot.names)
    if links is not None and links.in_place:
        details["in_place"] = links.in_place
    return details
