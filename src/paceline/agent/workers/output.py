"""Capture what the ranks print: write it to their logs, and to the console where you asked for it.

One thread reads all pipes, so that a blocked console cannot hold up supervision. If the console is
gone or the disk is full, the run continues: a warning appears once, and the output is read and
dropped.
"""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.contract.run_folder import format_mark, times_path

CHUNK = 1 << 16
TAIL = 8192  # bytes of a rank's output that are kept for a failure report
PER_RANK_LOGS = 128  # with more ranks than this there is one log per node
MAX_LINE = 1 << 16  # a longer "line" is passed on in pieces
MARKS_PER_SECOND = 1.0  # times that are written beside a log, on average
MARKS_AT_ONCE = 20.0


class Sink:
    """A file or console to write to until it fails; the failure is reported once."""

    def __init__(self, descriptor: int | None, name: str, warn: Callable[[str], None]) -> None:
        self.descriptor = descriptor
        self.name = name
        self._warn = warn

    @classmethod
    def file(cls, path: Path, warn: Callable[[str], None]) -> Sink:
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            return cls(os.open(path, flags, 0o644), str(path), warn)
        except OSError as error:
            warn(f"cannot write {path}: {error.strerror}; the run continues without this log")
            return cls(None, str(path), warn)

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view and self.descriptor is not None:
            try:
                view = view[os.write(self.descriptor, view) :]
            except BlockingIOError:  # another program made our console non-blocking
                time.sleep(0.01)
            except OSError as error:
                self._warn(
                    f"cannot write {self.name}: {error.strerror}; the run continues without it"
                )
                self.descriptor = None

    def close(self) -> None:
        if self.descriptor is not None and self.descriptor > 2:
            os.close(self.descriptor)
        self.descriptor = None


class TimedLog:
    """A log, and beside it a file that says when its output came (`log_times`)."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._log = Sink.file(path, warn)
        self._times = Sink.file(times_path(path), warn)
        self._size = 0 if self._log.descriptor is None else os.fstat(self._log.descriptor).st_size
        self._marks_left = MARKS_AT_ONCE
        self._last = time.time()

    def write(self, data: bytes) -> None:
        """Write the time of what comes next, too: exactly while there is little output, and once
        per second otherwise.
        """
        if not data:
            return
        now = max(self._last, time.time())
        self._marks_left = min(
            MARKS_AT_ONCE, self._marks_left + (now - self._last) * MARKS_PER_SECOND
        )
        self._last = now
        if self._marks_left >= 1 and self._log.descriptor is not None:
            self._marks_left -= 1
            self._times.write(format_mark(self._size, now))
        self._log.write(data)
        self._size += len(data)

    def close(self) -> None:
        self._log.close()
        self._times.close()


class LinePrefixer:
    """Splits a stream into whole lines with a prefix, for a log or console that several ranks
    share.
    """

    def __init__(self, prefix: str, write: Callable[[bytes], None]) -> None:
        self._prefix = prefix.encode()
        self._write = write
        self._rest = b""

    def write(self, data: bytes) -> None:
        """Take the next bytes of the stream; none at its end."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (not data or len(self._rest) > MAX_LINE):
            lines.append(self._rest)
            self._rest = b""
        if lines:
            self._write(b"".join(self._line(line) for line in lines))

    def _line(self, line: bytes) -> bytes:
        # Of a progress bar that redraws itself, only the last state.
        return self._prefix + line.rstrip(b"\r").rpartition(b"\r")[2] + b"\n"


@dataclass
class RankPipe:
    """One pipe of one rank, and the functions that take its bytes, and none at its end."""

    rank: int
    descriptor: int
    writers: list[Callable[[bytes], None]]


