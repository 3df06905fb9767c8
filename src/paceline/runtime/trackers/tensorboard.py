"""TensorBoard event files in the run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.runtime.trackers.base import RunInfo


class TensorboardTracker:
    """Writes numbers as scalars and text as text. After a resume, repeated steps replace the
    earlier ones.
    """

    def __init__(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._make: Any = SummaryWriter
        self._writer: Any = None
        self._folder = Path("tensorboard")
        self._resumed = False

    def start(self, run: RunInfo) -> None:
        if run.trackers_folder is not None:
            self._folder = run.trackers_folder / "tensorboard"
        self._resumed = self._folder.is_dir() and any(self._folder.iterdir())

    def log(self, step: int, values: dict[str, float | str]) -> None:
        if self._writer is None:
            self._writer = self._make(
                log_dir=str(self._folder), purge_step=step if self._resumed else None, flush_secs=30
            )
        when = values.pop("time", None)
        for name, value in values.items():
            if isinstance(value, str):
                self._writer.add_text(name, value, step, walltime=when)
            else:
                self._writer.add_scalar(name, value, step, walltime=when)

    def finish(self, status: str) -> None:
        if self._writer is not None:
            self._writer.close()
