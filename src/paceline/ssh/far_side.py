"""What a command on a login node does first if it came from another machine."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from paceline.contract import env
from paceline.launch.secrets import keep_received

GRACE = 5.0  # seconds between an interrupt and the end of a command that nobody reads any more


def begin() -> None:
    """Take arguments and secrets, and end once nobody reads the output. The end of a terminal is a signal."""
    os.environ["PWD"] = os.getcwd()
    if name := os.environ.pop(env.RECEIVED, ""):
        path = Path(name)
        values, sources, args = json.loads(path.read_text(encoding="utf-8"))
        path.unlink()
        sys.argv[1:] = args
        keep_received(values, sources)
    if sys.stdout is not None and not sys.stdout.isatty():
        with suppress(OSError):  # it leads its group already
            os.setpgid(0, 0)
        threading.Thread(target=_watch, daemon=True).start()


def _watch() -> None:
    """Wait until nobody reads our output any more, then end this command and all it has started."""
    waiter = select.poll()
    waiter.register(1, 0)  # errors and hang-ups are reported anyway
    while not any(events & (select.POLLERR | select.POLLHUP) for _, events in waiter.poll()):
        pass
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        os.killpg(0, number)
        time.sleep(GRACE)
