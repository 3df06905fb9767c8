"""rsync, as the user's own program, over the user's own connection."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable

from paceline.cluster.ssh.connection import Connection
from paceline.cluster.ssh.push.sent_data import PARTIAL, SentData
from paceline.errors import ConnectionProblem, EnvironmentProblem

CHANGED = (23, 24)  # exit codes of rsync if single files could not be sent, or have disappeared
_PROTOCOL = "is your shell clean"
_NEWER = " is newer"  # how rsync ends the line about a file that it leaves as it is
_REFUSED = "Too many levels of symbolic links"  # from rsync 3.5 on, for links to folders outside of the target


def require_rsync() -> tuple[int, int]:
    """Return the version of rsync here. Raises EnvironmentProblem if there is none that can do this."""
    if shutil.which("rsync") is None:
        raise EnvironmentProblem(
            "There is no rsync here.", hint="Install it with your system's package manager, e.g. `apt install rsync`."
        )
    done = subprocess.run(["rsync", "--version"], capture_output=True, text=True, check=False)
    match = re.search(r"rsync\s+version v?(\d+)\.(\d+)", done.stdout)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if version < (3, 0) or "openrsync" in done.stdout:
        raise EnvironmentProblem(
            "rsync here is older than version 3.0, or not the original.",
            hint="Install a newer one; on macOS: brew install rsync",
        )
    return version


def find_newer(connection: Connection, data: SentData, *, to: str, rsync: str) -> list[str]:
    """Return the files that are newer on the cluster: `push` leaves them as they are. Nothing is sent yet."""
    said = "--info=skip1" if require_rsync() >= (3, 1) else "-vv"
    code, output, errors = _run(connection, data, ["--dry-run", said], to=to, rsync=rsync, output=subprocess.PIPE)
    if code != 0 and (code not in CHANGED or _REFUSED in errors):
        raise _problem(connection, code, errors)
    lines = output.decode(errors="replace").splitlines()
    return [line.removesuffix(_NEWER) for line in lines if line.endswith(_NEWER)]


def push(connection: Connection, data: SentData, *, to: str, rsync: str, progress: bool) -> None:
    """Send data. What has arrived stays if it is interrupted, and the next time goes on from there."""
    shown = ["--info=progress2" if require_rsync() >= (3, 1) else "--progress"] if progress else []
    code, _, errors = _run(connection, data, shown, to=to, rsync=rsync)
    if code != 0:
        raise _problem(connection, code, errors)


def _run(
    connection: Connection, data: SentData, options: list[str], *, to: str, rsync: str, output: int | None = None
) -> tuple[int, bytes, str]:
    """Run rsync; return its exit code, its output if that goes to a pipe, and its messages."""
    source, target = f"{data.path.resolve()}", to
    if data.is_folder:
        source, target = f"{source}/", f"{to}/"
    argv = [
        "rsync", "--recursive", "--links", "--safe-links", "--perms", "--times", "--protect-args", "--from0",
        "--update", "--keep-dirlinks", f"--partial-dir={PARTIAL}", "-e", shlex.join(connection.shell()),
        f"--rsync-path={shlex.quote(rsync)}", *options,
    ]  # fmt: skip
    with tempfile.NamedTemporaryFile(prefix="paceline-excluded-") as excluded:
        excluded.write(b"\0".join(_pattern(name) for name in (*data.secrets, *data.outside)))
        excluded.flush()
        argv += [f"--exclude-from={excluded.name}", "--", source, f"{_in_brackets(connection.cluster.host)}:{target}"]
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.PIPE)
        try:
            content, errors = process.communicate()
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            raise
    return process.returncode, content or b"", errors.decode(errors="replace")


def _in_brackets(host: str) -> str:
    """Return a host as rsync wants it: it takes the first colon for the end of the name, except in brackets."""
    user, at, address = host.rpartition("@")
    return f"{user}{at}[{address}]" if ":" in address and not address.startswith("[") else host


def _pattern(name: str) -> bytes:
    """Return a pattern of rsync's that means this file alone."""
    escaped = re.sub(r"([*?\[\\])", r"\\\1", name) if re.search(r"[*?\[]", name) else name
    return b"/" + escaped.encode(errors="surrogateescape")


def _problem(connection: Connection, code: int, errors: str) -> EnvironmentProblem | ConnectionProblem:
    name = connection.cluster.name
    again = "What has arrived is kept: the same command goes on from there."
    if "No space left" in errors or "quota" in errors.lower():
        return EnvironmentProblem(f"The disk on {name} is full, or your quota there.", hint=f"Make room there. {again}")
    if not connection.is_open():
        return ConnectionProblem(f"The connection to {name} was lost.", hint=f"Type: paceline login {name}. {again}")
    if _PROTOCOL in errors:
        return EnvironmentProblem(
            f"The login shell on {name} prints something, which rsync cannot stand.",
            hint="Let ~/.bashrc there print only if the shell is interactive.",
        )
    said = _lines(errors)
    if _REFUSED in errors:
        place = next(
            (match[1] for line in said if _REFUSED in line and (match := re.search('"(.+)"', line))), "the target"
        )
        return EnvironmentProblem(
            f"On {name}, a folder above {place} is a link, which rsync there does not follow.",
            hint="Send that folder by itself, with --to and the place that the link leads to.",
        )
    what = "Some files were not sent" if code in CHANGED else f"rsync failed (exit code {code})"
    return EnvironmentProblem(f"{what}: {said[0] if said else 'it gave no reason'}.", hint=again)


def _lines(errors: str) -> list[str]:
    """Return rsync's messages, without control characters, from the first."""
    clean = re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "", errors)
    return [line.strip().rstrip(".") for line in clean.splitlines() if line.strip()]


def describe_left(names: Iterable[str], shown: int = 5) -> str:
    listed = sorted(names)
    return ", ".join(listed[:shown]) + (f" and {len(listed) - shown} more" if len(listed) > shown else "")
