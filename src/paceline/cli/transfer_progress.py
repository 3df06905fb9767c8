"""How far a transfer is: a bar in a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from paceline.cli import console

if TYPE_CHECKING:
    from rich.progress import TaskID


class TransferProgress:
    """Draws a bar on stderr, with the name of the file that is on its way."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: TaskID | None = None

    def __enter__(self) -> TransferProgress:
        if sys.stderr.isatty():
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
            )
            from rich.progress import TransferSpeedColumn as Speed
            from rich.table import Column

            name = TextColumn(
                "{task.description}",
                table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1),
            )
            columns = (
                BarColumn(bar_width=20),
                DownloadColumn(),
                Speed(),
                TimeRemainingColumn(),
                name,
            )
            self._bar = Progress(
                *columns, console=console.console(stderr=True), expand=True, transient=True
            )
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, total: int) -> None:
        if self._bar is not None and self._task is None:
            self._task = self._bar.add_task("", total=total)
        elif self._bar is not None and self._task is not None:
            self._bar.reset(self._task, total=total)

    def advance(self, size: int, name: str) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, advance=size, description=console.cell(name))
