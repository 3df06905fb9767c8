"""Carrying an order out: meet the other launchers, then attempt after attempt until there is a verdict."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline import contract
from paceline.contract import DONE, FAILED, INTERRUPTED_EXIT, STOPPED, Order, RunFolder, write_atomically
from paceline.errors import LaunchError, PacelineError
from paceline.node import ending, hazards, network, preflight, relaunch
from paceline.node.beats import Beats
from paceline.node.ending import Failure
from paceline.node.events import Events
from paceline.node.forking import ForkedRanks, Interrupted, Unsafe
from paceline.node.meeting import Absent, Meeting, await_verdict, join
from paceline.node.place import Place, find_place
from paceline.node.signals import Requests
from paceline.node.starting import FreshRanks, Launch, Starter
from paceline.node.streams import Streams
from paceline.node.supervising import Outcome, Supervision
from paceline.node.torchrun import TorchrunRanks

if TYPE_CHECKING:  # most runs stage nothing
    from paceline.node.staging.node_data import NodeData


@dataclass(frozen=True)
class Next:
    """What follows an attempt: another one after a wait, or nothing."""

    relaunch: bool
    wait: float = 0.0


class Launcher:
    """One launcher of a run. The head (index 0) also judges, decides and writes."""

    def __init__(
        self,
        run: RunFolder,
        order: Order,
        *,
        environ: Mapping[str, str],
        requests: Requests,
        zygote: ForkedRanks | None,
    ) -> None:
        self.run, self.order, self.environ, self.requests = run, order, environ, requests
        self.zygote = zygote
        self.leg_name = environ.get(contract.LEG) or f"pid-{os.getpid()}"
        self.leg = run.leg(self.leg_name)
        self.place: Place | None = None
        self.meeting: Meeting | None = None
        self.starter: Starter | None = zygote
        self.beats: Beats | None = None
        self.data: NodeData | None = None
        self.events = Events(run.events, "launcher-0")
        self.number = 0

    def say(self, text: str) -> None:
        """A word to the person at the console."""
        try:
            print(f"paceline: {text}", file=sys.stderr, flush=True)
        except OSError:
            pass  # the console is gone; the run is not

    # -- the whole -------------------------------------------------------------------------------------

    def carry_out(self) -> int:
        """Returns the exit code: 0 for done and stopped, 1 for failed, 130 when interrupted."""
        self.place = place = find_place(self.order, self.environ)
        self.events = Events(self.run.events, f"launcher-{place.index}")
        facts = preflight.gather(place, folder=self.run.path, environ=self.environ)
        facts["attempt"] = len(self.run.attempts()) and self.run.attempts()[-1].number
        self.meeting = join(place, self.environ, facts, give_up=lambda: self.requests.end_now)
        self.number = self.meeting.roster[0]["attempt"]
        self.beats = Beats(place.local_world_size)
        self.events.write("started", leg=self.leg_name, host=place.host, pid=os.getpid(), index=place.index)
        if place.is_head:
            self._quietly(lambda: self.leg.path.mkdir(parents=True, exist_ok=True))
        self._check_nodes()
        if self.order.data and not self._bring_data():
            return 0
        while True:
            outcome, follows = self._attempt()
            if not follows.relaunch:
                return self._exit_code(outcome)
            if not self._rest(follows.wait):
                return INTERRUPTED_EXIT if self.requests.interrupt else 1

    def give_up(self, problem: PacelineError) -> None:
        """The launcher itself cannot go on: say so, here and in the folder."""
        self.say(str(problem))
        if self.meeting is not None and self.meeting.place.count > 1:
            host = self.place.host if self.place else "?"
            failure = Failure(relaunch.ERROR, host, message=problem.message, time=time.time())
            self.meeting.say({"kind": "failed", "failure": vars(failure)})
        self.events.write("failed", why=problem.message)
        if isinstance(problem, Absent):
            self._quietly(lambda: preflight.mark_unfit(self.leg, problem.hosts))
        if self.place is None or self.place.is_head:
            self._write_verdict(FAILED)
        elif self.meeting is not None:
            # A scheduler may end the whole step when one launcher fails: the head is to write the verdict first.
            await_verdict(self.leg, lambda: self.requests.end_now)

    def close(self) -> None:
        if self.data is not None:
            self._quietly(self.data.leave)
        for each in {id(part): part for part in (self.starter, self.zygote, self.meeting)}.values():
            if each is not None:
                each.close()
        if self.beats is not None:
            self.beats.remove()

    # -- parts -----------------------------------------------------------------------------------------

    def _check_nodes(self) -> None:
        """Preflight: all launchers see the same facts and so come to the same end; the head speaks."""
        assert self.place is not None
        assert self.meeting is not None
        if not self.order.check:
            return
        problems = preflight.judge(self.order, self.meeting.roster)
        for problem in problems:
            if not problem.fatal and self.place.is_head:
                self.say(f"warning: {problem}")
        unfit = preflight.unfit_hosts(problems)
        if not unfit:
            return
        if self.place.is_head:
            self._quietly(lambda: preflight.mark_unfit(self.leg, unfit))
            self.say(
                "some nodes are not fit for this run\n" + preflight.table(self.order, self.meeting.roster)
            )
        raise LaunchError("; ".join(str(problem) for problem in problems if problem.fatal))

    def _bring_data(self) -> bool:
        """Stage in, while the zygote imports torch. False when a stop was asked for meanwhile: nothing has begun."""
        from paceline.node.staging.node_data import Around, NodeData

        assert self.place is not None
        assert self.meeting is not None
        self.data = NodeData(Around(
            self.run, self.order, self.place, self.environ, self.meeting, self.requests, self.leg, self.events,
            self.say,
        ))  # fmt: skip
        if self.data.bring():
            return True
        if self.place.is_head:
            self.say("asked to stop while data was staged: no rank was started")
            self._write_verdict(STOPPED)
        return False

    def _attempt(self) -> tuple[Outcome, Next]:
        assert self.place is not None
        assert self.meeting is not None
        assert self.beats is not None
        self.number += 1
        attempt = self.run.attempt(self.number)
        self._quietly(lambda: attempt.path.mkdir(parents=True, exist_ok=True))
        self.beats.begin(self.number)
        starter = self._starter()
        master = self.meeting.prepare(self.number)
        extra = network.network_variables(
            nodes=self.order.nodes, peer=self.meeting.peer, runtime=self.order.runtime,
            environ={**self.environ, **self.order.variables},
        )  # fmt: skip
        if self.data is not None:
            extra = {**extra, **self.data.variables}
        launch = Launch(
            self.order, self.place, attempt, beat=str(self.beats.path), address=master.addr, port=master.port,
            environ=self.environ, extra=extra,
        )  # fmt: skip
        saved_before = newest_checkpoint(self.run)
        streams = Streams(
            log_path=launch.log, shared_log=attempt.node_log(self.place.node) if launch.shares_log else None,
            tee=self.order.tee, warn=lambda text: self.say(f"warning: {text}"),
        )  # fmt: skip
        supervision = Supervision(
            launch, starter=starter, streams=streams, beats=self.beats, meeting=self.meeting,
            requests=self.requests, leg=self.leg, events=self.events, say=self.say,
        )  # fmt: skip
        try:
            outcome = supervision.run()
        finally:
            starter.sweep()
            streams.close()
            self._quietly(lambda: _remove_empty(attempt.path.glob("stacks-*.txt")))
        if not self.place.is_head:
            told = outcome.next or {"verdict": FAILED, "next": None}
            outcome.verdict = told["verdict"]
            return outcome, Next(**told["next"]) if told["next"] else Next(False)
        follows = self._conclude(outcome, attempt, saved_before)
        return outcome, follows

    def _starter(self) -> Starter:
        """Made once; a relaunch uses the same."""
        assert self.beats is not None
        if self.zygote is not None and self.starter is self.zygote:
            try:
                self.zygote.wait_until_ready(lambda: self.requests.end_now)
                return self.zygote
            except Interrupted:
                raise LaunchError("interrupted before the ranks were started") from None
            except Unsafe as why:
                self.say(f"{why}: ranks are started as fresh processes instead of being forked")
                self.zygote.close()
                self.zygote = self.starter = None
        if self.starter is None:
            if self.order.style == "torchrun" or (self.order.style == "mpirun" and not self._starts_one()):
                self.starter = TorchrunRanks(self.beats)
            else:
                self.starter = FreshRanks(per_node=self.order.style == "spawn")
        return self.starter

    def _starts_one(self) -> bool:
        """mpirun starts a launcher per rank, or one per node, whose ranks are then torchrun's."""
        assert self.place is not None
        return self.place.count == self.order.world_size

    def _conclude(self, outcome: Outcome, attempt: contract.AttemptFolder, saved_before: int) -> Next:
        """The head: what came of the attempt, in writing; and whether there will be another."""
        assert self.meeting is not None
        follows = Next(False)
        leg_verdict = outcome.verdict
        failure = outcome.failure
        if outcome.verdict == FAILED:
            failure = failure or Failure(
                relaunch.ERROR, "?", message="ranks ended without a word", time=time.time()
            )
            outcome.failure = failure
            self._quietly(lambda: ending.write_failure(attempt, failure))
            self._tell(failure)
            if failure.cause != ending.INTERRUPTED and not self.requests.end_now:
                decision = self._decide(outcome, attempt, saved_before)
                follows = Next(decision.relaunch, decision.wait_seconds)
                if self.order.max_restarts:
                    self.say(decision.reason)
                if not decision.relaunch:
                    self._quietly(lambda: preflight.mark_unfit(self.leg, decision.exclude))
                    if decision.requeue and "SLURM_JOB_ID" in self.environ:
                        leg_verdict = STOPPED
        self._quietly(lambda: write_atomically(attempt.verdict, outcome.verdict + "\n"))
        if not follows.relaunch:
            self._write_verdict(leg_verdict)
        told = {} if failure is None else {"rank": failure.rank, "host": failure.host, "how": failure.error}
        self.events.write(outcome.verdict, attempt=self.number, step=_step_of(outcome), **told)
        if follows.relaunch:
            self.events.write("relaunched", attempt=self.number + 1, wait=follows.wait)
        self.meeting.say({
            "kind": "verdict", "verdict": outcome.verdict,
            "next": {"relaunch": True, "wait": follows.wait} if follows.relaunch else None,
        })  # fmt: skip
        return follows

    def _tell(self, failure: Failure) -> None:
        if failure.cause == ending.INTERRUPTED:
            self.say(failure.message)
            return
        shown = self.order.tee == "all" or (self.order.tee == "0" and failure.rank == 0)
        self.say(failure.text(self.order.world_size, with_trace=not shown))

    def _decide(
        self, outcome: Outcome, attempt: contract.AttemptFolder, saved_before: int
    ) -> relaunch.Decision:
        failure = outcome.failure
        assert failure is not None
        source = hazards.source_of(
            self.order.program, is_module=self.order.is_module, import_path=self.order.import_path
        )
        stepped = any(end.state >= contract.RUNNING for end in outcome.ends)
        summary = relaunch.AttemptSummary(
            number=attempt.number, cause=failure.cause, error=failure.error, step=_step_of(outcome),
            resumed_from=saved_before, saved=newest_checkpoint(self.run), hosts=[failure.host],
            beats=stepped or "paceline" in source, leg=self.leg_name,
        )  # fmt: skip
        self._quietly(lambda: relaunch.remember(attempt, summary))
        earlier = [each for each in relaunch.recall(self.run) if each.number != attempt.number]
        return relaunch.decide(
            [*earlier, summary], self.order.max_restarts, elsewhere="SLURM_JOB_ID" in self.environ
        )

    def _rest(self, seconds: float) -> bool:
        """Back off before a relaunch; False when told to end, or to stop, meanwhile."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.requests.end_now and not self.requests.stop:
            time.sleep(0.05)
        return not self.requests.end_now

    def _exit_code(self, outcome: Outcome) -> int:
        if self.requests.interrupt:
            return INTERRUPTED_EXIT
        return 0 if outcome.verdict in (DONE, STOPPED) else 1

    def _write_verdict(self, verdict: str) -> None:
        def write() -> None:
            self.leg.path.mkdir(parents=True, exist_ok=True)
            write_atomically(self.leg.verdict, verdict + "\n")

        self._quietly(write)

    def _quietly(self, action: Callable[[], object]) -> None:
        """Do something to the folder; a full disk or a folder that is gone is said, and does not end the run."""
        try:
            action()
        except OSError as problem:
            self.say(f"warning: cannot write {problem.filename or self.run.path}: {problem.strerror}")


def _step_of(outcome: Outcome) -> int | None:
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


def _remove_empty(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.stat().st_size == 0:
            path.unlink()
