"""A run to start, new or again, here or on Slurm: which one it is, and what its folder gets."""

from __future__ import annotations

import fnmatch
import hashlib
import io
import marshal
import os
import re
import shutil
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from importlib.util import MAGIC_NUMBER, source_hash
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING

import paceline
from paceline.contract.files import replace_file
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.redaction import REDACTED
from paceline.contract.run_folder import RunFolder, write_atomically
from paceline.errors import EnvironmentProblem, UsageError
from paceline.launch.code_snapshot import BYTECODE, Snapshot, identify_code, list_code
from paceline.launch.launch_spec import SLURM, run_record
from paceline.launch.run_folder import new_run_path
from paceline.launch.secrets import read_secrets, secret_files
from paceline.spec.job import Job
from paceline.spec.run_path import RunPath, run_path_of
from paceline.staging.working_directory import WorkingDirectory

if TYPE_CHECKING:
    from paceline.launch.resume import EarlierRun


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
            from paceline.launch.resume import resolve_start

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
    project = job.folder.absolute()
    before = None if earlier is None else earlier.record
    if earlier is not None and earlier.keeps_code:
        launch_spec = replace(launch_spec, work=earlier.launch_spec.work)
        code = earlier.record.get("code", {})
    else:
        if earlier is not None:
            _remove_code(folder, earlier.launch_spec)
        snapshot = take_snapshot(job, run_path, notes, required=in_copy)
        if snapshot is not None and in_copy and job.project.workdir == "snapshot":
            # what the head agent fills the working directory with
            inside = run_folders_inside(job.folder, run_path)
            links = find_links(project, snapshot.names, run_folders=inside)
            if job.launch.check and launch_spec.cwd != str(job.cwd):
                args, names = job.program.args, snapshot.names
                check_args(args, cwd=job.cwd, project=project, code=names, links=links)
            work = {"code": str(folder.code), "project": str(project), "links": links}
            launch_spec = replace(launch_spec, work=work)
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
    write_atomically(folder.launch_spec, launch_spec.to_json(), mode=0o600)
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


MAX_LINKS = 5_000
MAX_SIBLINGS = 200
# A folder that has no other code is one for data or results.
PLACEHOLDERS = (".gitkeep", ".gitignore", ".keep", "README", "README.*")


def find_links(project: Path, code: Iterable[str], *, run_folders: Iterable[Path]) -> list[str]:
    """Find what to link, relative to the project; `../x` lies next to it.

    `code` are the files in the snapshot. Folders with runs hold such links, and get none.
    """
    children: dict[str, set[str]] = defaultdict(set)  # folder, such as "a/b/" -> its code
    with_code: set[str] = set()  # folders that have more than placeholders
    for name in code:
        *folders, base = name.split("/")
        parents = ["", *accumulate(f"{folder}/" for folder in folders)]
        for parent, child in zip(parents, (*folders, base), strict=True):
            children[parent].add(child)
        if not any(fnmatch.fnmatchcase(base, pattern) for pattern in PLACEHOLDERS):
            with_code.update(parents)
    runs = [path.resolve() for path in run_folders]

    def has_runs(path: Path) -> bool:
        # A link to a whole disk is the user's own choice, even if runs are there.
        if path.is_symlink():
            return path.resolve() in runs
        return any(each.is_relative_to(path) for each in runs)

    def scan(parent: str) -> Iterator[str]:
        folder = (project / parent).resolve()
        for entry in os.scandir(folder):
            name, path = f"{parent}{entry.name}", folder / entry.name
            is_folder = entry.is_dir(follow_symlinks=False)
            if entry.name == BYTECODE or (entry.name in children[parent] and not is_folder):
                continue
            if not has_runs(path) and f"{name}/" not in with_code:
                yield name
            elif is_folder and path not in runs:
                yield from scan(f"{name}/")

    found = sorted(islice(scan(""), MAX_LINKS + 1))
    if len(found) > MAX_LINKS:
        raise EnvironmentProblem(
            f"More than {MAX_LINKS:,} files and folders of {project} are not in the code snapshot, "
            "and a job would need a link to each.",
            hint="Move them into a folder of their own, or pass --workdir project.",
        )
    # Scripts read "../data", and ask git.
    above, hidden = project.resolve().parent, re.compile(r"\.(?!git$)")
    beside = [
        name
        for name in sorted(os.listdir(above) if os.access(above, os.R_OK) else ())
        if not hidden.match(name) and name != project.name and not has_runs(above / name)
    ]
    return found + [f"../{name}" for name in beside if len(beside) <= MAX_SIBLINGS]


