"""A run: its folder, the state of its job, and what follows from both."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from paceline.contract.claims import Holder, find_holder
from paceline.contract.files.foreign_records import read_bounded
from paceline.contract.quote import quote
from paceline.contract.run_folder import RunFolder
from paceline.contract.run_path import is_fetched, requeues_itself
from paceline.contract.verdict import DONE, FAILED, STOPPED, read_verdict
from paceline.errors import ClusterError
from paceline.slurm.job_states.meanings import ENDED, WAITING, JobState
from paceline.watch.goodput import read_events
from paceline.watch.metrics.latest import Latest, read_latest
from paceline.watch.records.reasons import describe_reason, saves_first
from paceline.watch.records.run_status import OVER, newest_verdict
from paceline.watch.resume_hint import submit_again
from paceline.watch.silence import SILENCE_HINT, seconds_silent


@dataclass(frozen=True)
class Record:
    """A run as `paceline ps` shows it."""

    folder: RunFolder
    details: dict[str, Any]  # run.json
    status: str
    job: str | None
    state: JobState | None
    attempts: int
    step: int | None
    # why Slurm could not be asked, unless the run folder says enough
    no_answer: ClusterError | None = None
    holder: Holder | None = None  # the job start that has the run folder, or had it last
    newest: Latest | None = None  # what it logged last, if that has been read

    @property
    def run_id(self) -> str:
        return self.folder.path.name

    @property
    def status_phrase(self) -> str:
        """The status after the run's name: "is running", "has failed"."""
        return "has failed" if self.status == FAILED else f"is {self.status}"

    @property
    def latest(self) -> Latest:
        """What the run logged last, and its pace unless it is over."""
        return self.newest or read_latest(self.folder.metrics, with_pace=not self.is_over)

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """What happened in the run, in order of time."""
        return read_events(f"{self.folder.path}/events")

    @property
    def is_over(self) -> bool:
        if self.state is not None:
            return self.state.phase == ENDED
        return self.status in OVER

    @property
    def is_waiting(self) -> bool:
        """Whether its job waits in the queue, for the first time or again."""
        return self.state is not None and self.state.phase == WAITING

    @property
    def requeue_problem(self) -> str:
        """Why a run that is over did not go back into the queue; empty if it was not meant to."""
        if not self.is_over or self.status in (DONE, "cancelled"):
            return ""
        holder = find_holder(self.folder)
        if holder is None:
            return ""
        with suppress(OSError, ValueError):
            return read_bounded(holder.job_start.requeue_failed, 10_000).decode().strip()
        wanted = (
            holder.job_start.requeue.exists() and read_verdict(holder.job_start.verdict) == STOPPED
        )
        if wanted and self.state is not None and self.state.state == "FAILED":
            return (
                "Slurm forgot it (this can happen when the controller crashes); use "
                f"`{submit_again(self.folder)}`"
            )
        return ""

    @property
    def can_go_on(self) -> bool:
        """Whether a run that is over was stopped on purpose, and was asked to save first: it can
        be resumed.
        """
        if self.status == "cancelled":
            return saves_first(self) and newest_verdict(self.folder) == STOPPED
        return self.status == STOPPED

    @property
    def silence(self) -> float | None:
        """The seconds without a sign of life from a job that Slurm shows as running; None if it is
        alive.
        """
        return seconds_silent(self.folder, self.state)

    @property
    def restart_command(self) -> str:
        """What to type to restart a job that gives no sign of life, or to end it if the run is
        over.
        """
        if newest_verdict(self.folder) in (DONE, FAILED):
            return f"`scancel {self.job}`"
        if self.restarts_by_requeue:
            return f"`scontrol requeue {self.job}`"
        return f"`scancel {self.job}`, then `{submit_again(self.folder)}`"

    @property
    def restarts_by_requeue(self) -> bool:
        """Whether `restart_command` puts the job back into the queue."""
        return newest_verdict(self.folder) not in (DONE, FAILED) and requeues_itself(self.folder)

    @property
    def hint(self) -> str:
        """What to do if Slurm could not be asked, or if the job gives no sign of life."""
        if self.no_answer is None:
            return SILENCE_HINT if self.silence is not None else ""
        conf = self.details.get("slurm_conf", "")
        if conf and conf != os.environ.get("SLURM_CONF") and not is_fetched(self.folder):
            return f"The job was submitted with another SLURM_CONF: export SLURM_CONF={quote(conf)}"
        return self.no_answer.hint

    @property
    def detail(self) -> str:
        """Why the run waits, where it runs, why it failed or had nothing to do, or why Slurm did
        not requeue it.
        """
        saves = sum(event["event"] == "save_failed" for event in self.events)
        parts = [
            describe_reason(self),
            f"{saves} checkpoint{'s' * (saves > 1)} could not be written" if saves else "",
        ]
        return "; ".join(part for part in parts if part)
