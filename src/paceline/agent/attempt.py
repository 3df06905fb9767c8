"""One attempt, from the start of its ranks to its verdict, as one agent sees it.

One loop looks after all: ends of ranks, requests to stop, words of other agents, the watchdog. It is over when
the ranks here have ended and, on the head, those of all other agents; a member waits for the head's verdict.
"""

from __future__ import annotations

import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.agent import failures, restart_policy
from paceline.agent.failures import Ending, Failure, RankEnd
from paceline.agent.health import watchdog
from paceline.agent.health.heartbeat import Beats
from paceline.agent.rendezvous.rendezvous import Meeting
from paceline.agent.signals import Requests
from paceline.agent.workers import processes
from paceline.agent.workers.group import Exit, Launch, WorkerGroup
from paceline.agent.workers.output import OutputCapture
from paceline.contract.heartbeat_file import READY, RUNNING
from paceline.contract.jsonl import EventWriter
from paceline.contract.run_folder import JobStartFolder
from paceline.contract.verdict import STOPPED_EXIT

TICK = 0.25  # seconds between looks at what cannot wake the loop
TERM_EXPLAINED_WITHIN = 1.0  # a scheduler's TERM reaches ranks and agent one after the other
STACKS_WITHIN = 2.0  # for ranks that hang to write their stacks
OTHERS_WITHIN = 30.0  # for other agents to have ended their ranks, beyond the time to kill


@dataclass
class Outcome:
    """What the head knows at the end of an attempt, and others are told."""

    verdict: str = ""
    failure: Failure | None = None
    ends: list[RankEnd] = field(default_factory=list)
    stop_asked: bool = False
    next: dict[str, Any] | None = None  # a member: what the head said


