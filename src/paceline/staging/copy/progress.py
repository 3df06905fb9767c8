"""Show the progress of a transfer on the console."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from paceline.staging.copy.transfer import Transfer
from paceline.staging.folders import format_size

WIDTH = 24  # characters of the bar
LOG_INTERVAL = 10.0  # seconds between lines in a log
TERMINAL_INTERVAL = 0.5


class Progress:
    """A progress bar on a terminal; a line now and then in a log."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._is_terminal = sys.stderr.isatty()
        self._started = self._updated = time.monotonic()
        self._shown = False

    def show(self, title: str, transfer: Transfer) -> None:
        now = time.monotonic()
        if now - self._updated < (TERMINAL_INTERVAL if self._is_terminal else LOG_INTERVAL):
            return
        self._updated = now
        rate = transfer.done / max(now - self._started, 1e-3)
        remaining = (transfer.total - transfer.done) / rate if rate else 0.0
        share = min(1.0, transfer.done / transfer.total)
        text = (
            f"{share:.0%} of {format_size(transfer.total)}, {format_size(rate)}/s, "
            f"{remaining:.0f} s left"
        )
        if self._is_terminal:
            self._shown = True
            with suppress(OSError):
                line = f"paceline: {title} {bar(share)} {text}"
                print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
        else:
            self._say(f"{title}: {text}")

    def clear(self) -> None:
        if self._shown:
            with suppress(OSError):
                print("\r\033[K", end="", file=sys.stderr, flush=True)


@contextmanager
def show_progress(title: str, transfer: Transfer, *, say: Callable[[str], None]) -> Iterator[None]:
    """Show the progress of a transfer while the body runs."""
    progress, finished = Progress(say), threading.Event()

    def watch() -> None:
        while not finished.wait(0.1):
            if transfer.total:
                progress.show(title, transfer)

    watcher = threading.Thread(target=watch, daemon=True, name="progress")
    watcher.start()
    try:
        yield
    finally:
        finished.set()
        watcher.join()
        progress.clear()


def bar(share: float) -> str:
    full = int(share * WIDTH)
    return "#" * full + "." * (WIDTH - full)
