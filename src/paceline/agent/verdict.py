"""What came of an attempt, in writing, and whether there will be another: the head's part."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.agent import failures, restart_policy
from paceline.agent.attempt import Outcome
from paceline.agent.failures import Failure
from paceline.agent.health import preflight
from paceline.agent.workers import fork_safety
from paceline.contract import env
from paceline.contract.checkpoint.names import CHECKPOINT_MARKER, checkpoint_step
from paceline.contract.heartbeat_file import RUNNING, SAVED_AND_STOPPED
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import AttemptFolder, JobStartFolder, RunFolder, write_atomically
from paceline.contract.verdict import FAILED, STOPPED


@dataclass(frozen=True)
class Next:
    """What follows an attempt: another one after a wait, or nothing."""

    relaunch: bool
    wait: float = 0.0


class Conclusions:
    """Verdicts of one job start. What cannot be written is said, and does not end the run."""

    def __init__(
        self,
        run: RunFolder,
        launch_spec: LaunchSpec,
        *,
        environ: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        self.run, self.launch_spec, self.say = run, launch_spec, say
        self.job_start_name = environ.get(env.JOB_START) or f"pid-{os.getpid()}"
        self.job_start: JobStartFolder = run.job_start(self.job_start_name)
        # Whether there is a queue to go back to, and other nodes in it. A run that was started by hand inside of
        # an allocation has neither.
        self.from_queue = "SLURM_JOB_ID" in environ and not self.job_start_name.startswith("pid-")
        self.began = time.monotonic()
        self.saved_at_first = newest_checkpoint(run)

    def conclude(
        self, outcome: Outcome, attempt: AttemptFolder, *, saved_before: int, may_go_on: bool
    ) -> Next:
        """Write what came of an attempt. `may_go_on` is false once somebody wants the whole run to end."""
        follows = Next(False)
        leg_verdict = outcome.verdict
        if outcome.verdict == FAILED:
            failure = outcome.failure or Failure(
                restart_policy.ERROR, "?", message="ranks ended without a word", time=time.time()
            )
            outcome.failure = failure
            self.quietly(lambda: failures.write_failure(attempt, failure))
            self._tell(failure)
            if failure.cause != failures.INTERRUPTED and may_go_on:
                decision = self._decide(outcome, failure, attempt, saved_before)
                follows = Next(decision.relaunch, decision.wait_seconds)
                if self.launch_spec.max_restarts:
                    self.say(decision.reason)
                if decision.requeue:
                    # Not otherwise: nodes that are named send a failed run back into the queue, to get rid of them.
                    self.quietly(lambda: preflight.mark_unfit(self.job_start, decision.exclude))
                    leg_verdict = STOPPED if self.from_queue else leg_verdict
        self.quietly(lambda: write_atomically(attempt.verdict, outcome.verdict + "\n"))
        if outcome.verdict == STOPPED:
            self.stopped(in_vain=self._in_vain(outcome))
        elif not follows.relaunch:
            self.write_verdict(leg_verdict)
        return follows

    def stopped(self, *, in_vain: bool) -> None:
        """The job start's verdict after a stop: back into the queue, unless that has been in vain too often."""
        path = self.run.path / "stops-in-vain"
        if not in_vain or not self.from_queue:
            self.quietly(lambda: path.unlink(missing_ok=True))
            self.write_verdict(STOPPED)
            return
        try:
            times = int(path.read_text(encoding="utf-8")) + 1
        except (OSError, ValueError):
            times = 1
        self.quietly(lambda: write_atomically(path, f"{times}\n"))
        if times < restart_policy.MOST_STOPS_IN_VAIN:
            self.write_verdict(STOPPED)
            return
        self.say(
            f"it was stopped {times} times in a row before anything was saved, and does not go back into the queue: "
            "ask for more time, or save more often"
        )
        self.write_verdict(FAILED)

    def write_verdict(self, verdict: str) -> None:
        """Write the job start's verdict, and before it whether the batch script may requeue the job."""

        def write() -> None:
            self.job_start.path.mkdir(parents=True, exist_ok=True)
            write_atomically(self.job_start.verdict, verdict + "\n")

        self.quietly(lambda: self._write_requeue(verdict))
        self.quietly(write)

    def _write_requeue(self, verdict: str) -> None:
        reports = [] if self.launch_spec.fixed_nodes else sorted(self.run.path.glob("job-starts/*/unfit"))
        allowed = restart_policy.may_requeue(
            verdict, can_exclude=self.job_start.unfit in reports, exclusions=len(reports)
        )
        if not self.from_queue or not allowed:
            self.job_start.requeue.unlink(missing_ok=True)
            return
        self.job_start.path.mkdir(parents=True, exist_ok=True)
        exclude = sorted({host for report in reports for host in report.read_text(encoding="utf-8").split()})
        write_atomically(self.job_start.requeue, ",".join(exclude) + "\n")

    def quietly(self, action: Callable[[], object]) -> None:
        """Do something to the folder; a full disk or a folder that is gone is said, and does not end the run."""
        try:
            action()
        except OSError as problem:
            self.say(f"warning: cannot write {problem.filename or self.run.path}: {problem.strerror}")

    def _in_vain(self, outcome: Outcome) -> bool:
        if newest_checkpoint(self.run) > self.saved_at_first:
            return False
        if not outcome.stop_asked:  # the script's own wish
            return time.monotonic() - self.began < restart_policy.SHORT_JOB_START
        # Only the runtime stops with code 0; torchrun's ranks look alike, whoever stopped them.
        return self.launch_spec.style not in ("torchrun", "mpirun") and all(
            end.code == 0 and end.state == SAVED_AND_STOPPED and end.step == 0 for end in outcome.ends
        )

    def _tell(self, failure: Failure) -> None:
        if failure.cause == failures.INTERRUPTED:
            self.say(failure.message)
            return
        shown = self.launch_spec.tee == "all" or (self.launch_spec.tee == "0" and failure.rank == 0)
        self.say(failure.text(self.launch_spec.world_size, with_trace=not shown))

    def _decide(
        self, outcome: Outcome, failure: Failure, attempt: AttemptFolder, saved_before: int
    ) -> restart_policy.Decision:
        source = fork_safety.read_source(
            self.launch_spec.program,
            is_module=self.launch_spec.is_module,
            import_path=self.launch_spec.import_path,
        )
        stepped = any(end.state >= RUNNING for end in outcome.ends)
        summary = restart_policy.AttemptSummary(
            number=attempt.number, cause=failure.cause, error=failure.error, step=step_of(outcome),
            resumed_from=saved_before, saved=newest_checkpoint(self.run), hosts=[failure.host],
            beats=stepped or "paceline" in source, job_start=self.job_start_name,
        )  # fmt: skip
        self.quietly(lambda: restart_policy.remember(attempt, summary))
        earlier = [each for each in restart_policy.recall(self.run) if each.number != attempt.number]
        return restart_policy.decide(
            [*earlier, summary], self.launch_spec.max_restarts, elsewhere=self.from_queue
        )


def step_of(outcome: Outcome) -> int | None:
    """The step that was done last, as the rank that failed saw it, else the one furthest on."""
    if outcome.failure is not None and outcome.failure.step is not None:
        return outcome.failure.step
    return max((end.step for end in outcome.ends if end.state >= RUNNING), default=None)


def newest_checkpoint(run: RunFolder) -> int:
    """Step of the newest complete checkpoint, -1 when there is none."""
    steps = [-1]
    try:
        for entry in os.scandir(run.checkpoints):
            step = checkpoint_step(entry.name)
            if step is not None and Path(entry.path, CHECKPOINT_MARKER).exists():
                steps.append(step)
    except OSError:
        pass
    return max(steps)
