"""Keep a mirror fresh: talk to the reader on the cluster, and begin again after a connection was lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from paceline.errors import ClusterError, ConnectionProblem, PacelineError
from paceline.ssh.mirror.follower_lock import FollowerLock
from paceline.ssh.mirror.frames import BadStream, CutStream
from paceline.ssh.mirror.mirror_folder import Mirror
from paceline.ssh.mirror.reader import Scope
from paceline.ssh.mirror.session import Connect, Session, Talk, explain
from paceline.ssh.mirror.write_lock import MirrorBusy

PAUSES = (1.0, 30.0)  # seconds between tries to connect again: at first, and at most
LOOK = 0.5  # seconds between looks at what another process follows
PATIENCE = 6.0  # seconds without a sign of life of that process


class Follower(threading.Thread):
    """Follows runs in the background. If another process follows the same, it only watches what that one writes.

    `say` gets a line whenever the connection is lost, and when it is back; `warn` one at the start if something of a
    list does not come.
    """

    def __init__(
        self,
        mirror: Mirror,
        scope: Scope,
        connect: Connect,
        *,
        cluster: str,
        say: Callable[[str], None],
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        super().__init__(name="paceline-follower", daemon=True)
        self._mirror, self._scope, self._connect = mirror, scope, connect
        self._cluster, self._say, self._warn = cluster, say, warn
        self._follower_lock: FollowerLock | None = None
        self._is_alone = False  # another process holds the lock, and does not live
        self._talk: Talk | None = None
        self._over, self._ready = threading.Event(), threading.Event()
        self._problem: PacelineError | None = None  # what prevents the start
        self._end: PacelineError | None = None  # what has ended it later
        self._lost: float | None = None  # when the connection was lost
        # why nothing is written, although there is a connection
        self._busy: MirrorBusy | None = None
        self.found: Mapping[str, str] = {}

    # -- for the thread that shows it ------------------------------------------------------------------

    def begin(self) -> None:
        """Start, and wait until the first state of the runs has arrived. Raises what prevents that."""
        self.start()
        self._ready.wait()
        if self._problem is not None:
            raise self._problem

    def status(self) -> str:
        """Return why nothing new comes; empty if it does."""
        lost = self._lost
        if lost is None:
            return ""
        if self._end is not None:
            return f"{self._end.message} Showing data received until {show_moment(lost)}"
        if self._busy is not None:
            return (
                f"{self._busy.message.rstrip('.')}; showing data received until {show_moment(lost)}"
            )
        return f"no connection to {self._cluster} since {show_moment(lost)}; showing data received until then"

    def end(self) -> PacelineError | None:
        """Return why nothing will come any more, also with a connection; None if something may."""
        return self._end

    def close(self) -> None:
        self._over.set()
        if (talk := self._talk) is not None:
            talk.end()
        # it may be about to connect, which takes long where nobody answers
        self.join(10 if talk is not None else 1)

    # -- the thread ------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            pause = PAUSES[0]
            while not self._over.is_set():
                session = self._follow()
                if session.is_refused:
                    self._watch_other()
                elif not self._over.is_set():
                    pause = PAUSES[0] if session.has_passed else min(2 * pause, PAUSES[1])
                    self._has_lost()
                    self._over.wait(pause)
        except PacelineError as problem:
            self._fail(problem)
        except OSError as problem:
            self._fail(
                ConnectionProblem(
                    f"Cannot write the mirror: {problem.strerror}: {problem.filename}."
                )
            )
        except Exception as problem:  # whoever waits for this thread must hear of its end
            self._fail(
                ConnectionProblem(
                    f"Cannot follow {self._cluster}: {type(problem).__name__}: {problem}."
                )
            )
        finally:
            if self._follower_lock is not None:
                self._follower_lock.end()

    def _follow(self) -> Session:
        """Follow until the stream ends. What stands in the way at first is raised; later it is waited for."""
        session = Session(
            self._mirror, self._scope, self._claim, self._has_arrived, self._warn_once
        )
        try:
            with self._connect() as talk:
                self._talk = talk
                session.run(talk)
            self._busy = None
        except (ConnectionError, ConnectionProblem, BadStream) as problem:
            self._busy = problem if isinstance(problem, MirrorBusy) else None
            self._require_start(problem)
        finally:
            self._talk = None
        if not session.is_refused:
            self._require_start(CutStream("it ended"))
        return session

    def _require_start(self, problem: Exception) -> None:
        """Raise what stood in the way at first. A list shows what it has."""
        if self._ready.is_set() or self._over.is_set():
            return
        heard = self._mirror.heard().here
        if not (self._scope.newest and heard):
            raise explain(problem, self._cluster) from None
        self._lost = heard
        hint = self._busy.hint if self._busy else f"To connect: paceline login {self._cluster}"
        self._say(f"{self.status()}. {hint}")
        self._ready.set()

    def _fail(self, problem: PacelineError) -> None:
        if self._ready.is_set():
            self._lost = self._lost or time.time()
            self._end = ClusterError(f"{self._cluster}: {problem.message}", hint=problem.hint)
            if self._scope.newest:  # a list stays open
                self._say(self.status())
        else:
            self._problem = problem
            self._ready.set()

    def _warn_once(self, text: str) -> None:
        if not self._ready.is_set():
            self._warn(text)

    def _has_arrived(self, found: Mapping[str, str]) -> None:
        is_back, was_busy = self._lost is not None, self._busy is not None
        self._lost = self._busy = None
        if is_back:
            back = f"the connection to {self._cluster} is back"
            self._say(f"receiving updates from {self._cluster} again" if was_busy else back)
        if is_back or not self._ready.is_set():
            self._tell()
        self._ready.set()

    def _has_lost(self) -> None:
        if self._lost is None:
            self._lost = time.time()
            self._tell()
            again = (
                self._busy.hint
                if self._busy
                else f"If it does not come back: paceline login {self._cluster}"
            )
            self._say(f"{self.status()}. {again}")

    # -- several processes -----------------------------------------------------------------------------

    def _claim(self, found: Mapping[str, str]) -> bool:
        """Whether this process is to follow these runs: no other one does."""
        if self._follower_lock is None:
            self._follower_lock = FollowerLock(self._mirror.base, self._scope, found)
            self.found = found
            # After a lost connection, `last` may be another run: this one is meant.
            scratch = self._mirror.heard().scratch
            self._scope = replace(self._scope, names=[f"{scratch}/{run}" for run in found.values()])
        if self._scope.newest:  # a list fills while it is shown
            self._ready.set()
        return self._follower_lock.take() or self._is_alone

    def _tell(self) -> None:
        if self._follower_lock is not None:
            self._follower_lock.tell(self._lost)

    def _watch_other(self) -> None:
        """Wait until the process that follows the same runs has ended, or is stopped, as by Ctrl-Z."""
        assert self._follower_lock is not None
        heartbeat, heard, lives = self._follower_lock.read_heartbeat(), time.monotonic(), False
        while not self._over.is_set() and not self._follower_lock.take():
            if (latest := self._follower_lock.read_heartbeat()) != heartbeat:
                heartbeat, heard, lives = latest, time.monotonic(), True
            elif time.monotonic() - heard > PATIENCE:
                self._is_alone = True
                return
            known, lost = self._follower_lock.listen()
            if known and lives:
                self._lost = lost
                self._ready.set()
            self._over.wait(LOOK)


def show_moment(moment: float) -> str:
    """Return a time with its date, unless it is today's."""
    is_today = time.localtime(moment)[:3] == time.localtime()[:3]
    return time.strftime("%H:%M" if is_today else "%Y-%m-%d %H:%M", time.localtime(moment))
