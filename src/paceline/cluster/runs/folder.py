"""Run folders: where they go, and how one is made whole or not at all."""

from __future__ import annotations

import glob
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from paceline.contract.run_folder import RunFolder
from paceline.errors import ClusterError, EnvironmentProblem, SpecError, UsageError
from paceline.plan.run_path import STORE, RunPath, new_run_id
from paceline.spec import Job

SCRATCH = "PACELINE_SCRATCH"
DEFAULT_SCRATCH = "runs"
TRIALS = "trials"  # in the folder of a sweep


def resolve_scratch(job: Job, environ: Mapping[str, str]) -> Path:
    """`$PACELINE_SCRATCH`, else `[project] scratch`, else `runs` in the project's folder."""
    if environ.get(SCRATCH):
        return Path(os.path.abspath(Path(environ[SCRATCH]).expanduser()))
    if job.project.scratch is None:
        return job.folder.absolute() / DEFAULT_SCRATCH
    text = re.sub(
        r"\$(?:\{(\w+)\}|(\w+))",
        lambda match: _variable(match[1] or match[2], job, environ),
        job.project.scratch,
    )
    return Path(os.path.abspath(job.folder / Path(text).expanduser()))


def _variable(name: str, job: Job, environ: Mapping[str, str]) -> str:
    if not environ.get(name):
        raise SpecError(
            f"{job.source('project.scratch')} is {job.project.scratch!r}, and ${name} is not set here",
            hint=f"set {name} or {SCRATCH}, or write another folder",
        )
    return environ[name]


def new_run_path(job: Job, environ: Mapping[str, str]) -> RunPath:
    """Where the next run will live. Nothing is made."""
    scratch = resolve_scratch(job, environ)
    return RunPath(scratch, job.project_name, job.project.experiment, new_run_id())


def run_path_of(folder: RunFolder) -> RunPath:
    """The site of a run that exists. Trials of a sweep lie within it."""
    path = folder.path.absolute()
    if path.parent.name == TRIALS and path.name.isdigit():
        sweep = run_path_of(RunFolder(path.parent.parent))
        return RunPath(sweep.scratch, sweep.project, f"{sweep.experiment}/{sweep.run_id}/{TRIALS}", path.name)
    return RunPath(path.parent.parent.parent, path.parent.parent.name, path.parent.name, path.name)


def find_run(name: str, scratch: Path) -> RunFolder:
    """A run by its folder, its id, or the end of its id; `last` is the newest; a trial of a sweep is SWEEP-3."""
    if (RunFolder(Path(name)).run_json).is_file():
        return RunFolder(Path(name).resolve())
    found = (path.parent for path in scratch.glob("*/*/*/run.json"))
    # Copies of code lie beside the runs, and may hold a file of that name.
    known = sorted(path for path in found if path.parent.name != STORE)
    known.sort(key=lambda path: path.name)
    meant = known[-1:] if name == "last" else [path for path in known if path.name.endswith(name)]
    if not meant and (match := re.fullmatch(r"(.+)-(\d+)", name)):
        trials = scratch.glob(f"*/*/{glob.escape(match[1])}/{TRIALS}/{match[2]}/run.json")
        meant = [path.parent for path in trials]
    if len(meant) == 1:
        return RunFolder(meant[0])
    if meant:
        raise UsageError(
            f"{name!r} names {len(meant)} runs: {', '.join(path.name for path in meant[:5])}",
            hint="write more of the run's id, or its folder",
        )
    raise UsageError(
        f"there is no run {name!r} in {scratch}", hint="give a run's folder, its id, or the end of its id"
    )


def require_not_running(folder: RunFolder) -> None:
    """Never two at once in one run folder: a start of it on this machine may still be going on."""
    import psutil

    from paceline.cluster.slurm import commands as slurm
    from paceline.cluster.slurm.states import LIVE, WAITING

    job = slurm.read_job_id(folder)
    try:
        state = slurm.states([job]).get(job) if job is not None else None
    except ClusterError:  # no scheduler answers here: whoever types this knows better
        state = None
    if state is not None and state.phase in (LIVE, WAITING):
        raise UsageError(
            f"the run {folder.path.name} is {state.label}, as job {job}",
            hint=f"wait for it, or end it first: paceline cancel {folder.path.name}",
        )
    for job_start in folder.path.glob("job-starts/pid-*"):
        pid = int(job_start.name.removeprefix("pid-"))
        # In a container the same few numbers come again: one that died may have had this process's own.
        if (job_start / "verdict").exists() or pid == os.getpid() or not psutil.pid_exists(pid):
            continue
        try:
            words = psutil.Process(pid).cmdline()
        except psutil.Error:
            continue
        if any("paceline" in word for word in words):
            raise UsageError(
                f"the run {folder.path.name} is still going on, as process {pid}",
                hint=f"wait for it, or ask it to stop: kill {pid}",
            )


def path_error(doing: str, path: Path, error: OSError) -> EnvironmentProblem:
    """A path that cannot be used, as one line with a way out."""
    reason = error.strerror or str(error)
    return EnvironmentProblem(
        f"cannot {doing} {path}: {reason}",
        hint=f"choose another place: {SCRATCH}=/some/folder, or scratch in [project] of paceline.toml",
    )


@contextmanager
def create_run_folder(run_path: RunPath) -> Iterator[RunPath]:
    """Make a run folder that nobody else has, and take all of it away again when the body fails."""
    made: list[Path] = []
    try:
        for parent in reversed([run_path.folder.path.parent, *run_path.folder.path.parent.parents]):
            if not parent.exists():
                _make(parent, made)
        while True:
            try:
                run_path.folder.path.mkdir()
            except FileExistsError:
                run_path = run_path.renamed()
                continue
            break
    except OSError as error:
        _unmake(made)
        raise path_error("make the run folder", run_path.folder.path, error) from None
    try:
        yield run_path
    except BaseException as error:
        shutil.rmtree(run_path.folder.path, ignore_errors=True)
        _unmake(made)
        if isinstance(error, OSError):
            raise path_error("write the run folder", run_path.folder.path, error) from None
        raise


def _make(path: Path, made: list[Path]) -> None:
    try:
        path.mkdir()
    except FileExistsError:
        if not path.is_dir():
            raise
    else:
        made.append(path)


def _unmake(made: list[Path]) -> None:
    """Take parents away that this run made and nobody has used since."""
    for path in reversed(made):
        try:
            # Runs make their folder before they use the store: a store beside no run folder is ours alone.
            if os.listdir(path) == [STORE]:
                shutil.rmtree(path / STORE)
            path.rmdir()
        except OSError:
            return
