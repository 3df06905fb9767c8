"""The states of jobs, from one answer of Slurm that all Paceline processes of a user on a machine
share.

One `squeue` for all of the user's jobs counts for the poll interval (60 s), whoever asked. It is
repeated earlier only for a reason: a command has changed the queue; a run folder contradicts the
answer; a job has ended without a verdict, which a job that is being requeued seems to do for a
moment; or a job is missing. `sacct` is asked only for jobs that are missing and have no verdict,
and what it says of ended jobs is kept. A controller that fails or is slow is asked less and less
often, up to every fifth interval, and all processes share that failure too, for at least twice the
time that it took: so no command has to wait for a hanging controller each time, however short the
interval is.

Commands that act on an answer (claims, `--resume`, `--after`, `sweep --resubmit`, `clean`,
`cancel`, `shell`) do not use this: they ask Slurm directly, because a state of a minute ago could
start a run twice, or delete what it needs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from paceline.errors import ClusterError, NoSlurm
from paceline.slurm.answer_cache import Answer, AnswerCache
from paceline.slurm.job_states import squeue_and_sacct
from paceline.slurm.job_states.meanings import ENDED, LIVE, JobState
from paceline.watch import origin
from paceline.watch.scheduler.evidence import Evidence, gather_evidence
from paceline.watch.scheduler.poll_interval import poll_interval

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
    seen = gather_evidence(jobs)
    if not seen:
        return {}
    if (copy := origin.shown()) is not None:
        return origin.read_job_states(copy.base, seen)
    file = AnswerCache.here()
    return (
        squeue_and_sacct.states(seen)
        if file is None
        else SharedAnswer(file, poll_interval()).states(seen)
    )


def query_queue() -> list[JobState]:
    """Return the user's jobs that wait or run, at most a poll interval old."""
    file = AnswerCache.here()
    known = (
        squeue_and_sacct.queue() if file is None else SharedAnswer(file, poll_interval()).queue()
    )
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
        answer = self.file.read()
        counts = answer.asked > self.file.changed()
        if all(
            each.is_closed or (counts and _is_settled(answer, job, each))
            for job, each in seen.items()
        ):
            if answer.problem or self._is_expired(answer):
                seen = {job: each for job, each in seen.items() if not each.is_closed}
            return self._select(answer, seen)
        answer = self._update(seen)
        self._check(answer)
        if self._vanished(answer, seen):
            answer = self._ask_accounting(seen)
        return self._select(answer, seen)

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

    # -- the queue
    # -------------------------------------------------------------------------------------

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
                    time.sleep(self._doubt(answer))
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
        ended = {job for job, state in jobs.items() if state.phase == ENDED}
        earlier = {job for job, state in before.jobs.items() if state.phase == ENDED}
        known = before.confirmed if asked - before.asked < self._doubt(before) else earlier
        slow = time.time() - asked > SLOW
        return Answer(
            asked,
            jobs,
            confirmed=frozenset(ended & known),
            strikes=before.strikes + 1 if slow else 0,
            accounting={job: each for job, each in before.accounting.items() if job not in jobs},
        )

    def _is_stale(self, answer: Answer, seen: Seen) -> bool:
        if self._is_expired(answer):
            return True
        if answer.problem or time.time() - answer.asked < self._doubt(answer):
            return False
        return any(
            self._is_doubtful(answer, job, each) for job, each in seen.items() if not each.is_closed
        )

    def _is_expired(self, answer: Answer) -> bool:
        age = time.time() - answer.asked  # negative after the clock was set back
        return not 0 <= age < self._lifetime(answer) or answer.asked <= self.file.changed()

    def _lifetime(self, answer: Answer) -> float:
        lifetime = self.interval * min(1 << max(answer.strikes - 1, 0), MAX_BACKOFF)
        return max(lifetime, 2 * answer.took) if answer.problem else lifetime

    def _doubt(self, answer: Answer) -> float:
        return self._grace * min(1 << answer.strikes, 8)

    def _is_doubtful(self, answer: Answer, job: str, seen: Evidence) -> bool:
        """Whether a job may be in another state by now than the answer says."""
        state = answer.jobs.get(job)
        if state is None:
            return not seen.is_final and not self._is_accounted(answer, job)
        if state.phase == ENDED:
            return not seen.is_final and job not in answer.confirmed
        if seen.verdict and (state.phase == LIVE or seen.verdict > answer.asked):
            # It is about to end or to go back into the queue: look often at first, then less and
            # less.
            since_verdict = time.time() - seen.verdict
            return since_verdict >= 0 and time.time() - answer.asked > since_verdict / 2
        return False

    # -- accounting
    # ------------------------------------------------------------------------------------

    def _vanished(self, answer: Answer, seen: Seen) -> list[str]:
        """Return the jobs that are not in the queue, without a verdict that says why."""
        missing = (
            job for job, each in seen.items() if job not in answer.jobs and not each.is_final
        )
        return [
            job
            for job in missing
            if not self._is_accounted(answer, job)
            and seen[job].submitted < answer.asked - self._grace
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

    # -- what to show
    # ----------------------------------------------------------------------------------

    def _select(self, answer: Answer, seen: Seen) -> dict[str, JobState]:
        found = {}
        for job, each in seen.items():
            state = answer.jobs.get(job) or answer.accounting.get(job, (0.0, None))[1]
            if (state := self._as_the_folder_shows(state, job, each, answer.asked)) is not None:
                found[job] = state
        return found

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


def _is_settled(answer: Answer, job: str, seen: Evidence) -> bool:
    """Whether a job is over, as the run folder and Slurm have both said.

    Nobody needs to ask for it again, until a command changes the queue: it may have requeued the
    job.
    """
    state = answer.jobs.get(job)
    return seen.is_final and state is not None and state.phase == ENDED


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
