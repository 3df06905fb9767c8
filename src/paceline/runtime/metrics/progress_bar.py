"""A progress bar on rank 0's terminal. Without a terminal, nothing is shown."""

from __future__ import annotations

import sys
import time
from typing import Any

REFRESH = 0.15  # seconds between redraws


MIN_WAIT = 0.05  # share of the time that the loop waits for data; less is not worth a word
UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def describe_rates(rates: dict[str, float]) -> list[str]:
    """Return how fast a run trains, in a few words."""
    parts = [
        f"{short_number(rates[f'{what}_per_second'])} {what}/s"
        for what in ("samples", "tokens")
        if f"{what}_per_second" in rates
    ]
    if "mfu" in rates:
        parts.append(f"{rates['mfu']:.1%} MFU")
    if rates.get("data_wait", 0.0) >= MIN_WAIT:
        parts.append(f"{rates['data_wait']:.0%} waiting for data")
    return parts


def short_number(number: float) -> str:
    """Return a number with three digits, such as 12.3k."""
    size, unit = next((each for each in UNITS if number >= each[0]), UNITS[-1])
    return f"{number / size:.3g}{unit}"


class ProgressBar:
    """Drawn by rich if it is installed. A call between redraws costs one comparison."""

    def __init__(self, on: bool) -> None:
        self.due = float("inf")  # when to call `update`; never while no loop is shown
        self._bar: Any = self._make() if on and sys.stderr.isatty() else None
        self._task: Any = None

    @property
    def is_shown(self) -> bool:
        return self._bar is not None

    def begin(self, *, epoch: int, done: int, total: int | None) -> None:
        """Show a loop of `total` steps, of which `done` are done."""
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(
                f"epoch {epoch}", total=total, completed=done, values=""
            )
            self._draw()

    def _make(self) -> Any:
        try:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
            )
        except ImportError:
            return None
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[values]}"),
            console=Console(stderr=True),
            auto_refresh=False,
            transient=True,
        )

    def update(self, done: int, values: dict[str, float], rates: dict[str, float]) -> None:
        """Redraw. Called once `due` has passed."""
        text = "  ".join(
            [*(f"{name} {value:.4g}" for name, value in values.items()), *describe_rates(rates)]
        )
        self._bar.update(self._task, completed=done, values=text)
        self._draw()

    def _draw(self) -> None:
        self._bar.refresh()
        self.due = time.perf_counter() + REFRESH

    def end(self) -> None:
        """Remove the line of the loop that has ended."""
        self.due = float("inf")
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._bar.refresh()  # otherwise the old line would reappear with the next printed one
            self._task = None

    def close(self) -> None:
        if self._bar is not None:
            self.end()
            self._bar.stop()
            self._bar = None
