"""The progress of runs while `paceline wait` waits: bars in a terminal, a line for each change elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from paceline.cli import console

if TYPE_CHECKING:
    from rich.progress import TaskID

    from paceline.cli.views.wait_targets import Progress, Target


class ProgressLines:
    """Prints the status of each run when it changes."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = targets
        self._said: dict[int, str] = {}

    def __enter__(self) -> ProgressLines:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return

    def update(self) -> None:
        for number, target in enumerate(self._targets):
            progress = target.progress
            note = f" ({progress.note})" if progress.note and progress.status != "running" else ""
            text = console.printable(f"{target.name}: {progress.status}{note}")
            if self._said.get(number) != text:
                self._said[number] = text
                print(text, flush=True)


class ProgressBars(ProgressLines):
    """Draws a bar for each run on stderr, and prints how each has ended."""

    def __init__(self, targets: Sequence[Target]) -> None:
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        super().__init__(targets)
        # The name and the bar stay; the rest is cut off where the terminal is narrow.
        self._bars = Progress(
            TextColumn(
                "{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis")
            ),
            BarColumn(bar_width=20),
            TextColumn(
                "{task.fields[text]}",
                table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1),
            ),
            console=console.console(stderr=True),
            expand=True,
        )
        self._tasks: list[TaskID] = [
            self._bars.add_task(console.cell(each.name), text="") for each in targets
        ]

    def __enter__(self) -> ProgressBars:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def update(self) -> None:
        for task, target in zip(self._tasks, self._targets, strict=True):
            progress = target.progress
            total = progress.total
            if target.is_over and total is None:
                total = progress.done or 1  # a bar that stands still
            done = progress.done if progress.done or not target.is_over else total
            self._bars.update(
                task, completed=done or 0, total=total, text=console.cell(_describe(progress))
            )


def _describe(progress: Progress) -> str:
    """Return the status, the steps and the time left in one line."""
    steps = f"{progress.done:,} of {progress.total:,} {progress.unit}" if progress.total else ""
    if not steps and progress.done:
        steps = f"step {progress.done:,}"
    return ", ".join(part for part in (progress.status, steps, progress.note) if part)
