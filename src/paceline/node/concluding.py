"""What came of an attempt, in writing, and whether there will be another: the head's part."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline import contract
from paceline.contract import (
    FAILED,
    SAVED_AND_STOPPED,
    STOPPED,
    AttemptFolder,
    LegFolder,
    Order,
    RunFolder,
    write_atomically,
)
from paceline.node import ending, hazards, preflight, relaunch
from paceline.node.ending import Failure
from paceline.node.supervising import Outcome


@dataclass(frozen=True)
class Next:
    """What follows an attempt: another one after a wait, or nothing."""

    relaunch: bool
    wait: float = 0.0


class Conclusions:
    """Verdicts of one leg. What cannot be written is said, and does not end the run."""

    def __init__(
        self, run: RunFolder, order: Order, *, environ: Mapping[str, str], say: Callable[[str], None]
    ) -> None:
        self.run, self.order, self.say = run, order, say
        self.leg_name = environ.get(contract.LEG) or f"pid-{os.getpid()}"
        self.leg: LegFolder = run.leg(self.leg_name)
        # Whether there is a queue to go back to, and other nodes in it. A run that was started by hand inside of
        # an allocation has neither.
        self.from_queue = "SLURM_JOB_ID" in environ and not self.leg_name.startswith("pid-")
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
                relaunch.ERROR, "?", message="ranks ended without a word", time=time.time()
            )
            outcome.failure = failure
            self.quietly(lambda: ending.write_failure(attempt, failure))
            self._tell(failure)
            if failure.cause != ending.INTERRUPTED and may_go_on:
                decision = self._decide(outcome, failure, attempt, saved_before)
                follows = Next(decision.relaunch, decision.wait_seconds)
                if self.order.max_restarts:
                    self.say(decision.reason)
                if decision.requeue:
                    # Not otherwise: nodes that are named send a failed run back into the queue, to get rid of them.
                    self.quietly(lambda: preflight.mark_unfit(self.leg, decision.exclude))
                    leg_verdict = STOPPED if self.from_queue else leg_verdict
        self.quietly(lambda: write_atomically(attempt.verdict, outcome.verdict + "\n"))
        if outcome.verdict == STOPPED:
            self.stopped(in_vain=self._in_vain(outcome))
        elif not follows.relaunch:
            self.write_verdict(leg_verdict)
        return follows

    def stopped(self, *, in_vain: bool) -> None:
        """The leg's verdict after a stop: back into the queue, unless that has been for nothing time and again."""
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
        if times < relaunch.MOST_STOPS_IN_VAIN:
            self.write_verdict(STOPPED)
            return
        self.say(
            f"it was stopped {times} times in a row before anything was saved, and does not go back into the queue: "
            "ask for more time, or save more often"
        )
        self.write_verdict(FAILED)

    def write_verdict(self, verdict: str) -> None:
        """The leg's."""

        def write() -> None:
            self.leg.path.mkdir(parents=True, exist_ok=True)
            write_atomically(self.leg.verdict, verdict + "\n")

        self.quietly(write)

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
            return time.monotonic() - self.began < relaunch.SHORT_LEG
        # Only the runtime stops with code 0; torchrun's ranks look alike, whoever stopped them.
        return self.order.style not in ("torchrun", "mpirun") and all(
            end.code == 0 and end.state == SAVED_AND_STOPPED and end.step == 0 for end in outcome.ends
        )

    def _tell(self, failure: Failure) -> None:
        if failure.cause == ending.INTERRUPTED:
            self.say(failure.message)
            return
        shown = self.order.tee == "all" or (self.order.tee == "0" and failure.rank == 0)
        self.say(failure.text(self.order.world_size, with_trace=not shown))

    def _decide(
        self, outcome: Outcome, failure: Failure, attempt: AttemptFolder, saved_before: int
    ) -> relaunch.Decision:
        source = hazards.source_of(
            self.order.program, is_module=self.order.is_module, import_path=self.order.import_path
        )
        stepped = any(end.state >= contract.RUNNING for end in outcome.ends)
        summary = relaunch.AttemptSummary(
            number=attempt.number, cause=failure.cause, error=failure.error, step=step_of(outcome),
            resumed_from=saved_before, saved=newest_checkpoint(self.run), hosts=[failure.host],
            beats=stepped or "paceline" in source, leg=self.leg_name,
        )  # fmt: skip
        self.quietly(lambda: relaunch.remember(attempt, summary))
        earlier = [each for each in relaunch.recall(self.run) if each.number != attempt.number]
        return relaunch.decide([*earlier, summary], self.order.max_restarts, elsewhere=self.from_queue)


def step_of(outcome: Outcome) -> int | None:
    """The step that was done last, as the rank that failed saw it, else the one furthest on."""
    if outcome.failure is not None and outcome.failure.step is not None:
        return outcome.failure.step
    return max((end.step for end in outcome.ends if end.state >= contract.RUNNING), default=None)


def newest_checkpoint(run: RunFolder) -> int:
    """Step of the newest complete checkpoint, -1 when there is none."""
    steps = [-1]
    try:
        for entry in os.scandir(run.checkpoints):
            step = contract.checkpoint_step(entry.name)
            if step is not None and Path(entry.path, contract.CHECKPOINT_MARKER).exists():
                steps.append(step)
    except OSError:
        pass
    return max(steps)
