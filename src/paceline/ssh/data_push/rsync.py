"""rsync, as the user's own program, over the user's own connection."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.errors import ConnectionProblem, EnvironmentProblem
from paceline.ssh.connection import Connection
from paceline.ssh.data_push.sent_data import PARTIAL, SentData
from paceline.ssh.shell_text import word

CHANGED = (23, 24)  # exit codes of rsync if single files could not be sent, or have disappeared
_PROTOCOL = "is your shell clean"
_UNTRUSTED = "symlink owned by an untrusted user"  # from rsync 3.5 on, on the way to the target
# of a link that leads out of the target
_REFUSED = ("Too many levels of symbolic links", "Invalid cross-device link")
_SUMMARY = b"\nNumber of files: "  # how rsync's summary begins


@dataclass(frozen=True)
class Transfer:
    """What rsync has done, or would do."""

    code: int
    output: bytes
    errors: str

    @property
    def refused(self) -> list[str]:
        """The paths there that a link to a folder outside of the target leads to: rsync 3.5 does not write there."""
        lines = [line for line in _lines(self.errors) if any(each in line for each in _REFUSED)]
        return [_unescape(match[1]) for line in lines if (match := re.search('"(.+)"', line))]

    @property
    def files(self) -> int:
        """How many files and links are new there or have changed."""
        return self._number("Number of (?:regular )?files transferred") + self._number(
            "Number of created files.*link"
        )

    @property
    def size(self) -> int:
        """The bytes of these files."""
        return self._number("Total transferred file size")

    @property
    def sent(self) -> int:
        """The bytes of contents that went through the connection: of a file that has changed, only what is new."""
        return self._number("Literal data")

    def _number(self, what: str) -> int:
        found = re.search(rb"^" + what.encode() + rb": ([\d,.]+)", self.output, re.MULTILINE)
        return int(re.sub(rb"\D", b"", found[1])) if found else 0


def require_rsync() -> tuple[int, int]:
    """Return the version of rsync here. Raises EnvironmentProblem if there is none that can do this."""
    if shutil.which("rsync") is None:
        raise EnvironmentProblem(
            "There is no rsync here.",
            hint="Install it with your system's package manager, e.g. `apt install rsync`.",
        )
    done = subprocess.run(
        ["rsync", "--version"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    match = re.search(r"rsync\s+version v?(\d+)\.(\d+)", done.stdout)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if version < (3, 0) or "openrsync" in done.stdout:
        raise EnvironmentProblem(
            "rsync on this machine is older than version 3.0, or is not the original implementation.",
            hint="Install a newer one; on macOS: brew install rsync",
        )
    return version


def push(
    connection: Connection, data: SentData, *, to: str, rsync: str, progress: bool
) -> Transfer:
    """Send data. What has arrived stays if it is interrupted, and the next time goes on from there."""
    shown = ["--info=progress2" if require_rsync() >= (3, 1) else "--progress"] if progress else []
    done = run(connection, data, shown, to=to, rsync=rsync, is_shown=progress)
    if done.code != 0:
        raise problem(connection, done)
    return done


def run(
    connection: Connection,
    data: SentData,
    options: list[str],
    *,
    to: str,
    rsync: str,
    is_shown: bool = False,
) -> Transfer:
    """Run rsync, with its output on the terminal if asked to."""
    source, target = f"{data.path.resolve()}", to
    if data.is_folder:
        source, target = f"{source}/", f"{to}/"
    argv = [
        "rsync",
        "--recursive",
        "--links",
        "--safe-links",
        "--perms",
        "--times",
        "--protect-args",
        "--from0",
        "--update",
        "--keep-dirlinks",
        "--stats",
        f"--partial-dir={PARTIAL}",
        "-e",
        shlex.join(connection.shell()),
        f"--rsync-path={shlex.quote(rsync)}",
        *options,
    ]
    with tempfile.NamedTemporaryFile(prefix="paceline-excluded-") as excluded:
        excluded.write(
            b"\0".join(_pattern(name) for name in (*data.secrets, *data.outside, *data.elsewhere))
        )
        excluded.flush()
        argv += [
            f"--exclude-from={excluded.name}",
            "--",
            source,
            f"{_in_brackets(connection.cluster.host)}:{target}",
        ]
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            output, errors = _read(process, is_shown)
            process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
    return Transfer(process.returncode, output, errors.decode(errors="replace"))


def _read(process: subprocess.Popen[bytes], is_shown: bool) -> tuple[bytes, bytes]:
    """Return output and messages; show the output, but for the summary, if asked to.

    Both end with rsync's ssh, which has the same stderr, so nothing of it is left on the cluster then.
    """
    assert process.stdout is not None
    assert process.stderr is not None
    errors = list[bytes]()
    reader = threading.Thread(
        target=lambda stream: errors.append(stream.read()), args=[process.stderr], daemon=True
    )
    reader.start()
    output, shown = bytearray(), 0
    while part := os.read(process.stdout.fileno(), 1 << 16):
        output += part
        begun = output.find(_SUMMARY, max(0, shown - len(_SUMMARY)))
        until = len(output) if begun < 0 else begun
        if is_shown and until > shown:
            sys.stdout.buffer.write(output[shown:until])
            sys.stdout.buffer.flush()
        shown = until
    reader.join()
    process.stdout.close()
    process.stderr.close()
    return bytes(output), errors[0]


def _in_brackets(host: str) -> str:
    """Return a host as rsync wants it: it takes the first colon for the end of the name, except in brackets."""
    user, at, address = host.rpartition("@")
    return f"{user}{at}[{address}]" if ":" in address and not address.startswith("[") else host


def _pattern(name: str) -> bytes:
    """Return a pattern of rsync's that means this file alone."""
    escaped = re.sub(r"([*?\[\\])", r"\\\1", name) if re.search(r"[*?\[]", name) else name
    return b"/" + escaped.encode(errors="surrogateescape")


