"""metrics.jsonl: rank 0 writes it, and trackers get the same lines."""

from __future__ import annotations

from pathlib import Path

from paceline.contract.jsonl import LineWriter
from paceline.runtime.trackers.thread import TrackerThread


class ForwardedMetrics(LineWriter):
    """metrics.jsonl, whose lines also go to trackers."""

    def __init__(self, path: Path | None, threads: list[TrackerThread]) -> None:
        super().__init__(path)
        self._threads = threads

    def append(self, text: str) -> bool:
        written = super().append(text)
        if text:
            for thread in self._threads:
                thread.append(text)
        return written
