"""One run, kept for all pages that show it: its curves and its log, of which only what is new is
read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from threading import Lock
from typing import Any

from paceline.contract.run_folder import RunFolder
from paceline.watch.curves import Curve, Curves, MetricsReader
from paceline.watch.details import read_details
from paceline.watch.records import QueryStates, read_record
from paceline.watch.run_log import LogLine, RunLog
from paceline.watch.run_status import newest_verdict

MAX_BATCHES = 30  # kept for pages that lost their connection for a moment
MAX_LINES = 2000  # of a log, in one batch
FIRST_LINES = 500  # of the log, for a page that has none
SCAN = 1 << 30  # bytes at the end of the logs that a search reads: seconds of work at most


@dataclass(frozen=True)
class News:
    """What a run has written between two reads."""

    position: int
    curves: list[dict[str, Any]]
    lines: list[dict[str, Any]]
    whole: bool = False  # the curves and lines replace those that a page has


class RunReader:
    """Reads a run's files as they grow. `position` counts the reads that found something."""

    def __init__(self, folder: RunFolder, query: QueryStates) -> None:
        self.folder = folder
        self.position = 0
        self._query = query
        self._metrics = MetricsReader(folder.metrics)
        self._curves = Curves()
        self._log = RunLog(folder)
        self._batches: deque[News] = deque(maxlen=MAX_BATCHES)
        self._lock = Lock()

    def details(self) -> dict[str, Any]:
        return read_details(read_record(self.folder, self._query)).to_json()

    def curves(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Return the curves with these names, or all."""
        with self._lock:
            self._refresh()
            wanted = (
                self._curves.names
                if names is None
                else [name for name in names if name in self._curves.names]
            )
            return {
                "position": self.position,
                "curves": [asdict(self._curves.curve(name)) for name in wanted],
            }

    def log(
        self, count: int, *, rank: int | None, attempt: int | None, grep: str
    ) -> dict[str, Any]:
        """Return the last lines of the run's output, up to where `read_new` goes on from that
        position.
        """
        with self._lock:
            self._refresh()
            position, until = self.position, self._log.positions()
        lines = RunLog(self.folder).tail(
            count, rank=rank, attempt=attempt, grep=grep, until=until, scan=SCAN
        )
        return {"position": position, "lines": lines_to_json(lines)}

    def read_new(self, since: int) -> list[News]:
        """Return what is new after a position. At the beginning, or after a long absence, it is
        everything.

        So it is for a page that is ahead: another reader, which is gone, has told it what it knows.
        """
        with self._lock:
            self._refresh()
            if since == self.position:
                return []
            found = [each for each in self._batches if each.position > since]
            if since < 1 or not found or found[0].position > since + 1:
                lines = RunLog(self.folder).tail(FIRST_LINES, until=self._log.positions())
                return [
                    News(
                        self.position,
                        curves_to_json(self._curves.all()),
                        lines_to_json(lines),
                        whole=True,
                    )
                ]
            return found

    def _refresh(self) -> None:
        is_over = newest_verdict(self.folder) is not None  # then the last line may have no end
        if self.position == 0:
            self._curves.add(self._metrics.read_new())  # it may have a million lines
            self._log.tail(0, complete=True)  # from now on
            for _ in range(3):  # the begun line, at the end of a run
                self._log.read_new(finish=is_over)
            self.position = 1
            return
        records, lines = list(self._metrics.read_new()), self._log.read_new(finish=is_over)
        if records or lines:
            new = Curves()
            new.add(records)
            went_back = self._curves.add(records)
            self.position += 1
            # No page wants that many lines, and none may miss some without a sign, or keep points
            # that a restart has undone: all begin anew.
            if len(lines) > MAX_LINES or went_back:
                self._batches.clear()
            else:
                self._batches.append(
                    News(self.position, curves_to_json(new.all()), lines_to_json(lines))
                )


def curves_to_json(curves: Iterable[Curve]) -> list[dict[str, Any]]:
    return [asdict(curve) for curve in curves]


def lines_to_json(lines: Iterable[LogLine]) -> list[dict[str, Any]]:
    return [
        {"time": each.time, "rank": each.rank, "attempt": each.attempt, "text": each.text}
        for each in lines
    ]