def problem(connection: Connection, done: Transfer) -> EnvironmentProblem | ConnectionProblem:
    name, code, errors = connection.cluster.name, done.code, done.errors
    again = "What has arrived is kept: the same command continues from there."
    if "No space left" in errors or "quota" in errors.lower():
        return EnvironmentProblem(
            f"The disk on {name} is full, or your quota there.", hint=f"Make room there. {again}"
        )
    if not connection.is_open():
        return ConnectionProblem(
            f"The connection to {name} was lost.", hint=f"Type: paceline login {name}. {again}"
        )
    if _PROTOCOL in errors:
        return EnvironmentProblem(
            f"The login shell on {name} prints output, which breaks rsync.",
            hint="Change ~/.bashrc there so that it prints only in interactive shells.",
        )
    said = _lines(errors)
    if _UNTRUSTED in errors and done.refused:
        return _untrusted(connection, done)
    if done.refused:
        return EnvironmentProblem(
            f"On {name}, a folder above {done.refused[0]} is a link, and rsync there does not follow it.",
            hint="Send that folder separately, and set --to to the target of the link.",
        )
    what = "Some files were not sent" if code in CHANGED else f"rsync failed (exit code {code})"
    return EnvironmentProblem(f"{what}: {said[0] if said else 'it gave no reason'}.", hint=again)


def _untrusted(connection: Connection, done: Transfer) -> EnvironmentProblem:
    path = done.refused[0].rstrip("/")
    answer = connection.call(f"readlink -f {word(path)}\n")
    place = answer.output.decode(errors="replace").strip() or "the place that it leads to"
    return EnvironmentProblem(
        f"On {connection.cluster.name}, {path} leads through another user's link, which rsync there does not follow.",
        hint=f"If you trust the link, pass its target with --to or set it as `scratch`: {place}",
    )


def _unescape(name: str) -> str:
    """Return a name without the escapes with which rsync prints characters that its locale lacks."""
    escaped = re.sub(
        rb"\\#([0-7]{3})", lambda match: bytes([int(match[1], 8) & 255]), name.encode()
    )
    return escaped.decode(errors="surrogateescape")


def _lines(errors: str) -> list[str]:
    """Return rsync's messages, without control characters, from the first."""
    clean = re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "", errors)
    return [line.strip().rstrip(".") for line in clean.splitlines() if line.strip()]


def describe_left(names: Iterable[str], shown: int = 5) -> str:
    listed = sorted(names)
    return ", ".join(listed[:shown]) + (
        f" and {len(listed) - shown} more" if len(listed) > shown else ""
    )
