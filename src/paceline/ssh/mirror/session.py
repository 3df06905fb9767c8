"""One conversation with the reader on the cluster: what is asked, and which part of the answer is stored."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO, Any, Protocol

from paceline.contract.run_path import is_run_path
from paceline.errors import ConnectionProblem, UsageError
from paceline.ssh.mirror.frames import (
    ALIVE,
    ERROR,
    FOUND,
    PASS,
    BadStream,
    CutStream,
    Frame,
    FrameReader,
)
from paceline.ssh.mirror.mirror_folder import Mirror
from paceline.ssh.mirror.reader import SILENCE, Scope

NOTE_INTERVAL = 5.0  # seconds between notes of which runs are complete


class Talk(Protocol):
    """A conversation with the reader."""

    @property
    def output(self) -> IO[bytes]: ...

    def __enter__(self) -> Any: ...

    def __exit__(self, *_: Any) -> None: ...

    def send(self, content: bytes) -> None: ...

    def end(self) -> None:
        """End the conversation from another thread."""


Connect = Callable[[], Talk]


def update(
    mirror: Mirror,
    scope: Scope,
    connect: Connect,
    *,
    cluster: str,
    warn: Callable[[str], None] = lambda text: None,
) -> dict[str, str]:
    """Bring a mirror up to date once; return what the names mean. Raises ConnectionProblem if the link breaks."""
    session = Session(mirror, scope, warn=warn)
    with connect() as talk:
        try:
            session.run(talk)
        except (BadStream, ConnectionError) as problem:
            raise explain(problem, cluster) from None
    if not session.has_passed:
        raise explain(CutStream("it ended"), cluster)
    return session.found


class Session:
    """One stream of the reader, from the request to its end.

    `claim` is asked, once it is known what the names mean, whether to go on; `on_pass` is called whenever everything
    that had changed has arrived. `warn` gets a line if something of a list does not come.
    """

    def __init__(
        self,
        mirror: Mirror,
        scope: Scope,
        claim: Callable[[Mapping[str, str]], bool] = lambda found: True,
        on_pass: Callable[[Mapping[str, str]], None] = lambda found: None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._mirror, self._scope, self._claim, self._on_pass = mirror, scope, claim, on_pass
        self._warn = warn
        self.found: dict[str, str] = {}
        self._runs: set[str] = set()  # whose copies this stream keeps fresh
        self._next_note = 0.0
        self.has_passed = False
        self.is_refused = False

    def run(self, talk: Talk) -> None:
        """Write down what arrives until the stream ends."""
        heard = [time.monotonic()]
        over = threading.Event()
        threading.Thread(target=self._guard, args=(talk, heard, over), daemon=True).start()
        try:
            talk.send(f"{self._scope.to_json()}\n".encode())
            reader = FrameReader(talk.output)
            while not self.is_refused and (frame := reader.read()) is not None:
                heard[0] = time.monotonic()
                self._take(frame, talk)
        finally:
            over.set()

    def _take(self, frame: Frame, talk: Talk) -> None:
        if frame.kind == ERROR:
            raise UsageError(frame.text("message"), hint=frame.text("hint"))
        self._mirror.apply(frame)
        if isinstance(run := frame.values.get("run"), str):  # a list grows
            self._runs.add(run)
        if frame.kind == FOUND:
            names, runs = frame.table("names"), frame.values.get("runs")
            if not isinstance(runs, list) or not all(
                isinstance(each, str) for each in (*runs, *names.values())
            ):
                raise BadStream("the reader names no runs")
            if not all(map(is_run_path, names.values())):
                raise BadStream("the reader names something that is not a run")
            self.found = {name: str(run) for name, run in names.items()}
            if left_out := frame.number("left_out"):
                self._warn(
                    f"only the newest trials of large sweeps are shown; {left_out:,} older ones are left out"
                )
            self.is_refused = not self._claim(self.found)
            self._runs |= set(runs)
            talk.send(f"{json.dumps({run: self._mirror.copies(run) for run in runs})}\n".encode())
        elif frame.kind in (PASS, ALIVE):
            self.has_passed = True
            if time.monotonic() >= self._next_note:
                self._next_note = time.monotonic() + NOTE_INTERVAL
                self._mirror.refresh(self._runs, with_logs=self._scope.logs)
            self._on_pass(self.found)

    def _guard(self, talk: Talk, heard: list[float], over: threading.Event) -> None:
        """Tell the reader that somebody listens, and end a conversation in which nothing is heard any more."""
        begun = spoken = time.monotonic()
        while not over.wait(1.0):
            # Until the first word, the reader may still be starting on a busy node.
            patience = (
                self._scope.silence if heard[0] > begun else max(self._scope.silence, SILENCE)
            )
            if time.monotonic() - heard[0] > patience:
                talk.end()
                return
            if time.monotonic() - spoken > self._scope.silence / 4:
                spoken = time.monotonic()
                with suppress(OSError, ValueError):
                    talk.send(b"\n")


def explain(problem: Exception, cluster: str) -> ConnectionProblem:
    if isinstance(problem, ConnectionProblem):
        return problem
    if isinstance(problem, BadStream) and not isinstance(problem, CutStream):
        return ConnectionProblem(
            f"{cluster} sent data that cannot be used: {problem}.", hint="Try again."
        )
    return ConnectionProblem(
        f"The connection to {cluster} was lost.", hint=f"Type: paceline login {cluster}"
    )
