"""How often Paceline asks the scheduler."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.contract.claims import find_holder
from paceline.contract.env import POLL_INTERVAL
from paceline.contract.foreign_records import read_text
from paceline.contract.run_folder import DONE, FAILED, TRIALS, RunFolder, read_verdict
from paceline.errors import ClusterError, NoSlurm, UsageError
from paceline.slurm import squeue_and_sacct
from paceline.slurm.answer_cache import Answer, AnswerCache
from paceline.slurm.job_states import ENDED, LIVE, JobState
from paceline.spec.quantities import parse_seconds
from paceline.spec.settings import find_site
from paceline.watch import origin
from paceline.watch.events import newest_change

DEFAULT = 60.0
SANDBOX_FILE = "poll-interval"  # beside the slurm.conf of a sandbox, which you share with nobody


def poll_interval() -> float:
    """Return for how many seconds an answer of the scheduler counts: never less than the site
    allows.
    """
    at_least = float(find_site().limits.poll_interval or 0)
    text, conf = os.environ.get(POLL_INTERVAL, ""), os.environ.get("SLURM_CONF", "")
    if not text and conf:
        text = read_text(Path(conf).with_name(SANDBOX_FILE), 100).strip()
    if not text:
        return at_least or DEFAULT
    try:
        is_number = text.replace(".", "", 1).isdecimal()
        return max(at_least, float(text) if is_number else float(parse_seconds(text)))
    except ValueError:
        raise UsageError(
            f"Invalid {POLL_INTERVAL} {text!r}.",
            hint="Use seconds, or a duration such as 90s or 2m.",
        ) from None


# seconds after its verdict for which the job of a finished run may still be ending
CLOSED_AGE = 900.0


@dataclass(frozen=True)
class Evidence:
    """The signs of a job in its run folder. Times are those of files; 0 if there is no such
    file.
    """

    submitted: float = 0.0
    started: float = 0.0  # its newest start
    verdict: float = 0.0  # of that start, or when the run was cancelled
    is_final: bool = False  # the verdict ends the run, or the user has cancelled it
    is_closed: bool = False  # and the job has had the time to end: nobody needs to ask for it


def read_evidence(runs: Iterable[tuple[RunFolder, str]]) -> dict[str, Evidence]:
    """Return what the folders of runs say about their jobs. Of several trials in one job, an open
    one counts.
    """
    found: dict[str, Evidence] = {}
    for folder, job in runs:
        each = _read(folder, job)
        if job not in found or not each.is_closed:
            found[job] = each
    return found


def _read(folder: RunFolder, job: str) -> Evidence:
    holder = find_holder(folder)
    submitted, cancelled = newest_change([folder.job]), newest_change([folder.cancelled])
    if holder is None or holder.job != job:
        return Evidence(submitted, is_final=bool(cancelled))
    start = holder.job_start
    verdict = read_verdict(start.verdict)
    # A run that failed may still go back into the queue, for other nodes.
    has_failed = verdict == FAILED and not start.requeue.exists()
    is_final = bool(cancelled) or verdict == DONE or has_failed
    is_trial = folder.path.parent.name == TRIALS  # its job goes on with the next trial
    written = max(cancelled, newest_change([start.verdict]) if verdict is not None else 0.0)
    is_closed = is_final and (is_trial or time.time() - written > CLOSED_AGE)
    started = newest_change([folder.claims / str(holder.number)])
    return Evidence(submitted, started, 0.0 if is_trial else written, is_final, is_closed)


DOUBT = 2.0  # seconds after which an answer that may be wrong is repeated
SLOW = 5.0  # seconds that a call takes if the controller is busy
MAX_BACKOFF = 5  # intervals
MAX_ACCOUNTED = 20_000  # jobs to keep what accounting said of them
Seen = Mapping[str, Evidence]


def query_states(jobs: Iterable[str] | Seen) -> dict[str, JobState]:
    """Return the states of jobs, at most a poll interval old. Jobs that Slurm does not know are
    left out.

    With evidence from the run folders, it asks less, and sees at once what they show.
    """
    seen = jobs if isinstance(jobs, Mapping) else dict.fromkeys(jobs, Evidence())
    seen = {job: each for job, each in seen.items() if not each.is_closed}
    if not seen:
        return {}
    if (copy := origin.shown()) is not None:
        return origin.read_job_states(copy.base, seen)
    file = AnswerCache.here()
    if file is None:
        return squeue_and_sacct.states(seen)
    return SharedAnswer(file, poll_interval()).states(seen)


def query_queue() -> list[JobState]:
    """Return the user's jobs that wait or run, at most a poll interval old."""
    file = AnswerCache.here()
    shared = None if file is None else SharedAnswer(file, poll_interval())
    known = squeue_and_sacct.queue() if shared is None else shared.queue()
    return [state for state in known.values() if state.phase != ENDED]


