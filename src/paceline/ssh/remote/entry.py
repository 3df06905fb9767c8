"""Paceline on the login node, started through the connection: receive a request, or carry one out.

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
from typing import TYPE_CHECKING

from paceline.contract.env import ON_CLUSTER, SENT_FOLDER
from paceline.contract.files.sent_code import KEPT
from paceline.contract.quote import quote
from paceline.contract.verdict import INTERRUPTED_EXIT
from paceline.errors import PacelineError
from paceline.ssh.remote.cache_cleanup import SUBMISSIONS, clean_cache, is_damaged, note_use
from paceline.ssh.remote.unpack import COMPLETE
from paceline.ssh.request import (
    ABSENT,
    ENDED,
    OUTCOME,
    REQUEST,
    SSH_FAILED,
    UNSETTLED,
    Accepted,
    Request,
    end_mark,
)

if TYPE_CHECKING:
    from paceline.launch.confirmation.submission import RunOutcome
    from paceline.launch.confirmation.sweep_outcome import SweepOutcome

GRACE = 5.0  # seconds between an interrupt and the end of a command that nobody reads any more
EXPIRY = 3600.0  # seconds after which what a command has left behind is removed
REQUEST_EXPIRY = 300.0  # the same for a request, which is taken within seconds
# the same for files for the laptop, which a command may write and send for hours
OUTPUT_EXPIRY = 86_400.0
OUTPUT = "output-"  # folders of files that a command writes for the laptop
EARLIER = "when you typed this command earlier; not submitted again"
# the request that this process carries out, and whether its end is noted
_taken: list[tuple[Path, bool]] = []


def main() -> int | None:
    """Return an exit code, or None if this process is to go on as the command of the request."""
    installation = Path(__file__).resolve().parents[4]  # <cache>/<version>/paceline/ssh/remote
    cache = installation.parent
    if sys.argv[1] == "receive":
        return receive(cache, installation)
    note_use(installation)
    threading.Thread(target=clean_cache, args=(cache, installation), daemon=True).start()
    return take_over(cache / sys.argv[2], terminal=sys.argv[3] == "terminal")


# -- taking a request ------------------------------------------------------------------------------------------


def receive(cache: Path, installation: Path | None = None) -> int:
    """Read a request, then the contents that are missing here; answer with the name under which it waits.

    If files of this installation are missing, it says nothing: the laptop installs it again, and repeats the request.
    """
    try:
        request = Request.from_json(sys.stdin.buffer.readline().decode("utf-8"))
        starts_job = bool(request.submission) or request.args[:1] == ["shell"]
        if installation is not None and is_damaged(installation, thorough=starts_job):
            (installation / COMPLETE).unlink(missing_ok=True)
            return ABSENT
        name = _receive(cache, request)
        try:
            print(json.dumps({"request": name}), flush=True)
        except BrokenPipeError:  # nobody will take it
            (cache / name).unlink(missing_ok=True)
            os._exit(1)
    except PacelineError as problem:
        print(json.dumps({"error": problem.message, "hint": problem.hint}), flush=True)
    except OSError as problem:
        where = f": {problem.filename}" if problem.filename else ""
        print(
            json.dumps({"error": f"{problem.strerror or problem}{where}", "hint": ""}), flush=True
        )
    # also what tarfile raises for a stream that was cut
    except (ValueError, KeyError, TypeError, EOFError):
        print(
            json.dumps({"error": "The request arrived incomplete.", "hint": "Try again."}),
            flush=True,
        )
    return 0


def _receive(cache: Path, request: Request) -> str:
    from paceline.ssh.remote.code_store import CodeStore

    os.umask(0o077)
    _remove_old(cache)
    store = CodeStore(cache)
    project = None if request.own_folder else store.find(request.code)
    if project is None:
        missing = store.missing(request.code)
        print(json.dumps({"missing": missing}), flush=True)
        if missing:
            store.receive(sys.stdin.buffer, missing)
        project = store.build(request.code, own=request.own_folder)
    os.utime(project.parent)
    cwd = project / request.folder
    cwd.mkdir(parents=True, exist_ok=True)
    variables = {**request.variables, SENT_FOLDER: str(project)}
    accepted = Accepted(
        request.args,
        str(cwd),
        variables,
        request.secrets,
        request.secret_sources,
        request.submission,
        request.code.digest,
    )
    name = f"{REQUEST}{secrets.token_hex(12)}"
    descriptor = os.open(cache / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(accepted.to_json())
    return name


def _remove_old(cache: Path) -> None:
    """Remove what interrupted commands have left behind."""
    patterns = (f"{REQUEST}*", f"{ENDED}*", f"{OUTPUT}*", "code/.partial-*")
    for path in [path for pattern in patterns for path in cache.glob(pattern)]:
        with suppress(OSError):
            limit = REQUEST_EXPIRY if path.name.startswith((REQUEST, ENDED)) else EXPIRY
            limit = OUTPUT_EXPIRY if path.name.startswith(OUTPUT) else limit
            if time.time() - _last_change(path) > limit and not (path / KEPT).exists():
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _last_change(path: Path) -> float:
    """Return when a path, or what is directly in it, has changed: the growth of a file does not change its folder."""
    inside = list(os.scandir(path)) if path.is_dir() and not path.is_symlink() else []
    return max(
        path.lstat().st_mtime, *(each.stat(follow_symlinks=False).st_mtime for each in inside), 0.0
    )


# -- carrying it out -------------------------------------------------------------------------------------------


def take_over(path: Path, *, terminal: bool) -> int | None:
    """Make this process what it would be if the command of a request had been typed here.

    Return an exit code if the command has done its work already: a submission whose answer was lost.
    """
    from paceline.launch.secrets.declared import keep_received

    if not re.fullmatch(rf"{REQUEST}[0-9a-f]+", path.name):
        sys.exit(f"paceline: error: {path} is not a request.")
    text = path.read_text(encoding="utf-8")
    path.unlink()  # at once: there may be secrets in it
    request = Accepted.from_json(text)
    os.chdir(request.cwd)
    os.environ.update(request.variables)
    os.environ["PWD"] = request.cwd
    keep_received(request.secrets, request.secret_sources)
    if not terminal:  # the end of a terminal is a signal already
        with suppress(OSError):
            os.setpgid(0, 0)
        threading.Thread(target=_watch, daemon=True).start()
    sys.argv = ["paceline", *request.args]
    _taken[:] = [(path, request.args[0] == "submit" or bool(request.submission))]
    if not request.submission:
        return None
    is_question = tuple(request.args) == OUTCOME
    return _answer_again(
        path.parent / SUBMISSIONS, request.submission, is_question=is_question, code=request.code
    )


def _answer_again(folder: Path, identity: str, *, is_question: bool, code: str = "") -> int | None:
    """Report what this very submission has led to earlier. None if that is nothing: it is yet to be carried out."""
    from paceline.launch.confirmation import submission as submissions
    from paceline.launch.confirmation.submission import RunOutcome

    if not re.fullmatch(r"[0-9a-f]+", identity):
        sys.exit(f"paceline: error: {identity!r} is not a submission.")
    path = folder / identity
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = (
            submissions.settle_submission(path)
            if is_question
            else submissions.begin_submission(path, code=code)
        )
        earlier = submissions.read_code(path.read_bytes())
    except PacelineError as problem:
        _say_error(problem.message, problem.hint)
        return UNSETTLED
    except OSError as problem:
        _say_error(
            f"Cannot use {path}: {problem.strerror or problem}.",
            "Make room there, then repeat the command.",
        )
        return UNSETTLED
    if is_question:
        run = (
            {"run": found.folder.key, "job": found.job}
            if isinstance(found, RunOutcome)
            else {"run": None}
        )
        print(json.dumps(run), flush=True)
        return 0
    if found is None:
        return None
    if earlier and earlier != code:
        _report_other_code(found)
        note_end(1)
        return 1
    _report_run(found) if isinstance(found, RunOutcome) else _report_sweep(found)
    return 0


def _say_error(message: str, hint: str) -> None:
    print(f"paceline: error: {message}\n  {hint}", file=sys.stderr, flush=True)


def _report_other_code(found: RunOutcome | SweepOutcome) -> None:
    """Say that what was submitted earlier does not have the code as it is now: it is not what was asked for."""
    from paceline.launch.confirmation.submission import RunOutcome

    on = os.environ.get(ON_CLUSTER, "")
    if isinstance(found, RunOutcome):
        name = found.folder.path.name
        what, cancel, again = f"{name} was submitted as job {found.job}", "cancel", "the command"
    else:
        name = quote(found.sweep.name)
        what, cancel, again = (
            f"The sweep {name} was submitted",
            "sweep cancel",
            "the command with another --name",
        )
    _say_error(
        f"{what} when you typed this command earlier, and your code has changed since. Nothing was submitted now.",
        f"To use your code as it is now: paceline {cancel} {name} --on {on}; then repeat {again}.",
    )


def _report_run(found: RunOutcome) -> None:
    name, on = found.folder.path.name, os.environ.get(ON_CLUSTER, "")
    print(f"submitted {name} as job {found.job}, {EARLIER}")
    print(f"  folder  {found.folder.path}")
    print(f"  logs    paceline logs -f {name} --on {on}")
    print("To submit one more job, repeat the command.", flush=True)


def _report_sweep(found: SweepOutcome) -> None:
    name, on = quote(found.sweep.name), os.environ.get(ON_CLUSTER, "")
    trials, jobs = (
        f"{found.trials} trial{'s' * (found.trials != 1)}",
        f"job{'s' * (len(found.jobs) > 1)}",
    )
    print(f"submitted {trials} of {name} as {jobs} {', '.join(found.jobs)}, {EARLIER}")
    print(f"  folder  {found.sweep.path}")
    print(f"  state   paceline sweep show {name} --on {on}")
    if found.missing:
        print(f"The other {found.missing} of its trials are not submitted. Submit them:")
        print(f"  paceline sweep --resubmit missing {name} --on {on}")
    sys.stdout.flush()


def note_end(code: object) -> None:
    """Note that the command has ended by itself, if its exit code leaves that open. All its output is written then.

    After Ctrl-C, `submit` has an answer only if its job is known; `sweep` has cancelled what it had submitted.
    """
    if not _taken or code in (None, 0):
        return
    path, is_noted = _taken[0]
    if is_noted and code == INTERRUPTED_EXIT and sys.argv[1:2] == ["submit"]:
        from paceline.launch.confirmation.submission import is_unanswered

        if is_unanswered():
            return
    if is_noted or code == SSH_FAILED:
        with suppress(OSError, ValueError):
            for stream in filter(None, (sys.stdout, sys.stderr)):
                stream.flush()
            path.with_name(end_mark(path.name)).touch(mode=0o600)


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