class Supervision:
    def __init__(
        self,
        launch: Launch,
        *,
        starter: WorkerGroup,
        streams: OutputCapture,
        beats: Beats,
        meeting: Meeting,
        requests: Requests,
        job_start: JobStartFolder,
        events: EventWriter,
        say: Callable[[str], None],
    ) -> None:
        self.launch, self.starter, self.streams, self.beats = launch, starter, streams, beats
        self.meeting, self.requests, self.job_start, self.events, self.say = (
            meeting,
            requests,
            job_start,
            events,
            say,
        )
        self.launch_spec, self.place, self.attempt = launch.launch_spec, launch.place, launch.attempt
        self.ending = Ending(starter, beats, kill_after=self.launch_spec.kill_after)
        self.rank_of = {local_rank: rank for rank, local_rank in launch.ranks()}
        self.spawned = self.launch_spec.style == "spawn"  # by one process per node, which is none of them
        self.waiting_for: set[int] = set()  # local ranks
        self.over: set[int] = set()  # those that have ended
        self.ends: list[RankEnd] = []
        self.failures: list[Failure] = []
        self.stop_asked = False
        self.signalled: dict[int, int] = {}  # pid -> state in which it was last signalled
        self.unexplained: list[Exit] = []  # ended by SIGTERM that nobody here sent
        self.others: dict[int, list[RankEnd]] = {}
        self.told: dict[str, Any] | None = None
        self.panorama = watchdog.Panorama()
        self.dog = watchdog.Watchdog(self.launch_spec.hang_timeout)
        self.looked = 0.0

    # -- the loop --------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        self.waiting_for = set(self.starter.start(self.launch, self.streams))
        self.streams.start()
        self.events.write("ranks", attempt=self.attempt.number, ranks=sorted(self.rank_of.values()))
        said = False
        while True:
            self._wait()
            self._take_requests()
            self._take_exits()
            self._take_words()
            self._watch()
            self.ending.tick()
            if self.waiting_for or self.unexplained:
                continue
            if not said:
                said = True
                self._after_the_last()
            if self.place.is_head and (self._all_others_ended() or self._tired_of_waiting()):
                return self._outcome()
            if not self.place.is_head and (self.told is not None or self._tired_of_waiting()):
                return Outcome(ends=self.ends, failure=failures.first_failure(self.failures), next=self.told)

    def _wait(self) -> None:
        numbers = [self.requests.fileno()]
        for each in (self.starter.fileno(), self.meeting.fileno()):
            if each is not None:
                numbers.append(each)
        busy = self.ending.begun or self.unexplained
        select.select(numbers, [], [], 0.05 if busy else TICK)
        self.requests.drain()

    # -- requests --------------------------------------------------------------------------------------

    def _take_requests(self) -> None:
        if self.requests.end_now and not self.ending.begun:
            what = "interrupted" if self.requests.interrupt else "asked twice to stop"
            self._fail(Failure(failures.INTERRUPTED, self.place.host, message=what, time=time.time()))
        if self.requests.hurry:
            self.ending.hurry()
        if not self.stop_asked:
            by_file = self.place.is_head and self.job_start.stop.exists()
            if by_file or self.requests.stop:
                self.meeting.say({"kind": "stop"})
                self._stop("SIGTERM" if self.requests.stop else "a stop file")
        if self.stop_asked and not self.ending.begun:
            self._pass_stop_on()

    def _stop(self, by: str) -> None:
        self.stop_asked = True
        self.beats.ask_to_stop()
        if self.place.is_head:
            self.say(f"asked to stop (by {by}): the ranks save and stop")
        self.events.write("stop_asked", by=by)
        self.unexplained, late = [], self.unexplained
        for each in late:
            self._ended(each)

    def _pass_stop_on(self) -> None:
        """Each rank hears it once it can, and once more when its runtime is there to listen."""
        for local_rank in set(self.rank_of) - self.over:
            beat = self.beats.read(local_rank)
            heard = self.signalled.get(beat.pid, 0)
            if beat.state < READY or beat.state > RUNNING or heard >= beat.state:
                continue
            self.signalled[beat.pid] = beat.state
            processes.send_signal(beat.pid, signal.SIGUSR1)
            if self.requests.by_term and beat.state == READY:
                # No runtime has shown itself. A script's own handler, or Python's default, takes SIGTERM.
                processes.send_signal(beat.pid, signal.SIGTERM)

    # -- ends of ranks ---------------------------------------------------------------------------------

    def _take_exits(self) -> None:
        if self.starter.has_failed_rank() and not self.ending.begun:
            self.ending.begin()
        for each in self.starter.poll():
            self.waiting_for.discard(each.local_rank)
            self.over |= set(self.rank_of) if self.spawned else {each.local_rank}
            by_term = each.code in failures.ENDED_BY_TERM
            if by_term and not self.stop_asked and not self.ending.begun:
                self.unexplained.append(each)
            else:
                self._ended(each)
        for each in list(self.unexplained):
            if self.ending.begun or time.time() - each.time > TERM_EXPLAINED_WITHIN:
                self.unexplained.remove(each)
                self._ended(each, explained=False)

    def _ended(self, each: Exit, *, explained: bool = True) -> None:
        rank = self.rank_of[each.local_rank]
        beat = self.beats.read(each.local_rank)
        failure = None
        if each.code < 0 and self.ending.begun and self.attempt.error(rank).exists():
            # It had failed by itself, and was slow to leave.
            each = Exit(each.local_rank, 1, each.time)
        if self._is_failure(each, explained=explained):
            self.ending.begin()
            failure = self._failure_of(each)
        self.ends.append(RankEnd(rank, each.code, each.time, beat.state, beat.step, failure))
        if failure is not None:
            self._fail(failure)

    def _failure_of(self, each: Exit) -> Failure:
        """A process that has spawned its ranks itself fails for the first of them that has left word."""
        told = [
            local
            for local, rank in self.rank_of.items()
            if self.spawned and self.attempt.error(rank).exists()
        ]
        found = []
        for local_rank in told or [each.local_rank]:
            rank, beat = self.rank_of[local_rank], self.beats.read(local_rank)
            found.append(failures.failure_of(
                self.attempt, rank=rank, host=self.place.host, code=each.code, when=each.time,
                step=beat.step if beat.state >= RUNNING else None, log=self.launch.log(self.rank_of[each.local_rank]),
                tail=self.streams.tail(self.rank_of[each.local_rank]),
            ))  # fmt: skip
        first = failures.first_failure(found)
        assert first is not None
        return first

    def _is_failure(self, each: Exit, *, explained: bool) -> bool:
        if each.code in (0, STOPPED_EXIT):
            return False
        if each.code in failures.ENDED_BY_TERM:
            return not (explained and (self.stop_asked or self.ending.begun))
        if each.code == failures.ENDED_BY_STOP and self.stop_asked:
            return False
        # While we end the others, only what we did not do ourselves counts: it may be what came first.
        return each.code > 0 or each.local_rank not in self.ending.killed

    def _fail(self, failure: Failure) -> None:
        """Something is wrong: tell all agents, end the ranks here."""
        self.failures.append(failure)
        self.meeting.say({"kind": "failed", "failure": vars(failure)})
        self.ending.begin()

    # -- other agents -------------------------------------------------------------------------------

    def _take_words(self) -> None:
        for message in self.meeting.poll():
            kind = message.get("kind")
            if kind == "failed":
                self.failures.append(Failure(**message["failure"]))
                self.ending.begin()
            elif kind == "stop" and not self.stop_asked:
                self._stop("the head" if message.get("from") == 0 else self.meeting.name_of(message["from"]))
            elif kind == "ended":
                self.others[message["from"]] = [failures.end_from_json(each) for each in message["ends"]]
            elif kind == "verdict":
                self.told = message
            elif kind == watchdog.SUMMARY:
                self.panorama.hear(message)
            elif kind == "stacks":
                self._dump_stacks()
            elif kind in ("lost", "left"):
                self._lost(message["index"] if kind == "lost" else message["from"])

    def _lost(self, index: int) -> None:
        if index in self.others or self.told is not None:
            return
        self.others[index] = []
        host = str(self.meeting.roster[index].get("host", "?"))
        why = "its agent is gone: the node died, or was cut off"
        self._fail(Failure(restart_policy.LOST, host, message=why, time=time.time()))
        if index == 0 and not self.place.is_head:
            self.told = {"verdict": "failed", "next": None}

    def _after_the_last(self) -> None:
        """No rank is left here: end what they left behind, and tell the head."""
        self.starter.kill_leftovers()
        ends = [failures.end_to_json(each) for each in self.ends]
        self.meeting.say({"kind": "ended", "ends": ends, "stop": self.stop_asked}, to=0)

    def _all_others_ended(self) -> bool:
        return len(self.others) >= self.place.count - 1

    def _tired_of_waiting(self) -> bool:
        """Only once the attempt is being ended: agents whose ranks still train may take as long as they like."""
        limit = self.launch_spec.kill_after + OTHERS_WITHIN
        return self.ending.since is not None and time.monotonic() - self.ending.since > limit

    # -- the watchdog ----------------------------------------------------------------------------------

    def _watch(self) -> None:
        now = time.monotonic()
        if not self.dog.timeout or self.ending.begun or now - self.looked < watchdog.SUMMARY_EVERY:
            return
        self.looked = now
        own = [self._beat_of(local_rank) for local_rank in sorted(set(self.rank_of) - self.over)]
        if not self.place.is_head:
            self.meeting.say(watchdog.summary(own), to=0)
            return
        hang = self.dog.check(self.panorama.all(own))
        if hang is not None:
            self.meeting.say({"kind": "stacks"})
            self._dump_stacks()
            first = hang.laggards[0]
            self._fail(Failure(
                restart_policy.HANG, first.host, first.rank, message=str(hang), step=hang.step, time=time.time(),
                log=str(self.attempt.stacks(first.rank)),
            ))  # fmt: skip

    def _beat_of(self, local_rank: int) -> watchdog.Beat:
        beat = self.beats.read(local_rank)
        return watchdog.Beat(
            self.rank_of[local_rank], beat.state, beat.step, max(0.0, time.time() - beat.time), self.place.host,
            beat.seconds_per_step, watchdog.process_state(beat.pid) if beat.pid else "",
        )  # fmt: skip

    def _dump_stacks(self) -> None:
        """Ask every rank for its Python stacks and wait until they stand in its file."""
        asked = []
        for local_rank, pid in self._rank_pids().items():
            if self.beats.read(local_rank).state >= READY and processes.send_signal(pid, signal.SIGUSR2):
                processes.send_signal(pid, signal.SIGCONT)  # one that somebody has stopped could not write
                asked.append(self.attempt.stacks(self.rank_of[local_rank]))
        deadline = time.monotonic() + STACKS_WITHIN
        while time.monotonic() < deadline and not all(_has_text(path) for path in asked):
            time.sleep(0.05)

    def _rank_pids(self) -> dict[int, int]:
        """The processes of the ranks themselves."""
        if not self.spawned:
            return self.starter.pids()
        beats = [self.beats.read(local_rank) for local_rank in set(self.rank_of) - self.over]
        return {beat.local_rank: beat.pid for beat in beats if beat.pid}

    # -- the end ---------------------------------------------------------------------------------------

    def _outcome(self) -> Outcome:
        ends = [*self.ends, *(end for each in self.others.values() for end in each)]
        # Ends of other agents hold failures that their own words may not have brought in time.
        all_failures = [*self.failures, *(end.failure for end in ends if end.failure is not None)]
        failure = failures.first_failure(all_failures)
        verdict = failures.verdict_of(ends, failed=failure is not None, stop_asked=self.stop_asked)
        return Outcome(verdict, failure, sorted(ends, key=lambda end: end.rank), self.stop_asked)


def _has_text(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except OSError:
        return False
