"""The part of a project that goes to a cluster, and its folder there, which its content names.

A folder holds the code as a snapshot would, or only paceline.toml for commands that need no code.
It is complete or absent: it gets its name at the end. rsync links files that an earlier one has.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.contract.files import show_size
from paceline.errors import EnvironmentProblem, SpecError
from paceline.launch.code_snapshot import CodeTooLarge, SentCode, identify_code, list_code
from paceline.launch.run_folder import resolve_scratch
from paceline.launch.secrets import secret_files
from paceline.spec.job import Job
from paceline.spec.load import SENT_FILE
from paceline.spec.shell_text import quote
from paceline.ssh.connection import SSH_FAILED, Connection, word
from paceline.ssh.installation import CACHE

NOTED_SIZE = 5_000_000  # bytes: more than this is named before it is sent
SUMS = ".paceline-sums"  # checksums for `sha256sum`: sites remove old files from caches
SENT = 600.0  # seconds
EMPTY = b"e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855  /dev/null\n"
LINK = "link"
_log = logging.getLogger("paceline")


@dataclass(frozen=True)
class Parcel:
    """Files of a project, on their way. `is_own` asks for a folder that no other command gets."""

    folder: Path
    code: SentCode
    skipped_secrets: tuple[str, ...] = ()
    is_own: bool = False

    @property
    def size(self) -> int:
        return sum(size for _, size, _ in self.code.files.values())

    def describe(self) -> str:
        """Return number, size and the largest files for people."""
        files = self.code.files
        largest = sorted(((files[name][1], name) for name in files), reverse=True)[:3]
        names = ", ".join(f"{name} {show_size(size)}" for size, name in largest)
        return f"{len(files)} file{'s' * (len(files) != 1)}, {show_size(self.size)} ({names})"


def pack_code(
    job: Job,
    environ: Mapping[str, str],
    *,
    runs: Iterable[Path],
    cluster: str,
    is_own: bool = False,
) -> Parcel:
    """Return the code of a project: what git tracks and what has changed, as in a snapshot.

    `runs` are scratch folders of this machine, where fetched runs are.
    """
    limit = job.project.snapshot_limit * 10**6
    runs = [*runs]
    with suppress(SpecError):  # a profile may use variables of the cluster
        runs.append(resolve_scratch(job, environ))
    here = job.folder.resolve()
    runs = [folder for folder in runs if not here.is_relative_to(folder.resolve())]
    try:
        listed = list_code(
            job.folder,
            limit=limit,
            exclude=job.project.exclude,
            exclude_paths=[*runs, *secret_files(job, environ)],
        )
    except CodeTooLarge as problem:  # a job without a snapshot needs the code, too
        raise EnvironmentProblem(problem.message, hint=_instead(problem.most, cluster)) from None
    code = _describe(job.folder, listed.folder, listed.sizes)
    parcel = Parcel(listed.folder, code, listed.skipped_secrets, is_own)
    if parcel.size > limit:  # holes count on the way
        name = max(code.files, key=lambda each: code.files[each][1])
        raise EnvironmentProblem(
            f"The code in {job.folder} is too large: {name} has {show_size(code.files[name][1])}.",
            hint=_instead(name, cluster),
        )
    return parcel


def _instead(name: str, cluster: str) -> str:
    """Return what to do with code that is too large to send, or has too many files."""
    return (
        "If it is data, add it to .gitignore or to exclude in [project], and send it with"
        f" `paceline data push {quote(name)} --on {quote(cluster)}`. If it is code, raise "
        "snapshot_limit."
    )


def pack_settings(folder: Path, file: Path | None) -> Parcel:
    """Return the settings of a project, for commands that need no code."""
    folder = folder.resolve()
    name = os.path.relpath(file.resolve(), folder) if file is not None else ""
    if name.startswith("../"):
        raise SpecError(
            f"{name} is outside of the project.",
            hint="Move it into the project: only the project is sent.",
        )
    return Parcel(folder, SentCode(folder.name or "project", _read(folder, [name] if name else [])))


def _describe(project: Path, folder: Path, names: Iterable[str]) -> SentCode:
    files = _read(folder, names)
    identity = identify_code(project)
    name = project.name or "project"  # runs are grouped by it
    return SentCode(name, files, identity.commit, identity.branch, identity.changed)


def _read(folder: Path, names: Iterable[str]) -> dict[str, tuple[str, int, str]]:
    """Return kind, size and checksum of each file; of a link its target instead."""
    found = {}
    for name in names:
        path = folder / name
        with suppress(FileNotFoundError):  # deleted since it was listed
            if path.is_symlink():
                target = os.readlink(path)
                found[name] = (LINK, len(target), target)
                continue
            content = path.read_bytes()
            kind = "program" if os.access(path, os.X_OK) else "file"
            found[name] = (kind, len(content), hashlib.sha256(content).hexdigest())
    return found


# -- its folder there


def locate(parcel: Parcel) -> str:
    """Return shell text that sets `code`, the folder of a parcel on the cluster."""
    if parcel.is_own:
        return f'{CACHE}code="$cache/work/{secrets.token_hex(10)}"\n'
    text = parcel.code.to_json().encode(errors="surrogateescape")
    return f'{CACHE}code="$cache/code/{hashlib.sha256(text).hexdigest()[:20]}"\n'


def is_complete(parcel: Parcel) -> str:
    """Return a condition for the shell: the code is there, and nobody has changed it."""
    return (
        f'{{ cd "$code"/{word(parcel.code.project)} 2>/dev/null'
        f' && sha256sum --status -c ../{SUMS} 2>/dev/null && touch "$code"; }}'
    )


def newest_like(parcel: Parcel) -> str:
    """Return shell text that prints the newest folder of the same project: most files are equal."""
    return f'ls -td "$cache"/code/*/{word(parcel.code.project)} 2>/dev/null | head -n 1\n'


def send(connection: Connection, parcel: Parcel, place: str, *, like: str, rsync: bool) -> None:
    """Send a parcel to the folder that `place` locates. What is wrong in an existing one is repaired.

    `like` is a folder there with mostly the same files. Without `rsync`, all files are sent.
    """
    if parcel.size > NOTED_SIZE:
        _log.info(f"sending code to {connection.cluster.name}: {parcel.describe()}")
    project = word(parcel.code.project)
    begin = (
        f'{place}umask 077; partial="$code"; [ -d "$code" ] || partial="$code.partial-$$"\n'
        f'mkdir -p "$partial"/{project} && cd "$partial" && pwd\n'
    )
    with tempfile.TemporaryDirectory() as folder:
        # last, so that no file is taken for sent before it is
        (about := Path(folder, SENT_FILE)).write_text(parcel.code.to_json(), encoding="utf-8")
        (sums := Path(folder, SUMS)).write_bytes(_sums(parcel))
        made = connection.call(begin)
        partial = made.output.decode(errors="surrogateescape").rstrip("\n")
        if made.code != 0 or not partial:
            raise _cannot_send(connection, made.errors)
        target = f"{partial}/{parcel.code.project}"
        if not (rsync and _send_by_rsync(connection, parcel, target, like=like)):
            files = {name: parcel.folder / name for name in parcel.code.files}
            # over what is there: another command may be working in that folder
            script = f"umask 077; tar -xzf - -C {word(target)}\n"
            if (answer := connection.send_tar(files, script)).code != 0:
                raise _cannot_send(connection, answer.errors)
        script = (
            f"{place}cd {word(partial)} && tar -xzf - && cd {project} && sha256sum --quiet -c ../{SUMS}"
            f' && {{ [ -d "$code" ] || mv -T {word(partial)} "$code" || [ -d "$code" ]; }}\n'
        )
        answer = connection.send_tar({SENT_FILE: about, SUMS: sums}, script)
    if answer.code != 0:
        raise _cannot_send(connection, answer.output.decode(errors="replace") + answer.errors)


def _cannot_send(connection: Connection, errors: str) -> EnvironmentProblem:
    said = (errors.strip().splitlines() or ["no message"])[-1]
    return EnvironmentProblem(
        f"Your code did not arrive on {connection.cluster.name} as it is here: {said}",
        hint="Wait until nothing writes to your files, and check your quota there. Then try again.",
    )


def _sums(parcel: Parcel) -> bytes:
    """Return a list for `sha256sum -c`, which escapes some characters of names."""
    lines = []
    for name, (kind, _, digest) in parcel.code.files.items():
        if kind != LINK:
            escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
            mark = "\\" if escaped != name else ""
            lines.append(f"{mark}{digest}  {escaped}\n")
    return "".join(lines).encode(errors="surrogateescape") or EMPTY


def _send_by_rsync(connection: Connection, parcel: Parcel, target: str, *, like: str) -> bool:
    """Send files with rsync; return whether that was possible."""
    links = [f"--link-dest={like}"] if like and not parcel.is_own else []
    options = ["-rlptc", "-s", "--from0", "--files-from=-", *links]
    try:
        done = subprocess.run(
            connection.rsync(*options, f"{parcel.folder}/", connection.remote(f"{target}/")),
            input="\0".join(parcel.code.files).encode(errors="surrogateescape"),
            capture_output=True,
            timeout=SENT,
            check=False,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False
    if done.returncode == SSH_FAILED:
        raise connection.broken(done.stderr.decode(errors="replace"))
    return done.returncode == 0
