"""A progress bar on rank 0's terminal. Without a terminal, nothing is shown."""

from __future__ import annotations

import sys
import time
from typing import Any

REFRESH = 0.15  # seconds between redraws


class ProgressBar:
    """Drawn by rich if it is installed. A call between redraws costs one comparison."""

    def __init__(self, on: bool) -> None:
        self.due = float("inf")
        self._bar: Any = None
        self._task: Any = None
        self._on = on and sys.stderr.isatty()

    @property
    def is_shown(self) -> bool:
        return self._bar is not None

    def begin(self, *, epoch: int, done: int, total: int | None) -> None:
        """Show a loop of `total` steps, of which `done` are done."""
        if not self._on:
            return
        if self._bar is None:
            self._bar = self._make()
            if self._bar is None:
                self._on = False
                return
        self._task = self._bar.add_task(f"epoch {epoch}", total=total, completed=done, values="")
        self._draw()

    def _make(self) -> Any:
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        except ImportError:
            return None
        bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[values]}"),
            console=Console(stderr=True), auto_refresh=False, transient=True,
        )  # fmt: skip
        bar.start()
        return bar

    def update(self, done: int, values: dict[str, float]) -> None:
        """Redraw. Called once `due` has passed."""
        if self._bar is not None and self._task is not None:
            text = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
            self._bar.update(self._task, completed=done, values=text)
            self._draw()

    def _draw(self) -> None:
        self._bar.refresh()
        self.due = time.perf_counter() + REFRESH

    def end(self) -> None:
        """Remove the line of the loop that has ended."""
        self.due = float("inf")
        if self._bar is not None and self._task is not None:
            self._bar.remove_task(self._task)
            self._bar.refresh()  # otherwise the old line would reappear with the next printed one
            self._task = None

    def close(self) -> None:
        if self._bar is not None:
            self.end()
            self._bar.stop()
            self._bar = None
