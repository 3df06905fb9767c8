"""Which part of a project is sent to the cluster: its code as in a snapshot, or only its settings."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from paceline.contract.files.sent_code import SentCode
from paceline.contract.files.shared_folders import open_without_waiting
from paceline.contract.files.size import show_size
from paceline.contract.quote import quote
from paceline.errors import EnvironmentProblem, SpecError
from paceline.launch.code_snapshot import CodeTooLarge, identify_code, list_code, takes_output
from paceline.launch.code_store import LINK, read_files
from paceline.launch.run_folder import resolve_scratch
from paceline.launch.secrets.secrets import secret_files
from paceline.spec import Job


@dataclass(frozen=True)
class Parcel:
    """Files of a project, on their way."""

    folder: Path
    code: SentCode
    skipped_secrets: tuple[str, ...] = ()
    is_announced: bool = False  # whether the user was told how much it is


def pack_code(
    job: Job, environ: Mapping[str, str], *, runs: Iterable[Path], cluster: str
) -> Parcel:
    """Return the code of a project: what git tracks and what has changed, within the limits of a snapshot.

    `runs` are scratch folders of this machine, where fetched runs are; the job may have the one of the cluster.
    """
    limit = job.project.snapshot_limit * 10**6
    try:
        listed = list_code(
            job.folder,
            limit=limit,
            exclude=job.project.exclude,
            exclude_paths=[*_runs(job, environ, runs), *secret_files(job, environ)],
            travels=True,
        )
    except CodeTooLarge as problem:  # a job without a snapshot needs the code, too
        hint = _instead(problem.largest, cluster, is_count=problem.is_count)
        raise EnvironmentProblem(problem.message, hint=hint) from None
    # it changes on the way
    names = [name for name in listed.sizes if not takes_output(listed.folder / name)]
    files = describe_files(listed.folder, names)
    if sum(size for _, size, _ in files.values()) > limit:  # holes count on the way
        name = max(files, key=lambda each: files[each][1])
        raise EnvironmentProblem(
            f"The code in {job.folder} is too large: {name} has {show_size(files[name][1])}.",
            hint=_instead([name], cluster),
        )
    identity = identify_code(job.folder, files)
    code = SentCode(
        project_folder(job.folder), files, identity.commit, identity.branch, identity.changed
    )
    return Parcel(listed.folder, code, listed.skipped_secrets)


def _instead(largest: Sequence[str], cluster: str, *, is_count: bool = False) -> str:
    """Return what to do with code that is too large to send, or has too many files."""
    name = quote(largest[0]) if largest else "FOLDER" if is_count else "FILE"
    return (
        f"If it is data, add it to .gitignore or to exclude in [project], and send it with"
        f" `paceline data push {name} --on {quote(cluster)}`."
        f"{' No option raises the number of files.' if is_count else ' If it is code, raise snapshot_limit.'}"
    )


def pack_settings(folder: Path, files: Iterable[Path]) -> Parcel:
    """Return the settings of a project, for commands that need no code."""
    folder = folder.resolve()
    names = [os.path.relpath(file.resolve(), folder).replace(os.sep, "/") for file in files]
    for name in names:
        if name.startswith("../"):
            raise SpecError(
                f"{name} is outside of the project.",
                hint="Move it into the project: only the project is sent.",
            )
    return Parcel(folder, SentCode(project_folder(folder), describe_files(folder, names)))


def describe_files(folder: Path, names: Iterable[str]) -> dict[str, tuple[str, int, str]]:
    """Return kind, size and digest of each file; of a link its target instead."""
    found = {}
    for name, file in read_files(folder, names).items():
        if file.kind == LINK:
            target = os.readlink(folder / name)
            found[name] = (LINK, len(target), target)
        else:
            found[name] = (file.kind, (folder / name).stat().st_size, file.digest)
    return found


def project_folder(folder: Path) -> str:
    """Return the name of a project's folder on the other side: runs are grouped by it."""
    return folder.name or "project"


def write_contents(parcel: Parcel, wanted: Mapping[str, str], stream: IO[bytes]) -> None:
    """Write the wanted contents as one stream in tar format. `wanted` maps keys to names of files."""
    with tarfile.open(fileobj=stream, mode="w|", bufsize=1 << 18) as archive:
        for key, name in wanted.items():
            descriptor = open_without_waiting(parcel.folder / name)
            with open(descriptor, "rb") as file:
                member = tarfile.TarInfo(key)
                member.size = parcel.code.files[name][1]
                if os.fstat(descriptor).st_size != member.size:
                    raise EnvironmentProblem(
                        f"{name} changed while it was sent.",
                        hint="Wait until nothing writes to it.",
                    )
                archive.addfile(member, file)
    stream.flush()


def describe_size(parcel: Parcel, wanted: Mapping[str, str]) -> tuple[int, str]:
    """Return the number of bytes to send, and the largest files for people."""
    sizes = sorted(((parcel.code.files[name][1], name) for name in wanted.values()), reverse=True)
    largest = ", ".join(f"{name} ({show_size(size)})" for size, name in sizes[:3])
    return sum(size for size, _ in sizes), largest


def _runs(job: Job, environ: Mapping[str, str], runs: Iterable[Path]) -> list[Path]:
    """Return the folders of runs, as far as they are known here: a profile may use variables of the cluster."""
    folders = [*runs]
    with suppress(SpecError):
        folders.append(resolve_scratch(job, environ))
    return [
        folder for folder in folders if not job.folder.resolve().is_relative_to(folder.resolve())
    ]
