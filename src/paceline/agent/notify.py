"""Notifications about a run, sent by the head agent: POSTed to a webhook, or passed to a command of
the user. No part of the webhook's address is ever printed.

Each one is sent once, without ever delaying the run. The head agent knows how an attempt ends, and
usually whether the job will be requeued. The next job start reports the rest: a job that Slurm
itself requeues gets SIGTERM, just like a cancelled one, and a lost node gets no signal.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from paceline.agent.health.heartbeat import Heartbeats
from paceline.agent.stop import FILE, TERM, is_time_limit
from paceline.contract import env
from paceline.contract.foreign_records import read_fields
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.redaction import redact_text
from paceline.contract.run_folder import (
    DONE,
    FAILED,
    STOPPED,
    AttemptFolder,
    JobStartFolder,
    RunFolder,
    read_verdict,
)

if TYPE_CHECKING:
    from paceline.agent.attempt import Outcome

REQUEUED, STALLED = "requeued", "stalled"
CANCELLED, TIMED_OUT = "cancelled", "timed out"
WEBHOOK_TIMEOUT = 5.0  # seconds
COMMAND_TIMEOUT = 10.0
FLUSH_TIMEOUT = 12.0  # seconds at the end of the agent for what is still to be sent
MAX_MESSAGE = 1000  # characters
INTERVAL = 30.0  # seconds between two looks for stalled ranks, at most


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
        # Trials do not tell anybody: a sweep may have thousands of them.
        self.settings: dict[str, Any] = {} if launch_spec.trial else launch_spec.notify
        self._sent: set[tuple[str, int]] = set()
        self._threads: list[threading.Thread] = []
        self._has_warned = False

    def begin(self) -> None:
        """Tell that Slurm has requeued the job, if its start before this one has ended without
        telling anything.
        """
        job, _, restarts = self._job_start.path.name.rpartition("-")
        if not self.settings or not restarts.isdigit():
            return
        earlier = self._run.job_start(f"{job}-{int(restarts) - 1}")
        verdict = read_verdict(earlier.verdict)
        if not earlier.path.exists() or earlier.notified.exists() or verdict in (DONE, FAILED):
            return
        cause = "it was stopped" if verdict == STOPPED else "its node or its agent was lost"
        _leave_mark(earlier, REQUEUED)
        message = f"Slurm has requeued and restarted the job after {cause}"
        self.send(REQUEUED, "running", message, attempt=0)

    def attempt_over(
        self, outcome: Outcome, *, attempt: int, step: int | None, by_term: bool, from_queue: bool
    ) -> None:
        """Tell how the run has ended, or that it goes back into the queue, unless it starts again
        here.
        """
        if not self.settings or outcome.restart_delay is not None or outcome.agent_killed:
            return
        failure = outcome.failure
        message = "" if failure is None else failure.headline(self._launch_spec.world_size)
        verdict = read_verdict(self._job_start.verdict) or outcome.verdict
        may_requeue = self._job_start.requeue.exists()  # the retry policy has decided
        at_limit = from_queue and is_time_limit(
            TERM if by_term else FILE, environ=self._environ, grace=self._launch_spec.stop_timeout
        )
        unasked = False
        if verdict == DONE or (verdict == FAILED and not may_requeue):
            event = status = verdict
        elif self._run.cancelled.exists():
            event, status = STOPPED, CANCELLED
        elif at_limit and (by_term or not may_requeue):
            # Nobody requeues it. Slurm calls it timed out unless it has stopped before the limit.
            event, status = (FAILED, TIMED_OUT) if by_term else (STOPPED, STOPPED)
            message = "time limit reached"
            unasked = True
        elif not may_requeue:
            event = status = STOPPED
        elif by_term:
            return  # somebody cancels the job, or Slurm requeues it: then the next job start tells
        else:
            event, status = REQUEUED, "queued"
            message = message or "it has saved and will be requeued"
        _leave_mark(self._job_start, event)
        self.send(event, status, message, attempt=attempt, step=step, unasked=unasked)

    def failed(self, message: str) -> None:
        """Tell that the agents themselves have failed."""
        if self.settings and not self._job_start.notified.exists():
            _leave_mark(self._job_start, FAILED)
            self.send(FAILED, FAILED, message, attempt=0)

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
        name = str(read_fields(self._run.run_json).get("name") or "")
        job = self._environ.get("SLURM_JOB_ID", "")
        path = "/".join(part for part in (spec.project, spec.experiment, spec.run_id) if part)
        known = ", ".join(part for part in (name, f"job {job}" if job else "") if part)
        text = f"{path} ({known})" if known else path
        text += f": {status if status in (CANCELLED, TIMED_OUT) else event.replace('_', ' ')}"
        # scripts without the runtime have no steps
        step = step or None
        if step is not None:
            text += f" at step {step}"
        payload = {
            "text": f"{text}: {message}" if message else text,
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
        thread = threading.Thread(target=self._deliver, args=[payload], name="notify", daemon=True)
        self._threads.append(thread)
        thread.start()

    def flush(self) -> None:
        """Wait until everything is sent, for a limited time."""
        deadline = time.monotonic() + FLUSH_TIMEOUT
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            self._warn_once("notifications were not sent in time")

    def _deliver(self, payload: dict[str, Any]) -> None:
        webhook, command = self.settings.get("webhook"), self.settings.get("command")
        try:
            if webhook:
                post(self._environ.get(webhook, ""), payload)
        except NotDelivered as why:
            self._warn_once(f"cannot send notifications to the webhook in {webhook}: {why}")
        try:
            if command:
                run_command(command, payload, self._environ)
        except (NotDelivered, OSError, ValueError) as why:
            self._warn_once(f"the command for notifications failed: {why}")

    def _warn_once(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._warn(f"{text}; the run continues")


class StallNotifier:
    """Looks at one attempt while the head agent waits, for ranks that do nothing."""

    def __init__(
        self,
        attempt: AttemptFolder,
        notifier: Notifier,
        heartbeats: Heartbeats,
        local_ranks: Iterable[int],
    ) -> None:
        self._attempt, self._notifier = attempt, notifier
        self._heartbeats, self._local_ranks = heartbeats, list(local_ranks)
        self._limit = float(notifier.settings.get("stalled_after", 0))
        is_wanted = STALLED in notifier.settings.get("on", ()) and self._limit > 0
        self._next_look = time.monotonic() if is_wanted else float("inf")
        self._progress: object = None
        self._progressed = time.monotonic()

    def check(self) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + min(INTERVAL, self._limit / 4)
        heartbeats = [self._heartbeats.read(each) for each in self._local_ranks]
        steps = None
        progress: object = self._attempt.last_output()  # of scripts without the runtime
        if any(each.in_session for each in heartbeats):
            steps = max(each.step for each in heartbeats)
            progress = [(each.step, each.time) for each in heartbeats]
        if progress != self._progress:
            self._progress = progress
            self._progressed = now
        seconds = now - self._progressed
        if seconds >= self._limit:
            ago = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
            number = self._attempt.number
            self._notifier.send(
                STALLED, "running", f"no step for {ago}", attempt=number, step=steps
            )


def post(address: str, payload: Mapping[str, Any]) -> None:
    """Send a notification as JSON."""
    from http.client import HTTPException  # not at the top: most runs need none of it
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    if not address.lower().startswith(("http://", "https://")):
        raise NotDelivered("it is not set to an address that begins with https:// or http://")
    headers = {"Content-Type": "application/json", "User-Agent": "paceline"}
    try:
        request = Request(address, data=json.dumps(payload).encode(), headers=headers)
        with urlopen(request, timeout=WEBHOOK_TIMEOUT):
            pass
    except HTTPError as error:
        error.close()
        raise NotDelivered(f"the server answered {error.code}") from None
    except (OSError, ValueError, HTTPException) as error:  # their texts may quote the address
        reason = getattr(error, "reason", error)
        text = reason.strerror if isinstance(reason, OSError) else None
        raise NotDelivered(text or type(reason).__name__) from None


def run_command(command: str, payload: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Run a shell command with the notification as JSON on its standard input."""
    # in one line, for the subject of a mail
    fields = {**payload, "text": " ".join(str(payload["text"]).split())}
    variables = {
        f"{env.NOTIFY}{name.upper()}": str(fields[name]).replace("\0", "")
        for name in ("text", "event", "run_id", "status")
    }
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


def _leave_mark(job_start: JobStartFolder, event: str) -> None:
    """For the next job start. If the disk is full, the worst is a notification too many."""
    with suppress(OSError):
        job_start.notified.write_text(f"{event}\n", encoding="utf-8")
