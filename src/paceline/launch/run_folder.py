"""Run folders: choose their path, create and find them, and keep two commands out of one."""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from paceline.contract import env
from paceline.contract.claims import (
    ELSEWHERE,
    HERE,
    Holder,
    claim,
    find_holder,
    local_job_start_name,
    record_processes,
)
from paceline.contract.foreign_records import parse_object, read_bounded, read_object
from paceline.contract.run_folder import DONE, FAILED, SUBMITTING, TRIALS, RunFolder, read_verdict
from paceline.errors import ClusterError, EnvironmentProblem, SpecError, UsageError
from paceline.spec.job import Job
from paceline.spec.run_path import RunPath, is_fetched, list_folders, new_run_id
from paceline.spec.shell_text import cluster, quote, to_type
from paceline.spec.user_files import expand_home, is_own_folder, require_own_folder

DEFAULT_SCRATCH = "runs"
BEFORE = ".before"  # in a run folder while it is changed: the files as they were
PROJECT_MARKS = (".git", "paceline.toml", "pyproject.toml")
# In a scratch folder of a project: git must not add logs and checkpoints, nor pytest collect copies
# of the tests.
_WRITTEN_BY = "# Written by Paceline:"
SHIELDS = {
    ".gitignore": f"{_WRITTEN_BY} git ignores the runs in this folder.\n*\n",
    "conftest.py": f"{_WRITTEN_BY} pytest skips the runs in this folder, which have copies of "
    "your tests.\n"
    'collect_ignore_glob = ["*"]\n',
}
JOB_ID = re.compile(r"\d+(_\d+)?")  # of a job, or of a task of an array
RUN_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{4}")  # a whole one


def resolve_scratch(job: Job, environ: Mapping[str, str]) -> Path:
    """Return the scratch folder: `$PACELINE_SCRATCH`, `[project] scratch`, or `runs` in the project
    folder.

    For a project that was sent to a cluster, that is `paceline` in `$SCRATCH` or in the home
    folder.
    """
    if environ.get(env.SCRATCH) and not job.is_typed("project.scratch"):
        return Path(os.path.abspath(expand_home(environ[env.SCRATCH])))
    on_cluster = bool(environ.get(env.ON_CLUSTER))
    if job.project.scratch is None and not on_cluster:
        return job.folder.absolute() / DEFAULT_SCRATCH
    # Each version of a sent project has a folder of its own, but their runs belong together.
    base = expand_home(environ.get("SCRATCH") or "~") / "paceline" if on_cluster else job.folder
    if job.project.scratch is None:
        return base
    text = job.project.scratch
    for name in re.findall(r"\$\{?(\w+)", text):
        if not environ.get(name):
            raise SpecError(
                f"{job.source('project.scratch')} is {text!r}, but ${name} is not set.",
                hint=f"Set {name} or {env.SCRATCH}, or use another folder.",
            )
    text = re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda match: environ[match[1] or match[2]], text)
    return Path(os.path.abspath(base / expand_home(text)))


def new_run_path(job: Job, environ: Mapping[str, str]) -> RunPath:
    """Return the path of the next run, without creating it."""
    scratch = resolve_scratch(job, environ)
    return RunPath(scratch, job.project_name, job.project.experiment, new_run_id())


class RunNotFound(UsageError):
    """No run has this name."""


def find_run(name: str, scratch: Path) -> RunFolder:
    """Find a run by its folder, its id, its name, its job id, one end of its id or the start of its
    name.

    `last` is the newest run, SWEEP-3 a trial of a sweep. Only the folder and the whole id find
    another user's run, which is to be read and nothing else (`find_own_run`). Raises UsageError if
    there is none, or more than one.
    """
    if not name.strip():
        raise UsageError(
            "The run's name is empty.", hint="Give a run's id, its name, its folder, or `last`."
        )
    if RunFolder(Path(name)).run_json.is_file():
        return RunFolder(Path(name).resolve())
    known = [Path(path) for path in list_folders(scratch, "run.json")][::-1]
    if name == "last":
        for path in filter(is_own_folder, reversed(known)):
            return RunFolder(path)
        raise RunNotFound(f"You have no runs in {scratch}.", hint=_where_runs_are())
    exact = [path for path in known if path.name == name]
    own = [path for path in exact if is_own_folder(path)]
    names = {} if own else {path: _other_names(RunFolder(path), name) for path in known}
    trial = re.fullmatch(r"(.+)-(\d+)", name)
    trials = f"*/*/{glob.escape(trial[1])}/{TRIALS}/{trial[2]}/run.json" if trial else ""
    # Whole names come before parts of them: `cancel a` must not cancel the run whose id happens to
    # end with an a.
    candidates = (
        own,
        (path for path in names if name in names[path]),
        (path.parent for path in (scratch.glob(trials) if trials else ())),
        (
            path
            for path in names
            if name
            in (path.name[: len(name)], path.name[-len(name) :], names[path][0][: len(name)])
        ),
    )
    found = (list(filter(is_own_folder, paths)) for paths in candidates)
    matches = next(filter(None, found), exact if RUN_ID.fullmatch(name) else [])
    if len(matches) == 1:
        return RunFolder(matches[0])
    if matches:
        newest = ", ".join(
            f"{path.name} ({label})"
            if names and (label := _read_details(path).get("name"))
            else path.name
            for path in matches[:-6:-1]
        )
        more = f" and {len(matches) - 5} older ones" if len(matches) > 5 else ""
        raise UsageError(
            f"{name!r} matches {len(matches)} runs: {newest}{more}.",
            hint="Give the run's id, or more of it.",
        )
    raise RunNotFound(
        f"There is no run {name!r} in {scratch}.",
        hint=f"Give a run's id, the start or end of it, its name or the "
        "start of that, its job id, or its folder. For another user's run, give the whole id or "
        f"the folder. `{to_type('ps')}` lists runs.",
    )


