"""One live line on rank 0's terminal; nothing where there is no terminal."""

from __future__ import annotations

import sys
import time
from typing import Any

REFRESH = 0.15  # seconds between two drawings


class Progress:
    """Drawn by rich where it is installed. A call between drawings costs one comparison."""

    def __init__(self, on: bool) -> None:
        self.due = float("inf")
        self._bar: Any = None
        self._task: Any = None
        self._on = on and sys.stderr.isatty()

    @property
    def shown(self) -> bool:
        return self._bar is not None

    def begin(self, *, epoch: int, done: int, total: int | None) -> None:
        """A loop over `total` steps begins, `done` of them lie behind."""
        if not self._on:
            return
        if self._bar is None:
            self._bar = self._make()
            if self._bar is None:
                self._on = False
                return
        self._task = self._bar.add_task(f"epoch {epoch + 1}", total=total, completed=done, told="")
        self._draw()

    def _make(self) -> Any:
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        except ImportError:
            return None
        bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[told]}"),
            console=Console(stderr=True), auto_refresh=False, transient=True,
        )  # fmt: skip
        bar.start()
        return bar

    def update(self, done: int, values: dict[str, float]) -> None:
        """Called when `due` has come."""
        if self._bar is not None and self._task is not None:
            told = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
            self._bar.update(self._task, completed=done, told=told)
            self._draw()

    def _draw(self) -> None:
        self._bar.refresh()
        self.due = time.perf_counter() + REFRESH

    def end(self) -> None:
        """The loop is over: its line goes."""
        self.due = float("inf")
        if self._bar is not None and self._task is not None:
            self._bar.remove_task(self._task)
            self._bar.refresh()  # or its last drawing would come back with the next printed line
            self._task = None

    def close(self) -> None:
        if self._bar is not None:
            self.end()
            self._bar.stop()
            self._bar = None
