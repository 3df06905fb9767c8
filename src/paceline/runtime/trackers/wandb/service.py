"""The service process that wandb starts next to a rank. We kill it if it hangs, so that the rank
can exit.

wandb's own exit hook waits for its service without a time limit.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from paceline.runtime.console import note

NAME = "wandb-core"


def service_pids() -> list[int]:
    """Return the services that this process started; none without /proc."""
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


def kill_service() -> None:
    """Kill the service: its connection breaks, and whoever waits for it gets an error."""
    for pid in service_pids():
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            continue


def forget_service(wandb: Any, *, broken: bool = False) -> None:
    """Release the service after the last run, rather than in an exit hook that may hang or fail."""
    if broken or getattr(wandb, "run", None) is None:
        try:
            wandb.teardown()
        except (Exception, SystemExit):
            pass  # it was already gone; wandb then calls sys.exit with the service's exit code


_exiting = threading.Event()
_is_guarded = False


def limit_exit_hook(seconds: float) -> None:
    """Kill the service if wandb's exit hook, which finishes an open run, takes longer than this."""
    global _is_guarded
    if _is_guarded:
        return
    _is_guarded = True

    def watch() -> None:  # in a thread started now: at exit no thread can be started
        _exiting.wait()
        time.sleep(seconds)
        note(f"W&B did not finish within {seconds:.0f} s: giving up on it")
        kill_service()

    threading.Thread(target=watch, name="paceline-wandb-exit", daemon=True).start()
    atexit.register(_exiting.set)


def run_within(seconds: float, function: Callable[[], object]) -> bool:
    """Call a function in a thread and return whether it finished in time. Its exception is raised
    here.
    """
    failed: list[BaseException] = []

    def work() -> None:
        try:
            function()
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
