"""What `--start-from` names: find it, and check it before anything is queued."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from paceline.contract.checkpoint import (
    WEIGHTS_SUFFIXES,
    find_checkpoints,
    find_weight_files,
    is_complete,
    is_weights_file,
)
from paceline.errors import CheckpointError, UsageError
from paceline.launch import run_folder as folders
from paceline.spec.job import Job
from paceline.spec.user_files import expand_home


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