def check_args(
    args: Iterable[str], *, cwd: Path, project: Path, code: Iterable[str], links: Iterable[str]
) -> None:
    """Raise an error for an argument that names a file which the working directory will not
    have.
    """
    known = {*code, *links}
    for arg in args:
        for text in (arg, arg.partition("=")[2]):
            if "/" not in text or os.path.isabs(text) or not os.path.exists(cwd / text):
                continue
            name = os.path.relpath(cwd / text, project)
            is_known = name in known or any(
                each.startswith(f"{name}/") or name.startswith(f"{each}/") for each in known
            )
            if name not in (".", "..") and not is_known:
                raise UsageError(
                    f"The job will not find {text}: its working directory is a copy of {project}, "
                    "without this path.",
                    hint=f"Write the path in full, {os.path.normpath(cwd / text)}, or pass "
                    "--workdir project.",
                )


FILES = ("__init__.py", "errors.py", "wandb.py", "py.typed")
PACKAGES = ("contract", "staging", "agent", "runtime")
# `python paceline.zip` starts an agent; with `trial` it begins or ends a trial of a sweep. We don't
# use `-m`, which would put the current folder ahead of the standard library. Any Python can parse
# this, so an old one can report that it is too old.
MAIN = b"""\
import sys

if sys.version_info < (3, 10):
    error = "paceline: error: %s is Python %d.%d, but a run needs 3.10 or newer."
    hint = "\\n  Set python in [environment] of paceline.toml."
    sys.exit((error + hint) % ((sys.executable,) + tuple(sys.version_info[:2])))

if sys.argv[1:2] == ["trial"]:
    from paceline.agent.sweep_trial import main

    sys.exit(main(sys.argv[2:]))

from paceline.agent.main import main

sys.exit(main())
"""
FIXED_DATE = (1980, 1, 1, 0, 0, 0)  # equal content gives an equal zip
UNCHECKED = (1).to_bytes(4, "little")  # .pyc files are not checked against their source's time


def write_run_half(destination: Path, *, store: Path, compiled: bool = False) -> None:
    """Write the zip to `destination`, as a hard link to the one in `store` where possible."""
    stored = stored_run_half(store, compiled=compiled)
    destination.unlink(missing_ok=True)  # a link to the store's must not be overwritten
    try:
        os.link(stored, destination)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(stored, destination)


def stored_run_half(store: Path, *, compiled: bool = False) -> Path:
    """Return the path of the zip in the store, and create it if it is missing.

    `compiled` adds byte code for this Python; nodes with another Python fall back to the source.
    """
    package = Path(paceline.__file__).parent
    paths = [package / name for name in FILES]
    for name in PACKAGES:
        paths += sorted((package / name).rglob("*.py"))
    sources = {path.relative_to(package.parent).as_posix(): path.read_bytes() for path in paths}
    sources["__main__.py"] = MAIN
    # Whoever owns a zip can change it, so each user has their own.
    digest = hashlib.sha256(f"{os.geteuid()} {compiled and sys.implementation.cache_tag}".encode())
    for name, content in sources.items():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    path = store / f"paceline-{digest.hexdigest()[:20]}.zip"
    if path.is_symlink() or not path.exists() or path.stat().st_uid != os.geteuid():
        store.mkdir(parents=True, exist_ok=True)
        with replace_file(path) as file:
            file.write(_pack(sources, compiled=compiled))
    return path


def _pack(sources: dict[str, bytes], *, compiled: bool) -> bytes:
    """Return the zip with these files, and the byte code of the modules if it is wanted."""
    packed = io.BytesIO()
    # Not compressed: each node reads it only once, possibly with a Python that lacks zlib.
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        for name, content in sources.items():
            archive.writestr(zipfile.ZipInfo(name, FIXED_DATE), content)
            if compiled and name.endswith(".py"):
                header = MAGIC_NUMBER + UNCHECKED + source_hash(content)
                code = marshal.dumps(compile(content, name, "exec", dont_inherit=True))
                archive.writestr(zipfile.ZipInfo(f"{name}c", FIXED_DATE), header + code)
    return packed.getvalue()
