"""Processes of `ssh`: run one to its end, or with the user's terminal, and say what its messages mean."""

from __future__ import annotations

import os
import re
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from paceline.errors import ConnectionProblem, EnvironmentProblem

CHUNK = 1 << 16  # bytes


class TooLong(Exception):
    """Raised if ssh writes too much; `output` is the beginning of it."""

    def __init__(self, output: bytes) -> None:
        super().__init__()
        self.output = output


def run(
    argv: Sequence[str], *, content: bytes = b"", timeout: float, limit: int = sys.maxsize
) -> subprocess.CompletedProcess[bytes]:
    """Run ssh and return what it wrote. Raises TimeoutExpired, or TooLong after `limit` bytes of a stream.

    The process that shares its connection keeps its pipes open while the other side is silent, so nobody waits for
    their end then. Ctrl-C in a terminal does not reach ssh itself: a thread would report it as a lost connection.
    """
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            argv, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True
        )
    except FileNotFoundError:
        raise no_ssh() from None
    try:
        output, errors = _communicate(
            process, content, deadline=time.monotonic() + timeout, limit=limit
        )
    except BaseException:
        process.kill()
        process.wait()
        raise
    finally:
        for stream in (process.stdin, process.stdout, process.stderr):
            assert stream is not None
            stream.close()
    return subprocess.CompletedProcess(argv, process.returncode, output, errors)


def _communicate(
    process: subprocess.Popen[bytes], content: bytes, *, deadline: float, limit: int
) -> tuple[bytes, bytes]:
    """Write to a process and read what it writes until it ends."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    output, errors, rest = bytearray(), bytearray(), memoryview(content)
    os.set_blocking(process.stdin.fileno(), False)
    with selectors.DefaultSelector() as waiter:
        waiter.register(process.stdin, selectors.EVENT_WRITE)
        waiter.register(process.stdout, selectors.EVENT_READ, output)
        waiter.register(process.stderr, selectors.EVENT_READ, errors)
        while waiter.get_map():
            ready = waiter.select(_left(process, deadline))
            for key, _ in ready:
                if key.data is None:
                    with suppress(BrokenPipeError):
                        rest = rest[os.write(key.fd, rest[:CHUNK]) :]
                        if rest:
                            continue
                    waiter.unregister(process.stdin)
                    process.stdin.close()
                elif part := os.read(key.fd, CHUNK):
                    key.data.extend(part)
                    if len(key.data) > limit:
                        raise TooLong(bytes(output))
                else:
                    waiter.unregister(key.fileobj)
    process.wait(_left(process, deadline))
    return bytes(output), bytes(errors)


def _left(process: subprocess.Popen[bytes], deadline: float) -> float:
    """Return the seconds until the deadline. Raises TimeoutExpired after it."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise subprocess.TimeoutExpired(process.args, left)
    return left


def run_in_terminal(argv: Sequence[str]) -> tuple[int, str]:
    """Run ssh with this terminal; return its exit code and what it wrote to stderr, which is also shown.

    ssh goes on in the background with the same stderr, so the end of the command counts, not the end of its output.
    """
    try:
        process = subprocess.Popen(argv, stderr=subprocess.PIPE)
    except FileNotFoundError:
        raise no_ssh() from None
    assert process.stderr is not None
    descriptor, seen = process.stderr.fileno(), bytearray()

    def copy() -> None:
        while part := os.read(descriptor, 65536):
            seen.extend(part)
            sys.stderr.write(part.decode(errors="replace"))
            sys.stderr.flush()

    reader = threading.Thread(target=copy, daemon=True)
    reader.start()
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise
    reader.join(0.3)
    return code, as_text(bytes(seen))


def no_ssh() -> EnvironmentProblem:
    return EnvironmentProblem("There is no `ssh` command here.", hint="Install OpenSSH's client.")


def as_text(content: bytes) -> str:
    return content.decode(errors="replace")


# -- messages ----------------------------------------------------------------------------------------------------

# Part of a message of ssh, what it means, and what to do. `{host}` and `{name}` are the cluster's.
_MEANINGS = (
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "The host key of {host} has changed, so ssh does not connect.",
        "Ask its administrators whether the key is new. If so: ssh-keygen -R {host}; then: paceline login {name}",
    ),
    (
        "you have requested strict checking",
        "ssh does not know the host key of {host}, and StrictHostKeyChecking keeps it from asking you.",
        "Get the key's fingerprint from the site. Then run this once and compare the fingerprint that it shows:"
        " ssh -o StrictHostKeyChecking=ask {host}",
    ),
    (
        "Host key verification failed",
        "ssh does not know the host key of {host}.",
        "Get the key's fingerprint from the site, compare it with what ssh shows, and accept it, once: ssh {host}",
    ),
    (
        "Could not resolve hostname",
        "The host name {host} cannot be resolved.",
        "Check `host` of the cluster {name}, your network and your VPN.",
    ),
    (
        "Connection refused",
        "{host} refuses connections.",
        "Check the host name and the port; the host may be down.",
    ),
    (
        "timed out",
        "{host} is not responding.",
        "Check your network and your VPN; the login node may be down. Then: paceline login {name}",
    ),
    ("No route to host", "There is no route to {host}.", "Check your network and your VPN."),
    (
        "Network is unreachable",
        "The network of {host} is unreachable.",
        "Check your network and your VPN.",
    ),
    (
        "Too many authentication failures",
        "{host} refused your keys.",
        "Set IdentityFile in ~/.ssh/config.",
    ),
    (
        "Permission denied",
        "{host} did not accept your login.",
        "Try `ssh {host}`: the same keys and codes work here.",
    ),
    ("Connection closed by", "{host} closed the connection.", "Try `ssh {host}` to see why."),
    (
        "kex_exchange_identification",
        "{host} closed the connection.",
        "Try again in a minute, or `ssh {host}`.",
    ),
    (
        "too long for Unix domain socket",
        "The ControlPath of {host} in ssh's configuration is too long for a socket.",
        "Use a short one in ~/.ssh/config, such as ControlPath ~/.ssh/%C",
    ),
    (
        "ControlPath too long",
        "The ControlPath of {host} in ssh's configuration is too long for a socket.",
        "Use a short one in ~/.ssh/config, such as ControlPath ~/.ssh/%C",
    ),
    (
        "Bad configuration option",
        "ssh cannot read its configuration.",
        "Fix ~/.ssh/config; `ssh -G {host}` shows what is wrong.",
    ),
)


def explain(stderr: str, *, name: str, host: str) -> ConnectionProblem:
    """Return the error that ssh's messages stand for."""
    for part, message, hint in _MEANINGS:
        if part in stderr:
            return ConnectionProblem(
                message.format(host=host, name=name), hint=hint.format(host=host, name=name)
            )
    lines = [
        line.strip()
        for line in re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "", stderr).splitlines()
        if line.strip()
    ]
    said = f": {lines[-1].rstrip('.')}" if lines else ""
    hint = f"Try `ssh {host}`, then: paceline login {name}"
    return ConnectionProblem(f"ssh cannot connect to {host}{said}.", hint=hint)
