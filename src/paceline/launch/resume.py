"""Runs that others go on from: one that is resumed, found by its name, with its settings and what
was typed this time; and one whose checkpoint a new run starts from.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.contract.checkpoint import (
    WEIGHTS_SUFFIXES,
    find_checkpoints,
    find_weight_files,
    is_complete,
    is_weights_file,
)
from paceline.contract.claims import find_holder
from paceline.contract.foreign_records import read_bounded, read_object
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.redaction import REDACTED
from paceline.contract.run_folder import DONE, RunFolder, read_verdict
from paceline.errors import CheckpointError, EnvironmentProblem, UsageError
from paceline.launch import run_folder as folders
from paceline.launch.environment.store import STORE
from paceline.launch.launch_spec import LOCAL, SLURM
from paceline.launch.run_folder import find_own_run, require_not_running, resolve_scratch
from paceline.spec.job import Job, Program
from paceline.spec.load import load_job, reload_job
from paceline.spec.option import Flag
from paceline.spec.settings import Tables
from paceline.spec.shell_text import quote, to_type
from paceline.spec.user_files import expand_home

# Settings of a local run that are not about this machine: a job keeps them.
_PORTABLE = ("params", "runtime", "checkpoint", "tracking", "resume", "notify")
# Settings of which another one makes another environment.
_BUILT_FROM = ("requirements", "constraints", "base_python", "base", "system_packages", "horovod")
# Tables whose settings reach the script, so that it may find more to do. Those of the others change
# where it runs.
_SEEN_BY_SCRIPT = ("params", "environment", "runtime", "data", "project")


@dataclass(frozen=True)
class EarlierRun:
    """A run that is over and goes on: what it was before."""

    folder: RunFolder
    record: dict[str, Any]  # run.json
    launch_spec: LaunchSpec
    keeps_code: bool  # whether it goes on with the copy of the code that it has


@dataclass(frozen=True)
class Typed:
    """What was typed besides the run and the script."""

    flags: Sequence[Flag] = ()
    params: Sequence[str] = ()
    config: Path | None = None
    profile: str | None = None

    def has(self, key: str) -> bool:
        return any(flag.key == key and flag.value is not None for flag in self.flags)


def find_earlier_run(
    name: str, program: Program | None, *, typed: Typed, here: Job, backend: str
) -> tuple[Job, EarlierRun, str]:
    """Find a run by its name; return its job, what it was, and a note on it, perhaps empty.

    Without a `program` it is the one that the run had. `here` is the job of the current folder: its
    scratch folder has the run, and with a new program its project has the code.
    """
    folder = find_own_run(name, resolve_scratch(here, os.environ))
    old, note = read_launch_spec(folder), ""
    if old.trial and backend == SLURM:
        raise UsageError(
            f"{name} is a trial of a sweep, which manages its own jobs.",
            hint="Run the trials that failed again: paceline sweep --resubmit failed SWEEP",
        )
    require_not_running(folder)
    if backend == SLURM:
        note = _require_work_left(folder, old, program=program, typed=typed)
    with _resumable(folder.run_json):
        record = read_object(folder.run_json)
        if not isinstance(record.get("spec"), dict):
            raise ValueError("it has no settings")
    project = here if program is not None else _live_project(folder, old, record)
    tables = _recorded_tables(record, old, typed)
    if backend == SLURM and record.get("backend") == LOCAL:
        tables = _portable_tables(tables)
        job = load_job(
            project.program,
            flags=typed.flags,
            params=typed.params,
            config=typed.config,
            profile=typed.profile,
            cwd=project.cwd,
            overlay=(tables, folder.run_json),
        )
        job = replace(job, folder=project.folder)
    else:
        if typed.config or typed.profile:
            raise UsageError(
                f"Run {folder.path.name} keeps the settings that it was started with, so --config "
                "and --cluster-profile have no effect.",
                hint="Omit them, and pass only what should change, e.g. --time 8h.",
            )
        job = reload_job(project, tables, flags=typed.flags, params=typed.params)
    changes_copy = job.is_typed("project.workdir") or job.is_typed("project.snapshot")
    has_copy = Path(old.source).is_relative_to(folder.path) and folder.code.is_dir()
    keeps_code = program is None and has_copy and not changes_copy
    return job, EarlierRun(folder, record, old, keeps_code), note


@contextmanager
def _resumable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as problem:
        raise EnvironmentProblem(
            f"Cannot read {path}: {problem}.", hint="Start a new run instead of resuming this one."
        ) from None


def read_launch_spec(folder: RunFolder) -> LaunchSpec:
    """Return the launch spec of an existing run."""
    with _resumable(folder.launch_spec):
        return LaunchSpec.from_json(read_bounded(folder.launch_spec).decode())


def _live_project(folder: RunFolder, old: LaunchSpec, record: Mapping[str, Any]) -> Job:
    """Return the program of a run and its folders, as they were where it was started."""
    project = Path(old.source)
    if project.is_relative_to(folder.path):  # its ranks run a copy of the code
        code = record.get("code") or {}
        project = Path(old.work.get("project") or code.get("folder") or old.source)

    def live(path: str) -> Path:
        if not Path(path).is_relative_to(old.source):
            return Path(path)
        return project / os.path.relpath(path, old.source)

    cwd = live(old.cwd)
    name = old.program if old.is_module else os.path.relpath(live(old.program), cwd)
    program = Program(name, tuple(old.args), is_module=old.is_module)
    return Job(program, Tables(), project, cwd)


def _recorded_tables(record: Mapping[str, Any], old: LaunchSpec, typed: Typed) -> dict[str, Any]:
    """Return the settings of a run, with what its record hides; what it waited for is over, and
    what another version knew is ignored.
    """
    tables = {
        name: {
            key: values[key]
            for key in getattr(field.annotation, "model_fields", values)
            if key in values
        }
        for name, field in Tables.model_fields.items()
        if isinstance(values := record["spec"].get(name), dict)
    }
    tables["params"] = dict(old.params)
    environment, job = tables.setdefault("environment", {}), tables.setdefault("job", {})
    named = environment.get("variables") or {}
    hidden = [name for name, text in named.items() if text == REDACTED and name in os.environ]
    environment["variables"] = {
        **{name: text for name, text in old.variables.items() if name in named},
        **{name: os.environ[name] for name in hidden},
    }
    # without secrets only in the record; a run of an earlier version has nothing else
    environment["setup"] = old.setup or environment.get("setup", [])
    job.pop("dependency", None)
    if any(typed.has(f"environment.{key}") for key in _BUILT_FROM):
        for key in ("path", "image"):  # it was built for the run, from what it had then
            if STORE in Path(environment.get(key) or "").parts:
                environment.pop(key)
    if typed.has("job.mem_per_gpu"):
        job.pop("mem_per_node", None)
    if typed.has("job.mem_per_node"):
        job.pop("mem_per_gpu", None)
    return tables


def _portable_tables(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a job keeps of a local run: its name, its variables, and what is not here's."""
    kept = {key: dict(value) for key, value in tables.items() if key in _PORTABLE}
    for key in ("cpu", "backend"):
        kept.get("runtime", {}).pop(key, None)
    if name := tables["job"].get("name"):
        kept["job"] = {"name": name}
    kept["environment"] = {"variables": tables["environment"]["variables"]}
    return kept