def _where_runs_are() -> str:
    """Return what to do if there are none: a variable that is set on a laptop says nothing about a
    cluster.
    """
    if not (name := cluster()):
        return "Give a run's folder, set PACELINE_SCRATCH, or add --on for the runs on a cluster."
    return (
        f"Submit one with `paceline submit --on {quote(name)} SCRIPT`. If you have runs in another "
        f"folder there, set scratch in [profiles.{name}.project]."
    )


def find_own_run(name: str, scratch: Path, *, also_fetched: bool = False) -> RunFolder:
    """Find a run as `find_run` does, to execute, signal or change it.

    Raises UsageError if it is another user's, if it was fetched from a cluster, or if it was found
    by a number that is only a part of its id or name: that may be a mistyped job id.
    """
    folder = find_run(name, scratch)
    require_own_folder(folder.path, "Run")
    if not also_fetched:
        require_not_fetched(folder)
    if JOB_ID.fullmatch(name) and name not in (folder.path.name, *_other_names(folder, name)):
        run_id = folder.path.name
        raise UsageError(
            f"No run has the job id {name}. It is a part of the id or the name of run {run_id}.",
            hint=f"If you mean that run, give its whole id: {run_id}",
        )
    return folder


def require_not_fetched(folder: RunFolder) -> None:
    """Raise an error for a run that was fetched: its records are the cluster's, down to the
    command line.
    """
    if not is_fetched(folder):
        return
    try:
        name = str(read_object(folder.fetched)["cluster"])
    except (OSError, ValueError, KeyError):  # it has not arrived whole
        name = "CLUSTER"
    raise UsageError(
        f"Run {folder.key} was fetched from a cluster, so you can only look at it here.",
        hint=f"Add --on {quote(name)} to change the run itself. To train from its weights here, "
        "start a new run:"
        f" paceline run --start-from {quote(folder.key)} SCRIPT",
    )


def _other_names(folder: RunFolder, wanted: str) -> tuple[str, ...]:
    """Return what else a run is known by: the name that `--name` gave it, or else its program, and
    its jobs if a job may be wanted.

    The name may be missing if the wanted one is no part of it: then run.json is not parsed.
    """
    from paceline.slurm.commands import known_jobs

    jobs = known_jobs(folder) if JOB_ID.fullmatch(wanted) else ()
    details = _read_details(folder.path, wanted)
    name, program = (str(details.get(key) or "") for key in ("name", "program"))
    return name, "" if name else program, *jobs


def _read_details(path: Path, part: str = "") -> dict[str, Any]:
    """Return run.json; empty if it cannot be read, or has no text with this part."""
    parts = {json.dumps(part, ensure_ascii=each)[1:-1].encode() for each in (True, False)}
    with suppress(OSError, ValueError):
        text = read_bounded(f"{path}/run.json")
        if any(each in text for each in parts):
            return parse_object(text)
    return {}


class RunFolderProblem(EnvironmentProblem):
    """A run folder cannot be created or written."""


def path_error(action: str, path: Path, error: OSError) -> RunFolderProblem:
    """Return the error for a run folder that cannot be used."""
    reason = error.strerror or str(error)
    return RunFolderProblem(
        f"Cannot {action} {path}: {reason}.",
        hint=f"Choose another folder with {env.SCRATCH}, or with scratch in [project] of "
        "paceline.toml.",
    )


