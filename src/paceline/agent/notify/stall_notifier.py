"""Detect ranks that make no steps, and idle GPUs, for longer than the user allows."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from contextlib import suppress

from paceline.agent.health.heartbeat import Heartbeats
from paceline.agent.notify.notifier import GPU_IDLE, STALLED, Notifier
from paceline.contract.foreign_records import parse_object, read_tail
from paceline.contract.run_folder import AttemptFolder, RunFolder

INTERVAL = 30.0  # seconds between two looks, at most
IDLE = 5.0  # percent: a GPU that is less busy has nothing to do
FRESH = 120.0  # seconds; older samples of a node say nothing about now


class StallNotifier:
    """A thread of the head agent that looks at one attempt."""

    def __init__(
        self,
        run: RunFolder,
        attempt: AttemptFolder,
        notifier: Notifier,
        heartbeats: Heartbeats,
        local_ranks: Iterable[int],
    ) -> None:
        self._run, self._attempt, self._notifier = run, attempt, notifier
        self._heartbeats, self._local_ranks = heartbeats, list(local_ranks)
        self._limit = float(notifier.settings.get("stalled_after", 0))
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._run_until_closed, name="stall-watch", daemon=True
        )

    def start(self) -> None:
        wanted = {STALLED, GPU_IDLE} & set(self._notifier.settings.get("on", ()))
        if self._notifier.enabled and self._limit > 0 and wanted:
            self._thread.start()

    def close(self) -> None:
        """End before the heartbeats are reset or removed."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run_until_closed(self) -> None:
        progress, since = None, time.monotonic()
        busy = time.monotonic()
        while not self._closed.wait(min(INTERVAL, self._limit / 4)):
            now = self._progress()
            if now != progress:
                progress, since = now, time.monotonic()
            elif time.monotonic() - since >= self._limit:
                self._tell(STALLED, f"no step for {_minutes(time.monotonic() - since)}")
            if self._are_gpus_idle() is not True:
                busy = time.monotonic()
            elif time.monotonic() - busy >= self._limit:
                self._tell(GPU_IDLE, f"no GPU was busy for {_minutes(time.monotonic() - busy)}")

    def _tell(self, event: str, message: str) -> None:
        steps = [self._heartbeats.read(each).step for each in self._local_ranks]
        in_session = any(map(self._heartbeats.is_in_session, self._local_ranks))
        step = max(steps) if steps and in_session else None
        self._notifier.send(event, "running", message, attempt=self._attempt.number, step=step)

    def _progress(self) -> object:
        """Return what changes while the ranks make progress: their heartbeats, or else what they
        print.
        """
        heartbeats = [self._heartbeats.read(each) for each in self._local_ranks]
        if any(map(self._heartbeats.is_in_session, self._local_ranks)):
            return [(each.step, each.time) for each in heartbeats]
        sizes = []
        for path in sorted(self._attempt.path.glob("*.log")):
            with suppress(OSError):
                sizes.append(path.stat().st_size)
        return sizes

    def _are_gpus_idle(self) -> bool | None:
        """Return whether no GPU of the run is busy; None if nobody knows."""
        shares: list[float] = []
        for path in self._run.system.glob("node-*.jsonl"):
            with suppress(OSError, ValueError, TypeError):
                lines = read_tail(path, 8192).splitlines()
                sample = parse_object(lines[-1]) if lines else {}
                gpus = sample.get("gpus")
                if isinstance(gpus, list) and time.time() - float(sample.get("time", 0)) < FRESH:
                    known = [gpu.get("busy") for gpu in gpus if isinstance(gpu, dict)]
                    shares += [share for share in known if isinstance(share, (int, float))]
        return max(shares) < IDLE if shares else None


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