def _require_work_left(
    folder: RunFolder, old: LaunchSpec, *, program: Program | None, typed: Typed
) -> str:
    """Return a note if the run is done and its script has to find out whether something is left;
    empty otherwise.

    Raises UsageError if it is done, and nothing that was typed asks for more.
    """
    from paceline.slurm.commands import read_job_id

    holder = find_holder(folder)
    # a later job that has not started may have had more to do
    if holder is None or holder.job != read_job_id(folder):
        return ""
    if read_verdict(holder.job_start.verdict) != DONE or holder.job_start.unsaved.exists():
        return ""
    run = folder.path.name
    if not find_checkpoints(folder.path):
        return f"{run} is done and has no checkpoint: its script starts from the beginning"
    set_flags = {flag.key.partition(".")[0] for flag in typed.flags if flag.value is not None}
    changes_script = typed.params or not set_flags.isdisjoint(_SEEN_BY_SCRIPT)
    if program is None and not changes_script:
        name = old.program if old.is_module else Path(old.program).name
        script = f"{'-m ' if old.is_module else ''}{quote(name)}"
        raise UsageError(
            f"Run {run} is done, so there is nothing left to do.",
            hint="To train longer, pass the script with new arguments: "
            f"{to_type(f'submit --resume {run}')} {script} --epochs 20\n"
            f"  For a new run: {to_type('submit --name NEW')} {script}",
        )
    return ""


def resolve_start(job: Job, environ: Mapping[str, str], *, after: Sequence[str] = ()) -> Job:
    """Return the job with the absolute path of what it starts from.

    A run is named as everywhere, by its id, its name or `last`. `after` are runs that the job waits
    for, which may not have a checkpoint yet. Raises UsageError if there is nothing to start from.
    """
    text = job.runtime.start_from
    if text is None:
        if job.runtime.start_continue:
            raise UsageError(
                f"{job.source('runtime.start_continue')} needs --start-from.",
                hint="Add --start-from with the run to continue. To continue the same run, use "
                "--resume RUN.",
            )
        return job
    scratch = folders.resolve_scratch(job, environ)
    path = _find(job, text, scratch)
    awaited = []
    for name in after:
        with suppress(UsageError):
            awaited.append(folders.find_run(name, scratch).path)
    problem = _problem(path, continues=job.runtime.start_continue)
    if problem is not None and path not in awaited:
        raise UsageError(f"Cannot start from {text}: {problem}.", hint=_hint(path))
    runtime = job.runtime.model_copy(update={"start_from": str(path)})
    return replace(job, tables=job.tables.model_copy(update={"runtime": runtime}))


def _find(job: Job, text: str, scratch: Path) -> Path:
    base = job.cwd if job.is_typed("runtime.start_from") else job.folder
    path = Path(os.path.abspath(base / expand_home(text)))
    if path.exists():
        return path
    try:
        return folders.find_run(text, scratch).path.absolute()
    except UsageError as problem:
        if "/" not in text and not is_weights_file(text):
            raise
        raise UsageError(
            f"Cannot start from {text}: there is no such file or folder.", hint=problem.hint
        ) from None


def _problem(path: Path, *, continues: bool) -> str | None:
    """Return why a run cannot start from a path; None if it can."""
    try:
        files = find_weight_files(path) or ([path] if path.is_file() else [])
        if files and continues:
            return "a file has only weights, so there is nothing to continue"
        if files:
            odd = [file.name for file in files if not is_weights_file(file.name)]
            known = ", ".join(WEIGHTS_SUFFIXES)
            return f"{odd[0]} is not a weights file ({known})" if odd else None
        if any(map(is_complete, find_checkpoints(path))):
            return None
        return "it has no complete checkpoint"
    except CheckpointError as error:
        return error.message.rstrip(".")
    except OSError as error:
        return f"{error.filename}: {error.strerror}"


def _hint(path: Path) -> str:
    if path.is_file():
        return f"Use a {', '.join(WEIGHTS_SUFFIXES)} file, a Hugging Face model folder, or a run."
    return (
        "Use a run that has saved one, its folder, or one checkpoint (step-...). To wait for a "
        "run to finish, add"
        " --after RUN."
    )
