"""How far a copy is, on the console."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from paceline.agent.staging.copy.transfer import Transfer
from paceline.agent.staging.folders import format_size

WIDTH = 24  # characters of the bar
SAY_EVERY = 10.0  # seconds between lines in a log; a terminal is told at once


class Progress:
    """How far it is: in place on a terminal, now and then in a log."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._is_terminal = sys.stderr.isatty()
        self._began = self._said = time.monotonic()
        self._shown = False

    def show(self, what: str, copying: Transfer) -> None:
        now = time.monotonic()
        if now - self._said < (0.5 if self._is_terminal else SAY_EVERY):
            return
        self._said = now
        rate = copying.done / max(now - self._began, 1e-3)
        left = (copying.total - copying.done) / rate if rate else 0.0
        share = min(1.0, copying.done / copying.total)
        text = f"{share:.0%} of {format_size(copying.total)}, {format_size(rate)}/s, {left:.0f} s left"
        if self._is_terminal:
            self._shown = True
            with suppress(OSError):
                line = f"paceline: {what} {bar(share)} {text}"
                print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
        else:
            self._say(f"{what}: {text}")

    def clear(self) -> None:
        if self._shown:
            with suppress(OSError):
                print("\r\033[K", end="", file=sys.stderr, flush=True)


@contextmanager
def shown(what: str, copying: Transfer, *, say: Callable[[str], None]) -> Iterator[None]:
    """Show how far some copying is, as long as it goes on inside."""
    line, over = Progress(say), threading.Event()

    def watch() -> None:
        while not over.wait(0.1):
            if copying.total:
                line.show(what, copying)

    watcher = threading.Thread(target=watch, daemon=True, name="progress")
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        line.clear()


def bar(share: float) -> str:
    full = int(share * WIDTH)
    return "#" * full + "." * (WIDTH - full)
