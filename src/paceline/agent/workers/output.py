"""What the ranks print: into their logs, and on the console for those who are to be seen.

One thread reads all pipes, so that a console that does not take its text cannot hold up supervision. Neither a
console that is gone nor a full disk ends the training: it is said once, and the text is read on and dropped.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

CHUNK = 1 << 16
TAIL = 8192  # bytes of a rank's output that are kept for the report of a failure
PER_RANK_LOGS = 128  # past so many ranks there is one log per node
LONGEST_LINE = 1 << 16  # a "line" longer than this is passed on in pieces


class Sink:
    """A file or console that may fail; it is tried until then, and its failure told once."""

    def __init__(self, descriptor: int | None, name: str, warn: Callable[[str], None]) -> None:
        self.descriptor = descriptor
        self.name = name
        self._warn = warn

    @classmethod
    def file(cls, path: Path, warn: Callable[[str], None]) -> Sink:
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            return cls(os.open(path, flags, 0o644), str(path), warn)
        except OSError as problem:
            warn(f"cannot write {path}: {problem.strerror}; the run goes on without this log")
            return cls(None, str(path), warn)

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view and self.descriptor is not None:
            try:
                view = view[os.write(self.descriptor, view) :]
            except BlockingIOError:  # somebody made our console non-blocking
                time.sleep(0.01)
            except OSError as problem:
                self._warn(f"cannot write {self.name}: {problem.strerror}; the run goes on without it")
                self.descriptor = None

    def close(self) -> None:
        if self.descriptor is not None and self.descriptor > 2:
            os.close(self.descriptor)
        self.descriptor = None


class Lines:
    """Cuts a stream into whole lines and puts a prefix before each, for places that several ranks write to."""

    def __init__(self, prefix: str, write: Callable[[bytes], None]) -> None:
        self._prefix = prefix.encode()
        self._write = write
        self._rest = b""

    def feed(self, data: bytes) -> None:
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST_LINE:
            whole.append(self._rest)
            self._rest = b""
        if whole:
            self._write(b"".join(self._line(line) for line in whole))

    def finish(self) -> None:
        if self._rest:
            self._write(self._line(self._rest))
            self._rest = b""

    def _line(self, line: bytes) -> bytes:
        # Of a progress bar that redraws itself, what stood there last.
        return self._prefix + line.rstrip(b"\r").rpartition(b"\r")[2] + b"\n"


@dataclass
class Source:
    """One pipe of one rank, and where its bytes go."""

    rank: int
    descriptor: int
    takers: list[Callable[[bytes], None]]
    lines: list[Lines] = field(default_factory=list)


class Streams:
    """All pipes of one attempt. `open` gives a rank's two ends; `close` waits for the last words."""

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
        self._warn = _once_each(warn)
        self._shared = Sink.file(shared_log, self._warn) if shared_log else None
        self._logs: dict[int, Sink] = {}
        self._tails: dict[int, bytearray] = {}
        self._selector = selectors.DefaultSelector()
        self._open: dict[
            int, int
        ] = {}  # descriptor -> rank; copied whole by the other thread, unlike a selector's map
        self._console = {number: Sink(number, f"the console ({number})", self._warn) for number in (1, 2)}
        self._leave = threading.Event()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="streams", daemon=True)

    def open(self, rank: int, *, shown: bool | None = None) -> tuple[int, int]:
        """Pipes for a rank's output and errors: the ends to write to, which the caller passes on and closes."""
        shown = (self._tee == "all" or (self._tee == "0" and rank == 0)) if shown is None else shown
        if self._shared is None:
            self._logs[rank] = Sink.file(self._log_path(rank), self._warn)
        self._tails[rank] = bytearray()
        ends = []
        for number in (1, 2):
            reader, writer = _terminal_or_pipe(number if shown and self._tee == "0" else None)
            os.set_blocking(reader, False)
            source = Source(rank, reader, [lambda data: self._remember(rank, data)])
            if self._shared is None:
                source.takers.append(self._logs[rank].write)
            else:
                source.lines.append(Lines(f"[{rank}] ", self._shared.write))
            if shown and self._tee == "all":
                source.lines.append(Lines(f"[{rank}] ", self._console[number].write))
            elif shown:
                source.takers.append(self._console[number].write)
            source.takers += [lines.feed for lines in source.lines]
            self._open[reader] = rank
            self._selector.register(reader, selectors.EVENT_READ, source)
            ends.append(writer)
        return ends[0], ends[1]

    def start(self) -> None:
        self._thread.start()

    def last_words(self, rank: int, patience: float = 2.0) -> str:
        """The last lines that a rank printed before it ended; they may still be on their way."""
        deadline = time.monotonic() + patience
        while not self._ended(rank) and time.monotonic() < deadline:
            time.sleep(0.005)
        return bytes(self._tails.get(rank, b"")).decode("utf-8", "replace")

    def _ended(self, rank: int) -> bool:
        """Whether all that a rank printed has been read."""
        return rank not in list(self._open.values())

    def close(self, patience: float = 5.0) -> None:
        """Read what is left until all ends are closed, or for so long; then let go."""
        deadline = time.monotonic() + patience
        while self._thread.is_alive() and len(self._selector.get_map()) > 1 and time.monotonic() < deadline:
            self._thread.join(0.01)
        self._leave.set()
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b".")
        self._thread.join(patience)
        if self._thread.is_alive():
            return  # it waits for a console that takes nothing: a daemon, it ends with the agent
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                self._end(key.data)
        self._selector.close()
        for descriptor in (self._wake_read, self._wake_write):
            os.close(descriptor)
        for sink in [*self._logs.values(), *([self._shared] if self._shared else [])]:
            sink.close()

    def _run(self) -> None:
        while len(self._selector.get_map()) > 1 and not self._leave.is_set():
            for key, _ in self._selector.select(1.0):
                if key.data is not None:
                    self._read(key.data)

    def _read(self, source: Source) -> None:
        try:
            data = os.read(source.descriptor, CHUNK)
        except BlockingIOError:
            return
        except OSError:  # a terminal whose other end is closed says EIO
            data = b""
        if not data:
            self._end(source)
            return
        for take in source.takers:
            take(data)

    def _end(self, source: Source) -> None:
        for lines in source.lines:
            lines.finish()
        self._selector.unregister(source.descriptor)
        self._open.pop(source.descriptor, None)
        os.close(source.descriptor)

    def _remember(self, rank: int, data: bytes) -> None:
        tail = self._tails[rank]
        tail += data
        del tail[:-TAIL]


def _once_each(warn: Callable[[str], None]) -> Callable[[str], None]:
    """A full disk is full for every log: say it once."""
    told: set[str] = set()

    def tell(text: str) -> None:
        reason = text.rpartition(": ")[2]
        if reason not in told:
            told.add(reason)
            warn(text)

    return tell


def _terminal_or_pipe(console: int | None) -> tuple[int, int]:
    """A terminal of its own for what is shown on one (bars and colours work), else a pipe."""
    if console is None or not os.isatty(console) or sys.platform == "win32":
        return os.pipe()
    import fcntl
    import pty
    import termios

    reader, writer = pty.openpty()
    settings = termios.tcgetattr(writer)
    settings[1] &= ~termios.OPOST  # line ends pass unchanged: the real terminal sees to them
    termios.tcsetattr(writer, termios.TCSANOW, settings)
    with contextlib.suppress(OSError):
        fcntl.ioctl(writer, termios.TIOCSWINSZ, fcntl.ioctl(console, termios.TIOCGWINSZ, bytes(8)))
    return reader, writer