class OutputCapture:
    """All pipes of one attempt. `open` returns a rank's two ends; `close` waits for the last
    output.
    """

    def __init__(
        self,
        *,
        log_path: Callable[[int], Path],
        shared_log: Path | None,
        tee: str,
        warn: Callable[[str], None],
    ) -> None:
        self._log_path = log_path
        self._tee = tee
        self._warn = _once_per_reason(warn)
        self._shared = TimedLog(shared_log, self._warn) if shared_log else None
        self._logs: dict[int, TimedLog] = {}
        self._tails: dict[int, bytearray] = {}
        self._counts: dict[int, int] = {}  # bytes of output so far, by rank
        self._selector = selectors.DefaultSelector()
        # descriptor -> rank; the other thread can copy it safely, unlike the selector's map
        self._open: dict[int, int] = {}
        self._console = {
            number: Sink(number, f"the console ({number})", self._warn) for number in (1, 2)
        }
        self._line_is_open = False  # what ranks have printed there last has no line break
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)

    def open(self, rank: int, *, shown: bool | None = None) -> tuple[int, int]:
        """Open pipes for a rank's stdout and stderr. The caller passes the returned ends on, then
        closes them.
        """
        shown = (self._tee == "all" or (self._tee == "0" and rank == 0)) if shown is None else shown
        if self._shared is None:
            self._logs[rank] = TimedLog(self._log_path(rank), self._warn)
        self._tails[rank], self._counts[rank] = bytearray(), 0
        ends = []
        for number in (1, 2):
            reader, writer = _open_terminal_or_pipe(number if shown and self._tee == "0" else None)
            os.set_blocking(reader, False)
            writers: list[Callable[[bytes], None]] = [functools.partial(self._append_to_tail, rank)]
            if self._shared is None:
                writers.append(self._logs[rank].write)
            else:
                writers.append(LinePrefixer(f"[{rank}] ", self._shared.write).write)
            show = functools.partial(self._show, number)
            if shown:
                is_alone = self._tee == "0"
                writers.append(show if is_alone else LinePrefixer(f"[{rank}] ", show).write)
            self._open[reader] = rank
            pipe = RankPipe(rank, reader, writers)
            self._selector.register(reader, selectors.EVENT_READ, pipe)
            ends.append(writer)
        return ends[0], ends[1]

    def _show(self, number: int, data: bytes) -> None:
        self._console[number].write(data)
        self._line_is_open = not data.endswith(b"\n") if data else self._line_is_open

    def line_break(self) -> str:
        """Return what a note must begin with to get a line of the terminal to itself."""
        is_open, self._line_is_open = self._line_is_open, False
        return "\n" if is_open and os.isatty(2) else ""

    def start(self) -> None:
        self._thread.start()

    def tail(self, rank: int, *, timeout: float = 2.0) -> str:
        """Return the end of a rank's output; waits for what is still in its pipes."""
        deadline = time.monotonic() + timeout
        while rank in list(self._open.values()) and time.monotonic() < deadline:
            time.sleep(0.005)
        return bytes(self._tails.get(rank, b"")).decode("utf-8", "replace")

    def count_bytes(self, rank: int) -> int:
        """Return how much a rank has printed; of one without pipes of its own, how much all
        processes have.
        """
        return self._counts[rank] if rank in self._counts else sum(self._counts.values())

    def close(self, timeout: float = 5.0) -> None:
        """Read what is left until all ends are closed or time is up, then close everything."""
        if self._thread.ident is not None:  # it was started
            self._thread.join(timeout)
            self._closing.set()
            self._thread.join(timeout)
        if self._thread.is_alive():
            return  # it waits for a blocked console; as a daemon thread it ends with the agent
        for key in list(self._selector.get_map().values()):
            self._close_pipe(key.data)
        self._selector.close()
        for log in [*self._logs.values(), *([self._shared] if self._shared else [])]:
            log.close()

    def _run(self) -> None:
        while self._selector.get_map() and not self._closing.is_set():
            for key, _ in self._selector.select(1.0):
                self._read(key.data)

    def _read(self, pipe: RankPipe) -> None:
        try:
            data = os.read(pipe.descriptor, CHUNK)
        except BlockingIOError:
            return
        except OSError:  # EIO from a terminal whose other end is closed
            data = b""
        if not data:
            self._close_pipe(pipe)
            return
        for write in pipe.writers:
            write(data)

    def _close_pipe(self, pipe: RankPipe) -> None:
        for write in pipe.writers:
            write(b"")
        self._selector.unregister(pipe.descriptor)
        self._open.pop(pipe.descriptor, None)
        os.close(pipe.descriptor)

    def _append_to_tail(self, rank: int, data: bytes) -> None:
        tail = self._tails[rank]
        tail += data
        del tail[:-TAIL]
        self._counts[rank] += len(data)


def _once_per_reason(warn: Callable[[str], None]) -> Callable[[str], None]:
    """Warn once per reason: a full disk is full for every log."""
    reasons: set[str] = set()

    def warn_once(text: str) -> None:
        reason = text.rpartition(": ")[2]
        if reason not in reasons:
            reasons.add(reason)
            warn(text)

    return warn_once


def _open_terminal_or_pipe(console: int | None) -> tuple[int, int]:
    """Open a terminal for output that goes to one (progress bars and colours work), else a pipe."""
    if console is None or not os.isatty(console) or sys.platform == "win32":
        return os.pipe()
    import fcntl
    import pty
    import termios

    reader, writer = pty.openpty()
    settings = termios.tcgetattr(writer)
    settings[1] &= ~termios.OPOST  # line ends pass unchanged: the real terminal handles them
    termios.tcsetattr(writer, termios.TCSANOW, settings)
    with contextlib.suppress(OSError):
        fcntl.ioctl(writer, termios.TIOCSWINSZ, fcntl.ioctl(console, termios.TIOCGWINSZ, bytes(8)))
    return reader, writer
