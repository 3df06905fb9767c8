"""The process that wandb starts beside a rank: ended when it hangs, so that the rank can leave.

wandb's own exit hook waits for its service without a limit.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from paceline.runtime.trackers.base import warn

NAME = "wandb-core"


def service_pids() -> list[int]:
    """The services that this process has started; none where there is no /proc."""
    found = []
    try:
        entries = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []
    for pid in entries:
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                text = file.read()
        except OSError:
            continue
        name, _, rest = text.partition("(")[2].rpartition(")")
        state, parent = rest.split()[:2]
        if name.startswith(NAME) and parent == str(os.getpid()) and state != "Z":
            found.append(pid)
    return found


def end_service() -> None:
    """Its connection breaks, and whoever waits for it goes on with an error."""
    for pid in service_pids():
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            continue


def forget_service(wandb: Any, *, broken: bool = False) -> None:
    """After the last run: let go of the service, now and not in an exit hook that may hang or complain."""
    if broken or getattr(wandb, "run", None) is None:
        try:
            wandb.teardown()
        except (Exception, SystemExit):
            pass  # it was gone already; wandb then calls sys.exit with the code of its service


_leaving = threading.Event()
_is_guarded = False


def guard_the_exit(seconds: float) -> None:
    """wandb's exit hook finishes what the script did not; after so long its service is ended, and the hook goes on."""
    global _is_guarded
    if _is_guarded:
        return
    _is_guarded = True

    def watch() -> None:  # begun now: at exit no thread can be started
        _leaving.wait()
        time.sleep(seconds)
        warn(f"W&B did not finish within {seconds:.0f} s: it is left behind")
        end_service()

    threading.Thread(target=watch, name="paceline-wandb-exit", daemon=True).start()
    atexit.register(_leaving.set)


def within(seconds: float, what: Callable[[], object]) -> bool:
    """Do it in a thread, with a limit: whether it came to its end. What it raises is raised here."""
    failed: list[BaseException] = []

    def work() -> None:
        try:
            what()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work, name="paceline-wandb-finish", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        return False
    if failed:
        raise failed[0]
    return True
