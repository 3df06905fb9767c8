"""The head agent's verdicts: how an attempt ended, whether there is another, and whether the job
may be requeued.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from paceline.agent import rank_failures, retry_policy
from paceline.agent.attempt import Outcome
from paceline.agent.health import preflight
from paceline.agent.rank_failures import Failure, RankExit
from paceline.agent.stop import Requests
from paceline.agent.workers import fork_safety
from paceline.contract import env
from paceline.contract.checkpoint import checkpoint_step, is_complete, list_checkpoints
from paceline.contract.claims import find_successor
from paceline.contract.environment_file import forget_secrets
from paceline.contract.heartbeat_file import RUNNING
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import (
    FAILED,
    STOPPED,
    AttemptFolder,
    JobStartFolder,
    RunFolder,
    write_atomically,
)
from paceline.errors import LaunchError

DAY = 86400.0  # seconds


class VerdictWriter:
    """Writes the verdicts of one job start. A file that cannot be written causes a warning and
    does not end the run.
    """

    def __init__(
        self,
        run: RunFolder,
        launch_spec: LaunchSpec,
        *,
        environ: Mapping[str, str],
        requests: Requests,
        say: Callable[[str], None],
    ) -> None:
        self.run, self.launch_spec, self.say = run, launch_spec, say
        self.requests = requests
        self.job_start_name = environ.get(env.JOB_START) or f"pid-{os.getpid()}"
        self.job_start: JobStartFolder = run.job_start(self.job_start_name)
        # Whether there is a queue to go back to, and other nodes in it. A run that was started by
        # hand inside an allocation has neither.
        self.from_queue = "SLURM_JOB_ID" in environ and not self.job_start_name.startswith("pid-")
        self.may_requeue = self.from_queue and launch_spec.requeue
        self.began = False  # a head agent before this one, which was killed
        self.started = time.monotonic()
        self.first_checkpoint = newest_checkpoint(run)
        self.first_files = _checkpoint_files(run)

    def announce(self) -> None:
        """Leave a sign that there is a head agent, before the others join it: if it is killed, they
        all start again. Whoever starts them counts how often; it costs no restart.
        """
        self.began = self.job_start.agent.exists() and not self.job_start.verdict.exists()
        self.try_write(lambda: self.job_start.path.mkdir(parents=True, exist_ok=True))
        self.try_write(self.job_start.agent.touch)

    def begin(self, *, host: str, newest_attempt: int) -> None:
        """Reserve space for the verdict, once all agents are here. Called by the head agent.

        `newest_attempt` is the number of the newest attempt before the agents met: another agent
        may have begun the next one since.

        A head agent that finds the traces of another was started again because an agent was killed.
        If this ended an attempt, it costs a restart, unless the attempt had advanced the
        checkpoint. Raises LaunchError if none are left.
        """
        for path in (self.job_start.verdict, self.job_start.requeue, self.job_start.unsaved):
            self.try_write(functools.partial(reserve, path))
        ended = self._end_killed_attempt(newest_attempt, host) if self.began else None
        if ended is None:
            return
        allowed = self.launch_spec.max_restarts
        used = retry_policy.count_used(retry_policy.read_history(self.run), self.job_start_name)
        if not allowed or used > allowed:
            why = f"all {allowed} restarts are used up" if allowed else "no restart was requested"
            raise LaunchError(
                f"An agent was killed, and {why}.",
                hint="Check the memory of the nodes. --max-attempts sets how often the run may "
                "start.",
            )
        uses_runtime = fork_safety.uses_runtime(self.launch_spec)
        start = retry_policy.describe_start(self.first_checkpoint, uses_runtime=uses_runtime)
        cost = retry_policy.FREE if ended.advanced else f"{used} of {allowed}"
        self.say(f"an agent was killed: restarting {start} ({cost})")

    def begin_attempt(self, attempt: AttemptFolder, *, saved_before: int) -> None:
        """Write what a later head agent must know about this attempt if this one is killed."""
        self.try_write(
            lambda: write_atomically(attempt.start, f"{self.job_start_name} {saved_before}\n")
        )

    def _end_killed_attempt(self, number: int, host: str) -> retry_policy.AttemptSummary | None:
        """Record that this attempt ended with its agent. Returns None if it did not, or is of
        another job start.
        """
        attempt = self.run.attempt(number)
        if attempt.verdict.exists():
            return None
        try:
            job_start, _, saved_before = (
                attempt.start.read_text(encoding="utf-8").strip().rpartition(" ")
            )
            resumed_from = int(saved_before)
        except (OSError, ValueError):
            return None
        if job_start != self.job_start_name:
            return None
        message = "An agent was killed. The out-of-memory killer may have ended it."
        failure = Failure(retry_policy.KILLED, host, message=message, time=time.time())
        summary = retry_policy.AttemptSummary(
            number=attempt.number,
            cause=retry_policy.KILLED,
            resumed_from=resumed_from,
            # nobody knows its steps any more
            saved=self.first_checkpoint,
            uses_runtime=False,
            job_start=job_start,
        )
        self.try_write(lambda: rank_failures.write_failure(attempt, failure))
        self.try_write(lambda: retry_policy.write_summary(attempt, summary))
        self.try_write(lambda: write_atomically(attempt.verdict, FAILED + "\n"))
        return summary

    def record_attempt(
        self, outcome: Outcome, attempt: AttemptFolder, *, saved_before: int, may_restart: bool
    ) -> None:
        """Write what came of an attempt, and set `outcome.restart_delay` if there is another.

        `may_restart` is false once the user wants the whole run to end.
        """
        if (
            outcome.failure is not None
            and outcome.failure.cause == rank_failures.INTERRUPTED
            and not self.from_queue
        ):
            self.say(outcome.failure.message)
            # the user ended it: that is no failure of the run
            outcome.verdict, outcome.failure = STOPPED, None
        verdict = outcome.verdict
        if outcome.verdict == FAILED:
            failure = outcome.failure or Failure(
                retry_policy.ERROR,
                "?",
                message="ranks ended without an error report",
                time=time.time(),
            )
            outcome.failure = failure = rank_failures.with_stack(failure, attempt)
            self.try_write(lambda: rank_failures.write_failure(attempt, failure))
            self._print(failure, outcome.exits)
            successor = find_successor(self.run, self.job_start_name)
            if successor:
                self.say(f"no restart: job start {successor} has taken over this run")
            elif failure.cause != rank_failures.INTERRUPTED and may_restart:
                decision = self._decide(outcome, failure, attempt, saved_before)
                outcome.restart_delay = decision.delay if decision.restart else None
                if self.launch_spec.max_restarts:
                    self.say(decision.reason)
                if decision.requeue:
                    # Only then: excluded nodes send a failed run back into the queue to get rid of
                    # them.
                    self.try_write(
                        lambda: preflight.exclude_nodes(self.job_start, decision.exclude)
                    )
                    verdict = STOPPED if self.from_queue else verdict
        self.try_write(lambda: write_atomically(attempt.verdict, outcome.verdict + "\n"))
        if outcome.verdict != FAILED:
            self._report_unsaved(outcome)
        if outcome.verdict == STOPPED:
            self.write_stopped(progress=self._has_progressed(outcome))
        elif outcome.restart_delay is None:
            self.write_verdict(verdict)

    def _report_unsaved(self, outcome: Outcome) -> None:
        """Say so, and leave a mark in reserved space, if the last state could not be saved: the
        disk may be full.
        """
        steps = [rank_exit.unsaved for rank_exit in outcome.exits if rank_exit.unsaved is not None]
        if steps:
            text = f"the last state (step {max(steps)}) could not be saved"
            self.say(f"warning: {text}")
            self.try_write(lambda: write_reserved(self.job_start.unsaved, text + "\n"))

    def write_stopped(self, *, progress: bool) -> None:
        """Write the job start's verdict after a stop: `stopped`, or `failed` after too many
        without progress.
        """
        path = self.run.stops_without_progress
        if progress or not self.may_requeue:
            self.try_write(lambda: path.unlink(missing_ok=True))
            self.write_verdict(STOPPED)
            return
        count = self._read_count(path) + 1
        self.try_write(lambda: write_atomically(path, f"{count}\n"))
        if count < retry_policy.MAX_STOPS_WITHOUT_PROGRESS:
            self.write_verdict(STOPPED)
            return
        self._report_no_requeue(
            f"the run was stopped {count} times in a row before it saved anything; request more "
            "time, or save more "
            "often"
        )
        self.write_verdict(FAILED)

    def _report_no_requeue(self, reason: str) -> None:
        """Say why the run does not go back into the queue, on the console and in `paceline ps` and
        `show`.
        """
        self.say(f"not requeued: {reason}")
        self.try_write(lambda: self.job_start.path.mkdir(parents=True, exist_ok=True))
        self.try_write(lambda: write_atomically(self.job_start.requeue_failed, reason + "\n"))

    def write_verdict(self, verdict: str) -> None:
        """Write whether the batch script may requeue the job, then, even if that fails, the job
        start's verdict.
        """
        limit = self.launch_spec.requeues_per_day
        if verdict == STOPPED and self.may_requeue and self._requeues_today() >= limit:
            self._report_no_requeue(
                f"the run was requeued {limit} times within a day; to allow more, set "
                "requeues_per_day in [resume]"
            )
            verdict = FAILED

        def write() -> None:
            self.job_start.path.mkdir(parents=True, exist_ok=True)
            write_reserved(self.job_start.verdict, verdict + "\n")

        self.try_write(lambda: self._write_requeue(verdict))
        self.try_write(write)
        self.try_write(lambda: release(self.job_start.unsaved))
        self._forget_secrets(verdict)

    def _forget_secrets(self, verdict: str) -> None:
        """Once no later start needs them. Slurm may requeue a job that is ended from outside.

        A SIGTERM that comes later says nothing: srun sends one when the other agents have failed.
        """
        may_start_again = self.job_start.requeue.exists() or self.requests.by_term
        if self.run.cancelled.exists() or (verdict != STOPPED and not may_start_again):
            forget_secrets(self.run.environment)

    def try_write(self, action: Callable[[], object]) -> None:
        """Change something in the run folder. A full disk or a missing folder causes a warning."""
        try:
            action()
        except OSError as problem:
            self.say(
                f"warning: cannot write {problem.filename or self.run.path}: {problem.strerror}"
            )

    def _write_requeue(self, verdict: str) -> None:
        lists = [job_start.excluded_nodes for job_start in self.run.job_starts()]
        lists = [] if self.launch_spec.fixed_nodes else [path for path in lists if path.exists()]
        allowed = retry_policy.may_requeue(
            verdict,
            wanted=self.may_requeue,
            can_exclude=self.job_start.excluded_nodes in lists,
            exclusions=len(lists),
        )
        if not allowed:
            self.job_start.requeue.unlink(missing_ok=True)
            release(self.job_start.requeue)
            return
        self.job_start.path.mkdir(parents=True, exist_ok=True)
        exclude = sorted(
            {host for path in lists for host in path.read_text(encoding="utf-8").split()}
        )
        write_reserved(self.job_start.requeue, ",".join(exclude) + "\n")

    def _requeues_today(self) -> int:
        """Count the other job starts that went back into the queue within a day."""
        others = [
            each.requeue for each in self.run.job_starts() if each.path != self.job_start.path
        ]
        yesterday = time.time() - DAY
        return sum(1 for path in others if path.exists() and path.stat().st_mtime > yesterday)

    @staticmethod
    def _read_count(path: Path) -> int:
        try:
            return int(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return 0

    def _has_progressed(self, outcome: Outcome) -> bool:
        steps = [rank_exit.step for rank_exit in outcome.exits if rank_exit.state >= RUNNING]
        return retry_policy.has_progressed(
            saved=newest_checkpoint(self.run) > self.first_checkpoint
            or _checkpoint_files(self.run) != self.first_files,
            stepped=max(steps) > max(self.first_checkpoint, 0) if steps else None,
            says_saved=outcome.stop_requested and any(each.says_saved for each in outcome.exits),
            seconds=time.monotonic() - self.started,
        )

    def _print(self, failure: Failure, exits: Sequence[RankExit]) -> None:
        if failure.cause == rank_failures.INTERRUPTED:
            self.say(failure.message)
            return
        on_console = self._is_on_console(failure.rank)
        # a stack that the rank did not print itself
        with_traceback = not on_console or failure.code is None
        consequences = [
            each.rank
            for each in exits
            if each.failure is not None
            and each.failure.is_consequence
            and not failure.is_consequence
            and self._is_on_console(each.rank)
        ]
        self.say(
            failure.format(
                self.launch_spec.world_size,
                with_traceback=with_traceback,
                consequences=consequences,
            )
        )
        if self.launch_spec.world_size > 1 and (hint := failure.hint(self.launch_spec.style)):
            self.say(hint)

    def _is_on_console(self, rank: int | None) -> bool:
        return self.launch_spec.tee == "all" or (self.launch_spec.tee == "0" and rank == 0)

    def _decide(
        self, outcome: Outcome, failure: Failure, attempt: AttemptFolder, saved_before: int
    ) -> retry_policy.Decision:
        in_session = any(
            rank_exit.in_session or rank_exit.state >= RUNNING for rank_exit in outcome.exits
        )
        summary = retry_policy.AttemptSummary(
            number=attempt.number,
            cause=failure.cause,
            error=failure.error,
            step=last_step(outcome),
            resumed_from=saved_before,
            saved=newest_checkpoint(self.run),
            hosts=[failure.host],
            uses_runtime=in_session or fork_safety.uses_runtime(self.launch_spec),
            job_start=self.job_start_name,
        )
        self.try_write(lambda: retry_policy.write_summary(attempt, summary))
        earlier = [
            each for each in retry_policy.read_history(self.run) if each.number != attempt.number
        ]
        # Once an agent is killed, srun sends SIGTERM to the others. If the batch shell got one too,
        # it starts no more.
        stopped_by_srun = (
            outcome.agent_killed and self.from_queue and not self.job_start.stop.exists()
        )
        return retry_policy.decide(
            [*earlier, summary],
            self.launch_spec.max_restarts,
            other_nodes=self.from_queue,
            stop_requested=outcome.stop_requested and not stopped_by_srun,
        )


def _checkpoint_files(run: RunFolder) -> set[tuple[str, int]]:
    """Return what is in the checkpoint folder, which scripts without the runtime may use too."""
    try:
        return {
            (entry.name, entry.stat(follow_symlinks=False).st_mtime_ns)
            for entry in os.scandir(run.checkpoints)
        }
    except OSError:
        return set()


def last_step(outcome: Outcome) -> int | None:
    """Return the last completed step of the failed rank; without one, of the rank that got
    furthest.
    """
    if outcome.failure is not None and outcome.failure.step is not None:
        return outcome.failure.step
    steps = (rank_exit.step for rank_exit in outcome.exits if rank_exit.state >= RUNNING)
    return max(steps, default=None)


def newest_checkpoint(run: RunFolder) -> int:
    """Return the step of the newest complete checkpoint, or -1 if there is none."""
    complete = filter(is_complete, list_checkpoints(run.checkpoints))
    steps = (checkpoint_step(path.name) for path in complete)
    return next((step for step in steps if step is not None), -1)


# -- files that can be written when the disk is full

RESERVED_BYTES = 4096


def reserve(path: Path) -> None:
    """Reserve disk space for a small file, which `write_reserved` writes."""
    write_atomically(_reserve_of(path), " " * RESERVED_BYTES)


def write_reserved(path: Path, text: str) -> None:
    """Write a file as `write_atomically` does, into the space that was reserved for it, if any."""
    reserved = _reserve_of(path)
    try:
        with open(reserved, "r+", encoding="utf-8") as file:  # its blocks are allocated already
            file.write(text)
            file.truncate()
        os.replace(reserved, path)
    except FileNotFoundError:
        write_atomically(path, text)


def release(path: Path) -> None:
    """Give back the space that was reserved for a file."""
    _reserve_of(path).unlink(missing_ok=True)


def _reserve_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.reserved")
