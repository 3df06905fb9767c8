"""Paceline on the login node, started through the connection: take a request, or carry one out.

Nothing here outlives the connection: a command whose reader is gone is interrupted, then ended.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import select
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from paceline.errors import PacelineError

GRACE = 5.0  # seconds between an interrupt and the end of a command that nobody reads any more
EXPIRY = 3600.0  # seconds after which a request that nobody took is removed
REQUEST = "request-"


def main() -> int | None:
    """Return an exit code, or None if this process is to go on as the command of the request."""
    cache = Path(__file__).resolve().parents[5]  # <cache>/<version>/paceline/cluster/ssh/remote
    if sys.argv[1] == "receive":
        return receive(cache)
    take_over(cache / sys.argv[2], terminal=sys.argv[3] == "terminal")
    return None


# -- taking a request ------------------------------------------------------------------------------------------


def receive(cache: Path) -> int:
    """Read a request, then the contents that are missing here; answer with the name under which it waits."""
    try:
        print(json.dumps({"request": _receive(cache)}), flush=True)
    except PacelineError as problem:
        print(json.dumps({"error": problem.message, "hint": problem.hint}), flush=True)
    except OSError as problem:
        where = f": {problem.filename}" if problem.filename else ""
        print(json.dumps({"error": f"{problem.strerror or problem}{where}", "hint": ""}), flush=True)
    except (ValueError, KeyError, TypeError, EOFError):  # also what tarfile raises for a stream that was cut
        print(json.dumps({"error": "The request did not arrive complete.", "hint": "Try again."}), flush=True)
    return 0


def _receive(cache: Path) -> str:
    from paceline.cluster.ssh.remote.code_store import CodeStore
    from paceline.cluster.ssh.request import Accepted, Request

    os.umask(0o077)
    _remove_old(cache)
    request = Request.from_json(sys.stdin.buffer.readline().decode("utf-8"))
    store = CodeStore(cache)
    project = store.find(request.code)
    if project is None:
        missing = store.missing(request.code)
        print(json.dumps({"missing": missing}), flush=True)
        if missing:
            store.receive(sys.stdin.buffer, missing)
        project = store.build(request.code)
    os.utime(project.parent)
    cwd = project / request.folder
    cwd.mkdir(parents=True, exist_ok=True)
    accepted = Accepted(request.args, str(cwd), request.variables, request.secrets, request.secret_sources)
    name = f"{REQUEST}{secrets.token_hex(12)}"
    descriptor = os.open(cache / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(accepted.to_json())
    return name


def _remove_old(cache: Path) -> None:
    """Remove what interrupted commands have left behind."""
    for path in (*cache.glob(f"{REQUEST}*"), *(cache / "code").glob(".partial-*")):
        with suppress(OSError):
            if time.time() - path.lstat().st_mtime > EXPIRY:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


# -- carrying it out -------------------------------------------------------------------------------------------


def take_over(path: Path, *, terminal: bool) -> None:
    """Make this process what it would be if the command of a request had been typed here."""
    from paceline.cluster.secrets import received
    from paceline.cluster.ssh.request import Accepted

    if not re.fullmatch(rf"{REQUEST}[0-9a-f]+", path.name):
        sys.exit(f"paceline: error: {path} is no request.")
    request = Accepted.from_json(path.read_text(encoding="utf-8"))
    path.unlink()
    os.chdir(request.cwd)
    os.environ.update(request.variables)
    os.environ["PWD"] = request.cwd
    received.keep(request.secrets, request.secret_sources)
    if not terminal:  # the end of a terminal is a signal already
        with suppress(OSError):
            os.setpgid(0, 0)
        threading.Thread(target=_watch, daemon=True).start()
    sys.argv = ["paceline", *request.args]


def _watch() -> None:
    """Wait until nobody reads our output any more, then end this command and all that it has started."""
    waiter = select.poll()
    for descriptor in (1, 2):
        waiter.register(descriptor, 0)  # errors and hang-ups are reported anyway
    while not any(events & (select.POLLERR | select.POLLHUP) for _, events in waiter.poll()):
        pass
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        os.killpg(0, number)
        time.sleep(GRACE)
