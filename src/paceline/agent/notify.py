"""Notifications about a run, sent by the head agent: POSTed to a webhook, or passed to a command of
the user. No part of the webhook's address is ever printed.

Each one is sent once, without ever delaying the run. The head agent knows how an attempt ends, and
usually whether the job will be requeued. The next job start reports the rest: a job that Slurm
itself requeues gets SIGTERM, just like a cancelled one, and a lost node gets no signal.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from paceline.agent.health.heartbeat import Heartbeats
from paceline.agent.rank_failures import FENCED_OFF
from paceline.agent.stop.rank_signals import FILE, TERM, is_time_limit
from paceline.contract import env
from paceline.contract.claims import claim_number
from paceline.contract.foreign_records import parse_object, read_fields, read_tail
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.redaction import redact_text
from paceline.contract.run_folder import AttemptFolder, JobStartFolder, RunFolder
from paceline.contract.verdict import DONE, FAILED, STOPPED, read_verdict

if TYPE_CHECKING:
    from paceline.agent.attempt import Outcome

REQUEUED, STALLED, GPU_IDLE = "requeued", "stalled", "gpu_idle"
CANCELLED, TIMED_OUT = "cancelled", "timed out"
WEBHOOK_TIMEOUT = 5.0  # seconds
COMMAND_TIMEOUT = 10.0
FLUSH_TIMEOUT = 12.0  # seconds at the end of the agent for what is still to be sent
MAX_MESSAGE, MAX_NAME = 1000, 100  # characters
INTERVAL = 30.0  # seconds between two looks for stalled ranks, at most
IDLE = 5.0  # percent: a GPU that is less busy has nothing to do
FRESH = 120.0  # seconds; older samples of a node say nothing about now


class NotDelivered(Exception):
    """Why a notification could not be sent."""


class Notifier:
    """Sends what the user wants to know; does nothing if that is nothing. Only a head agent has
    one.
    """

    def __init__(
        self,
        run: RunFolder,
        launch_spec: LaunchSpec,
        job_start: JobStartFolder,
        *,
        environ: Mapping[str, str],
        warn: Callable[[str], None],
    ) -> None:
        self._run, self._launch_spec, self._job_start = run, launch_spec, job_start
        self._environ, self._warn = environ, warn
        self.settings: dict[str, Any] = launch_spec.notify
        self._sent: set[tuple[str, int]] = set()
        self._queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._has_warned = False

    @property
    def enabled(self) -> bool:
        return bool(self.settings)

    # -- what happens to the run
    # -----------------------------------------------------------------------

    def begin(self) -> None:
        """Tell that Slurm has requeued the job, if its start before this one has ended without
        telling anything.
        """
        earlier = self._job_start_before() if self.enabled else None
        if (
            earlier is None
            or earlier.notified.exists()
            or read_verdict(earlier.verdict) in (DONE, FAILED)
        ):
            return
        _write(earlier, REQUEUED)
        cause = (
            "it was stopped"
            if read_verdict(earlier.verdict) == STOPPED
            else "its node or its agent was lost"
        )
        self.send(
            REQUEUED,
            "running",
            f"Slurm has requeued and restarted the job after {cause}",
            attempt=0,
        )

    def attempt_over(
        self, outcome: Outcome, *, attempt: int, step: int | None, by_term: bool, from_queue: bool
    ) -> None:
        """Tell how the run has ended, or that it goes back into the queue, unless it starts again
        here.
        """
        if not self.enabled or outcome.restart_delay is not None or outcome.agent_killed:
            return
        failure = outcome.failure
        if failure is not None and failure.cause == FENCED_OFF:
            return  # another job start has the run, and tells about it
        message = "" if failure is None else failure.headline(self._launch_spec.world_size)
        verdict = read_verdict(self._job_start.verdict) or outcome.verdict
        may_requeue = self._job_start.requeue.exists()  # the retry policy has decided
        at_limit = False
        if verdict in (DONE, FAILED) and not (verdict == FAILED and may_requeue):
            event = status = verdict
        elif self._run.cancelled.exists():
            event, status = STOPPED, CANCELLED
        elif (by_term or not may_requeue) and from_queue and self._is_time_limit(by_term):
            # Nobody requeues it. Slurm calls it timed out unless it has stopped before the limit.
            event, status = (FAILED, TIMED_OUT) if by_term else (STOPPED, STOPPED)
            at_limit, message = True, "time limit reached"
        elif not may_requeue:
            event = status = STOPPED
        elif by_term:
            return  # somebody cancels the job, or Slurm requeues it: then the next job start tells
        else:
            event, status, message = (
                REQUEUED,
                "queued",
                message or "it has saved and will be requeued",
            )
        _write(self._job_start, event)
        self.send(event, status, message, attempt=attempt, step=step, unasked=at_limit)

    def _is_time_limit(self, by_term: bool) -> bool:
        """Whether the job was stopped because of its time limit."""
        way = TERM if by_term else FILE
        return is_time_limit(way, environ=self._environ, grace=self._launch_spec.stop_timeout)

    def failed(self, message: str) -> None:
        """Tell that the agents themselves have failed."""
        if self.enabled and not self._job_start.notified.exists():
            _write(self._job_start, FAILED)
            self.send(FAILED, FAILED, message, attempt=0)

    # -- sending
    # ---------------------------------------------------------------------------------------

    def send(
        self,
        event: str,
        status: str,
        message: str,
        *,
        attempt: int,
        step: int | None = None,
        unasked: bool = False,
    ) -> None:
        """Send a notification in the background, if the user wants this kind, and once for each
        attempt.

        A run that ended although nobody asked for it is news also for those who want to hear of
        failures only.
        """
        kinds = {event, FAILED} if unasked else {event}
        if not kinds & set(self.settings.get("on", ())) or (event, attempt) in self._sent:
            return
        self._sent.add((event, attempt))
        spec, message = self._launch_spec, redact_text(message)[:MAX_MESSAGE]
        path = "/".join(part for part in (spec.project, spec.experiment, spec.run_id) if part)
        name, job = self._name(), self._job()
        known = ", ".join(part for part in (name, f"job {job}" if job else "") if part)
        # scripts without the runtime have no steps
        step = step if step is not None and step > 0 else None
        at = f" at step {step}" if step is not None else ""
        what = status if status in (CANCELLED, TIMED_OUT) else event.replace("_", " ")
        text = (
            f"{path}{f' ({known})' if known else ''}: {what}{at}{f': {message}' if message else ''}"
        )
        payload = {
            "text": text,
            "event": event,
            "run_id": spec.run_id,
            "name": name,
            "job": job,
            "project": spec.project,
            "experiment": spec.experiment,
            "status": status,
            "message": message,
            "step": step,
            "attempt": attempt or None,
            "time": time.time(),
        }
        self._queue.put(payload)
        if self._thread is None:
            self._thread = threading.Thread(target=self._deliver_all, name="notify", daemon=True)
            self._thread.start()

    def _name(self) -> str:
        """Return what the user calls the run; empty without a name of its own."""
        return str(read_fields(self._run.run_json).get("name") or "")[:MAX_NAME]

    def _job(self) -> str:
        array = self._environ.get("SLURM_ARRAY_JOB_ID"), self._environ.get("SLURM_ARRAY_TASK_ID")
        return "_".join(map(str, array)) if all(array) else self._environ.get("SLURM_JOB_ID", "")

    def flush(self, timeout: float = FLUSH_TIMEOUT) -> None:
        """Wait until everything is sent, for a limited time."""
        deadline = time.monotonic() + timeout
        while self._queue.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.02)
        if self._queue.unfinished_tasks:
            self._warn_once("notifications were not sent in time")

    def _deliver_all(self) -> None:
        while True:
            self._deliver(self._queue.get())
            self._queue.task_done()

    def _deliver(self, payload: dict[str, Any]) -> None:
        webhook, command = self.settings.get("webhook"), self.settings.get("command")
        if webhook:
            address = self._environ.get(webhook, "")
            try:
                if not address:
                    raise NotDelivered("the variable is not set")
                post(address, payload)
            except NotDelivered as why:
                self._warn_once(f"cannot send notifications to the webhook in {webhook}: {why}")
        if command:
            try:
                run_command(command, payload, self._environ)
            except (NotDelivered, OSError, ValueError) as why:
                self._warn_once(f"the command for notifications failed: {why}")

    def _warn_once(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._warn(f"{text}; the run continues")

    def _job_start_before(self) -> JobStartFolder | None:
        """Return the last start of the same job; None if a person has started the run again."""
        name = self._job_start.path.name
        number = claim_number(self._run, name)
        try:
            before = os.readlink(self._run.claims / str(number - 1)) if number > 1 else ""
        except OSError:
            return None
        is_same_job = (
            before not in ("", name) and before.rpartition("-")[0] == name.rpartition("-")[0]
        )
        return self._run.job_start(before) if is_same_job else None


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


def post(address: str, payload: Mapping[str, Any]) -> None:
    """Send a notification as JSON."""
    from http.client import HTTPException  # not at the top: most runs need none of it
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    if not address.lower().startswith(("http://", "https://")):
        raise NotDelivered("its value is not an address that begins with https:// or http://")
    headers = {"Content-Type": "application/json", "User-Agent": "paceline"}
    try:
        request = Request(address, data=json.dumps(payload).encode(), headers=headers)
        with urlopen(request, timeout=WEBHOOK_TIMEOUT):
            pass
    except HTTPError as error:
        error.close()
        raise NotDelivered(f"the server answered {error.code}") from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        text = reason.strerror if isinstance(reason, OSError) else None
        raise NotDelivered(text or type(reason).__name__) from None
    except (ValueError, HTTPException) as error:  # their texts may quote the address
        raise NotDelivered(type(error).__name__) from None


def run_command(command: str, payload: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Run a shell command with the notification as JSON on its standard input."""
    variables = {
        f"{env.NOTIFY}{name.upper()}": str(payload[name]).replace("\0", "")
        for name in ("event", "run_id", "status")
    }
    # for a subject
    variables[f"{env.NOTIFY}TEXT"] = " ".join(str(payload["text"]).replace("\0", "").split())
    process = subprocess.Popen(
        ["/bin/sh", "-c", command],
        env={**environ, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        process.communicate(json.dumps(payload).encode() + b"\n", timeout=COMMAND_TIMEOUT)
    except subprocess.TimeoutExpired:
        with suppress(OSError):  # it has just ended
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise NotDelivered(f"it did not finish within {COMMAND_TIMEOUT:g} s") from None
    if process.returncode:
        raise NotDelivered(f"it exited with {process.returncode}")


def _write(job_start: JobStartFolder, event: str) -> None:
    """Leave a mark for the next job start."""
    try:
        job_start.notified.write_text(f"{event}\n", encoding="utf-8")
    except OSError:
        pass  # a full disk: the worst is a notification too many