@dataclass(frozen=True)
class SharedAnswer:
    """Decides whether the last answer will do, and asks again if not."""

    file: AnswerCache
    interval: float

    @property
    def _grace(self) -> float:
        """For how many seconds the clocks of this machine and of the file server may differ."""
        return min(DOUBT, self.interval)

    def states(self, seen: Seen) -> dict[str, JobState]:
        answer = self._update(seen)
        self._check(answer)
        if self._vanished(answer, seen):
            answer = self._ask_accounting(seen)
        found = {}
        for job, each in seen.items():
            state = answer.jobs.get(job) or answer.accounting.get(job, (0.0, None))[1]
            if (state := self._as_the_folder_shows(state, job, each, answer.asked)) is not None:
                found[job] = state
        return found

    def queue(self) -> dict[str, JobState]:
        """Return all jobs of the user that the controller remembers."""
        answer = self._update({})
        self._check(answer)
        return answer.jobs

    def _check(self, answer: Answer) -> None:
        if answer.problem:
            again = max(1, round(answer.asked + self._lifetime(answer) - time.time()))
            raise ClusterError(
                answer.problem, hint=f"{answer.hint} Paceline asks again in {again} s.".strip()
            )

    def _update(self, seen: Seen) -> Answer:
        """Return an answer that will do, asking Slurm if nobody has."""
        answer = self.file.read()
        if not self._is_stale(answer, seen):
            return answer
        with self.file.lock():
            answer = self.file.read()  # another process may have asked in the meantime
            if self._is_stale(answer, seen):
                before, answer = answer, self._ask(answer)
                if _has_news(before, answer, seen):
                    time.sleep(self._grace)
                    answer = self._ask(answer)
                self.file.write(answer)
        return answer

    def _ask(self, before: Answer) -> Answer:
        asked = time.time()
        try:
            jobs = squeue_and_sacct.queue()
        except NoSlurm:
            raise  # nobody was asked
        except ClusterError as error:
            now = time.time()
            return replace(
                before,
                asked=now,
                took=now - asked,
                strikes=before.strikes + 1,
                problem=error.message,
                hint=error.hint,
            )
        slow = time.time() - asked > SLOW
        accounting = {job: each for job, each in before.accounting.items() if job not in jobs}
        return Answer(asked, jobs, accounting, strikes=before.strikes + 1 if slow else 0)

    def _is_stale(self, answer: Answer, seen: Seen) -> bool:
        if self._is_expired(answer):
            return True
        if answer.problem or time.time() - answer.asked < self._grace:
            return False
        return any(self._is_doubtful(answer, job, each) for job, each in seen.items())

    def _is_expired(self, answer: Answer) -> bool:
        age = time.time() - answer.asked  # negative after the clock was set back
        return not 0 <= age < self._lifetime(answer) or answer.asked <= self.file.changed()

    def _lifetime(self, answer: Answer) -> float:
        lifetime = self.interval * min(1 << max(answer.strikes - 1, 0), MAX_BACKOFF)
        return max(lifetime, 2 * answer.took) if answer.problem else lifetime

    def _is_doubtful(self, answer: Answer, job: str, seen: Evidence) -> bool:
        """Whether a job may be in another state by now than the answer says."""
        state = answer.jobs.get(job)
        if state is None:
            return not seen.is_final and not self._is_accounted(answer, job)
        if state.phase == ENDED or not seen.verdict:
            return False
        if state.phase == LIVE or seen.verdict > answer.asked:
            # It is about to end or to go back into the queue: look often at first, then less and
            # less.
            since_verdict = time.time() - seen.verdict
            return since_verdict >= 0 and time.time() - answer.asked > since_verdict / 2
        return False

    def _vanished(self, answer: Answer, seen: Seen) -> list[str]:
        """Return the jobs that are not in the queue, without a verdict that says why."""
        return [
            job
            for job, each in seen.items()
            if job not in answer.jobs
            and not each.is_final
            and not self._is_accounted(answer, job)
            and each.submitted < answer.asked - self._grace
        ]

    def _is_accounted(self, answer: Answer, job: str) -> bool:
        """Whether it is known what accounting says of a job. Ended jobs do not change; others are
        asked for again.
        """
        asked, state = answer.accounting.get(job, (0.0, None))
        if state is not None and state.phase == ENDED:
            return True
        return 0 <= time.time() - asked < self.interval * MAX_BACKOFF

    def _ask_accounting(self, seen: Seen) -> Answer:
        with self.file.lock():
            answer = self.file.read()
            jobs = self._vanished(answer, seen)
            if jobs:
                asked, found = time.time(), squeue_and_sacct.accounting(jobs)
                known = {**answer.accounting, **{job: (asked, found.get(job)) for job in jobs}}
                answer = replace(answer, accounting=dict(list(known.items())[-MAX_ACCOUNTED:]))
                self.file.write(answer)
        return answer

    def _as_the_folder_shows(
        self, state: JobState | None, job: str, seen: Evidence, asked: float
    ) -> JobState | None:
        """Return the state of a job that was submitted, has started or has finished since Slurm
        was asked.
        """
        is_new = asked < seen.started <= time.time() and (not seen.verdict or seen.is_final)
        if is_new and (state is None or state.phase != LIVE):
            return JobState(job, "RUNNING")
        if state is None and not seen.started and seen.submitted >= asked - self._grace:
            return JobState(job, "PENDING")
        return state


def _has_news(before: Answer, answer: Answer, seen: Seen) -> bool:
    """Whether a job that was live before seems to be over, and its run folder does not say so.

    A job that is being requeued looks over for a moment. Nobody should see that, so Slurm is asked
    once more. One that is cancelled stays so.
    """
    if answer.problem:
        return False
    live = (
        job
        for job in seen
        if job in before.jobs and before.jobs[job].phase != ENDED and not seen[job].is_final
    )
    now = (answer.jobs.get(job) for job in live)
    return any(
        state is None or (state.phase == ENDED and state.state != "CANCELLED") for state in now
    )