@contextmanager
def open_run_folder(run_path: RunPath, *, is_new: bool) -> Iterator[None]:
    """Create a new run folder, or change one that exists.

    If the body fails, everything is as it was before, unless a job may need the folder.
    """
    folder = run_path.folder
    try:
        undo = _create(run_path) if is_new else _remember(folder)
    except OSError as error:
        action = "create" if is_new else "write"
        raise path_error(f"{action} the run folder", folder.path, error) from None
    try:
        yield
    except BaseException as error:
        if not (folder.path / SUBMITTING).exists():
            undo()
        if isinstance(error, OSError):
            raise path_error("write the run folder", folder.path, error) from None
        raise
    finally:
        shutil.rmtree(folder.path / BEFORE, ignore_errors=True)


def _create(run_path: RunPath) -> Callable[[], None]:
    """Create a run folder; return what removes it, and what else this has created."""
    folder = run_path.folder.path
    created = [path for path in folder.parents if not path.exists()]
    create_scratch(run_path.scratch)
    folder.mkdir(parents=True)

    def undo() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # something else is there
            for path in created:
                path.rmdir()

    return undo


def _remember(folder: RunFolder) -> Callable[[], None]:
    """Keep copies of the files that a start writes; return what puts them back."""
    paths = (
        folder.run_json,
        folder.launch_spec,
        folder.script,
        folder.shell_library,
        folder.shell_setup,
        folder.environment,
        folder.run_half,
        folder.code,
        folder.cancelled,
    )
    before = folder.path / BEFORE
    shutil.rmtree(before, ignore_errors=True)
    before.mkdir(mode=0o700)
    for path in filter(os.path.lexists, paths):
        shutil.copy2(path, before / path.name, follow_symlinks=False)

    def undo() -> None:
        for path in paths:
            path.unlink(missing_ok=True)
            if os.path.lexists(before / path.name):
                os.replace(before / path.name, path)

    return undo


def create_scratch(scratch: Path) -> None:
    """Create the scratch folder if it is missing.

    In a project, a new one gets `SHIELDS`. An existing folder stays as it is: it may be the user's
    own.
    """
    if scratch.is_dir():
        return
    scratch.mkdir(parents=True, exist_ok=True)
    marked = any((parent / mark).exists() for parent in scratch.parents for mark in PROJECT_MARKS)
    if marked or scratch.name == DEFAULT_SCRATCH:
        for name, text in SHIELDS.items():
            with suppress(OSError):  # whatever is wrong with the folder, the run itself will say it
                (scratch / name).write_text(text, encoding="utf-8")


def claim_run(run: RunFolder) -> None:
    """Claim a run folder for this process; raise an error if the run is queued or running
    somewhere.
    """
    record_processes(run, [os.getpid()])
    claim(run, local_job_start_name(), lambda holder: _require_over(run, holder))


def require_not_running(run: RunFolder) -> None:
    """Raise an error if the run is queued or running, as a job or on some machine."""
    _require_over(run, find_holder(run))


def _require_over(run: RunFolder, holder: Holder | None) -> None:
    if run.job.exists() or (holder is not None and holder.job is not None):
        _require_no_job(run, holder)
    if holder is None or holder.job is not None or holder.name == local_job_start_name():
        return
    where, name = holder.whereabouts(), run.path.name
    if where == HERE:
        raise UsageError(
            f"Run {name} is still running as process {holder.pids()[0]}.",
            hint=f"Wait for it, or stop it with `{to_type(f'cancel {name}')}`.",
        )
    if where == ELSEWHERE:
        raise UsageError(
            f"Run {name} was started on {holder.host}, and has not ended there as far as this host "
            "can see.",
            hint="Wait for it, or stop it there. Only if you are sure that it no longer runs, "
            f"remove {holder.job_start.process} and try again.",
        )


def _require_no_job(run: RunFolder, holder: Holder | None) -> None:
    # a new run has no job, and its command should start fast
    from paceline.slurm import commands as slurm
    from paceline.slurm import squeue_and_sacct
    from paceline.slurm.job_states import LIVE, WAITING

    jobs = [job for job in (slurm.read_job_id(run), holder.job if holder else None) if job]
    try:
        states = squeue_and_sacct.states(jobs)
    except ClusterError as problem:
        if holder is not None and read_verdict(holder.job_start.verdict) in (DONE, FAILED):
            return
        raise ClusterError(
            f"Cannot find out whether job {jobs[0]} still has run {run.path.name}: "
            f"{problem.message}",
            hint="Try again where that Slurm is reachable: on a login node, or, if the job is in "
            'a sandbox, after `eval "$(paceline sandbox env)"` in this terminal. Without that '
            "Slurm, start a new run from its newest checkpoint: "
            f"`--start-from {run.path.name} --continue`.",
        ) from None
    for state in states.values():
        if state.phase in (LIVE, WAITING):
            raise UsageError(
                f"Run {run.path.name} is {state.label} as job {state.id}.",
                hint=f"Wait for it, or end it with `{to_type(f'cancel {run.path.name}')}`.",
            )
