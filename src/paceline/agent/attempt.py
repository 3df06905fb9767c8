"""One attempt, from the start of its ranks to its verdict, as one agent sees it.

A single loop handles what happens: a signal came, a rank ended, another agent sent a message
(`MEANINGS` says what each one does), or a tick passed. It ends when the ranks of this node have
ended and, on the head agent, those of all other nodes; a member waits for the verdict of the head
agent.
"""

from __future__ import annotations

import itertools
import select
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
from typing import ClassVar

from paceline.agent import rank_failures
from paceline.agent.health import liveness
from paceline.agent.health.cgroup import out_of_memory_kills
from paceline.agent.health.heartbeat import Heartbeats
from paceline.agent.health.liveness import Liveness, has_finished
from paceline.agent.health.separate_copies import describe_copies, runs_copies
from paceline.agent.notify import StallNotifier
from paceline.agent.rank_failures import Failure, RankExit, decide_verdict
from paceline.agent.rendezvous.connected_agents import Message, Rendezvous
from paceline.agent.retry_policy import KILLED, LOST
from paceline.agent.stop import FILE, INTERRUPT, TERM, Requests, StopRequest
from paceline.agent.workers import fork_safety, process_tree
from paceline.agent.workers.output import OutputCapture
from paceline.agent.workers.started_ranks import Exit, Launch, StartedRanks
from paceline.contract.foreign_records import EventWriter
from paceline.contract.frameworks import Preset
from paceline.contract.heartbeat_file import RUNNING
from paceline.contract.run_folder import FAILED, JobStartFolder

TICK = 0.25  # seconds between checks of what cannot wake the loop
# seconds; a scheduler's TERM reaches the ranks and the agent one after the other
TERM_TIMEOUT = 1.0
# seconds; a rank that uses the runtime ends at once on SIGTERM, unless it is stuck in C
RUNTIME_KILL_AFTER = 1.0
OUT_OF_MEMORY = "the kernel's out-of-memory killer killed it: the job used up its memory"
AGENT_KILLED = "its agent was killed: by the kernel, by a user, or because its node went down"
AGENT_GONE = "its agent is gone: the node went down or lost its network connection"
MEMBERS_TIMEOUT = 30.0  # seconds for other agents to end their ranks, beyond `kill_after`


@dataclass
class Outcome:
    """The result of an attempt, complete on the head agent only."""

    verdict: str = ""
    failure: Failure | None = None
    exits: list[RankExit] = field(default_factory=list)
    stop_requested: bool = False
    restart_delay: float | None = None  # seconds until the next attempt; None if there is none
    agent_killed: bool = False  # the next attempt needs new agents


class Attempt:
    """Runs the ranks of this node once."""

    def __init__(
        self,
        launch: Launch,
        *,
        workers: StartedRanks,
        output: OutputCapture,
        heartbeats: Heartbeats,
        rendezvous: Rendezvous,
        requests: Requests,
        job_start: JobStartFolder,
        events: EventWriter,
        say: Callable[[str], None],
        stalls: StallNotifier,
    ) -> None:
        self.launch, self.workers, self.output, self.heartbeats = (
            launch,
            workers,
            output,
            heartbeats,
        )
        self.rendezvous, self.requests, self.job_start = rendezvous, requests, job_start
        self.events, self.say, self.stalls = events, say, stalls
        self.launch_spec, self.placement, self.folder = (
            launch.launch_spec,
            launch.placement,
            launch.attempt,
        )
        self.termination = Termination(workers, heartbeats, kill_after=self.launch_spec.kill_after)
        self.liveness = Liveness(
            launch, workers=workers, output=output, heartbeats=heartbeats, rendezvous=rendezvous
        )
        self.rank_of = {local_rank: rank for rank, local_rank in launch.ranks()}
        # one process per node starts the ranks and is not a rank
        self.spawns = self.launch_spec.style == "spawn"
        self.kills_before = out_of_memory_kills()
        self.pending: set[int] = set()  # local ranks whose exit is still to come
        self.exits: list[RankExit] = []
        self.failures: list[Failure] = []
        self.stop = StopRequest(launch, workers=workers, heartbeats=heartbeats)
        self.stop_cause = ""  # of a request that is still to be explained on the console
        self.unexplained: list[Exit] = []  # their reason may be on its way: see `_is_unexplained`
        self.member_exits: dict[int, list[RankExit]] = {}  # by agent
        # ending ranks that have finished but not exited: that is no failure
        self.ends_finished = False
        self.agent_killed = False  # that of another node
        self.framework: Preset | None = None  # of the ranks here, once they have imported one
        self.outcome: Outcome | None = None  # a member's, once the head agent has sent its verdict

    # -- the loop
    # --------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        self.pending = set(self.workers.start(self.launch, self.output))
        self.output.start()
        self.events.write(
            "ranks",
            attempt=self.folder.number,
            ranks=sorted(self.rank_of.values()),
            uses_runtime=fork_safety.uses_runtime(self.launch_spec),
        )
        if self.placement.is_head and runs_copies(self.launch_spec):
            processes = self.launch_spec.nodes if self.spawns else self.launch_spec.world_size
            self.events.write("independent", attempt=self.folder.number, processes=processes)
            for line in describe_copies(processes, self.launch_spec):
                self.say(line)
        has_reported = False
        while True:
            self._wait()
            self._handle_requests()
            self._handle_exits()
            self._handle_messages()
            self._handle_tick()
            if self.pending or self.unexplained:
                continue
            if not has_reported:
                has_reported = True
                self._report_exits()
            outcome = self._find_outcome()
            if outcome is not None:
                return outcome

    def _running(self) -> set[int]:
        # the end of one process that starts the ranks is the end of all
        return set(self.rank_of) if self.spawns and self.pending else set(self.pending)

    def _wait(self) -> None:
        sources = (self.requests.fileno(), self.workers.fileno(), self.rendezvous.fileno())
        busy = self.termination.started or self.unexplained
        poller = select.poll()  # unlike `select`, it takes descriptors above 1023
        for descriptor in sources:
            if descriptor is not None:
                poller.register(descriptor, select.POLLIN)
        poller.poll(1000 * (0.05 if busy else TICK))
        self.requests.drain()

    def _handle_tick(self) -> None:
        """Look at what gives no sign by itself."""
        self._check_progress()
        if self.placement.is_head:
            self.stalls.check()
            self._note_framework()
        self.termination.tick()

    def _note_framework(self) -> None:
        """Record the framework that the ranks have imported, for `paceline show`."""
        presets = (self.heartbeats.read(local_rank).preset for local_rank in self.rank_of)
        found = next(filter(None, presets), None)
        if found not in (None, self.framework):
            self.framework = found
            self.events.write("framework", attempt=self.folder.number, name=found.name)

    # -- requests
    # --------------------------------------------------------------------------------------

    def _handle_requests(self) -> None:
        if self.requests.end_now:
            if not self.termination.started:
                by = "Ctrl-C" if self.requests.interrupt > 1 else "a second stop request"
                message = f"killed immediately by {by}: nothing was saved since the last checkpoint"
                host = self.placement.host
                self._fail(
                    Failure(rank_failures.INTERRUPTED, host, message=message, time=time.time())
                )
            self.termination.kill_now()
        way = self._requested_way()
        if way is not None and self.stop.is_news(way):
            self._stop(self.stop.cause(way, self.launch.environ), way)
        if self.stop.requested and not self.termination.started:
            running = self._running()
            self._explain_stop(running)
            self.stop.signal_ranks(running)
            if running and self.stop.is_overdue:
                self._end_overdue(running)

    def _requested_way(self) -> int | None:
        """Return how this agent itself was asked to stop, the most urgent way first."""
        if self.requests.stop:
            return TERM if self.requests.by_term else FILE
        if self.requests.interrupt:
            return INTERRUPT
        return FILE if self.placement.is_head and self.job_start.stop.exists() else None

    def _stop(self, cause: str, way: int, *, received: bool = False) -> None:
        """Stop the ranks here, and tell the head agent, which tells all others."""
        if self.placement.is_head or not received:
            self.rendezvous.send({"kind": "stop", "way": way, "cause": cause})
        self.stop.start(way)
        self.stop_cause = cause
        self._explain_stop(self._running())
        if self.stop_cause and self.placement.is_head:
            self.say(f"stop requested ({cause}) while the ranks start")
        self.events.write("stop_requested", by=cause)
        self.unexplained, late = [], self.unexplained
        for rank_exit in late:
            self._record_exit(rank_exit)

    def _explain_stop(self, local_ranks: set[int]) -> None:
        """On the head agent: say what the ranks will do, once they can take signals."""
        if not self.stop_cause or not self.stop.reaches(local_ranks):
            return
        cause, self.stop_cause = self.stop_cause, ""
        if self.placement.is_head:
            first, *more = self.stop.describe(local_ranks)
            for line in (f"stop requested ({cause}): {first}", *more):
                self.say(line)

    def _end_overdue(self, local_ranks: set[int]) -> None:
        """End the ranks that have not stopped by the deadline; agents do so on their own, at about
        the same time.
        """
        self.liveness.dump_stacks(local_ranks)
        ranks = ", ".join(str(self.rank_of[local_rank]) for local_rank in sorted(local_ranks))
        self.say(
            f"warning: these ranks on {self.placement.host} did not stop within "
            f"{self.stop.timeout:g} s and were "
            f"killed: {ranks}; stacks: {self.folder.path}/stacks-*.txt"
        )
        self.termination.start()

    # -- exits of ranks
    # --------------------------------------------------------------------------------

    def _handle_exits(self) -> None:
        if self.workers.has_failed_rank() and not self.termination.started:
            self.termination.start()
        for rank_exit in self.workers.poll():
            self.pending.discard(rank_exit.local_rank)
            if self._is_unexplained(rank_exit):
                self.unexplained.append(rank_exit)
            else:
                self._record_exit(rank_exit)
        for rank_exit in list(self.unexplained):
            if self.termination.started or time.time() - rank_exit.time > TERM_TIMEOUT:
                self.unexplained.remove(rank_exit)
                self._record_exit(rank_exit, explained=False)

    def _is_unexplained(self, rank_exit: Exit) -> bool:
        """Whether to wait for the reason of an exit: the SIGTERM came from outside, or a peer's
        connection was closed.

        A scheduler's SIGTERM reaches the ranks and agents of all nodes one after the other.
        """
        if self.stop.requested or self.termination.started:
            return False
        return rank_exit.code in rank_failures.TERM_EXITS or (
            self._is_failure(rank_exit)
            and self._read_failure(rank_exit, with_log=False).is_consequence
        )

    def _record_exit(self, rank_exit: Exit, *, explained: bool = True) -> None:
        rank = self.rank_of[rank_exit.local_rank]
        heartbeat = self.heartbeats.read(rank_exit.local_rank)
        failure = None
        if self.ends_finished and has_finished(
            heartbeat.state, script_ended=bool(heartbeat.script_ended)
        ):
            rank_exit = Exit(rank_exit.local_rank, 0, rank_exit.time)
        elif rank_exit.code < 0 and self.termination.started and self.folder.error(rank).exists():
            # It had failed on its own, and was slow to exit.
            rank_exit = Exit(rank_exit.local_rank, 1, rank_exit.time)
        if self._is_failure(rank_exit, explained=explained):
            # After a stop request, a closed connection means that a peer has stopped; others may
            # still be saving.
            if not (
                self.stop.requested and self._read_failure(rank_exit, with_log=False).is_consequence
            ):
                self.termination.start()
            failure = self._read_failure(rank_exit)
        self.exits.append(
            RankExit(
                rank,
                rank_exit.code,
                rank_exit.time,
                heartbeat.state,
                heartbeat.step,
                failure,
                got_term=self.stop.has_terminated(heartbeat),
                says_saved=self.stop.says_saved(heartbeat, rank_exit.code),
                unsaved=heartbeat.unsaved_step - 1 if heartbeat.unsaved_step else None,
                in_session=bool(heartbeat.in_session),
            )
        )
        if failure is not None and self.termination.started:
            self._fail(failure)

    def _read_failure(self, rank_exit: Exit, *, with_log: bool = True) -> Failure:
        output = self.output if with_log else None
        failure = rank_failures.explain_exit(
            rank_exit, self.launch, heartbeats=self.heartbeats, output=output
        )
        if failure.code == -signal.SIGKILL and out_of_memory_kills() > self.kills_before:
            return replace(failure, last_line=OUT_OF_MEMORY, out_of_memory=True)
        return failure

    def _is_failure(self, rank_exit: Exit, *, explained: bool = True) -> bool:
        heartbeat = self.heartbeats.read(rank_exit.local_rank)
        if rank_exit.code == 0:
            return rank_failures.has_left_session(heartbeat)
        if rank_exit.code in self.launch_spec.saved_exit_codes:
            return False
        if rank_exit.code in rank_failures.TERM_EXITS:
            return not (explained and (self.stop.requested or self.termination.started))
        if self.stop.has_ended(heartbeat, rank_exit.code) or self._is_interrupted(rank_exit):
            return False
        # While this agent terminates the ranks, only what it did not cause counts: it may be the
        # first failure.
        return rank_exit.code > 0 or rank_exit.local_rank not in self.termination.killed

    def _is_interrupted(self, rank_exit: Exit) -> bool:
        """Whether Ctrl-C ended a rank: with KeyboardInterrupt, or (as Lightning does) after it
        with any exit code.
        """
        if not self.stop.has_interrupted(self.heartbeats.read(rank_exit.local_rank)):
            return False
        reported = self.folder.error(self.rank_of[rank_exit.local_rank]).exists()
        return rank_exit.code in rank_failures.INTERRUPT_EXITS or (
            rank_exit.code > 0 and not reported
        )

    def _fail(self, failure: Failure, *, received: bool = False) -> None:
        """Tell the head agent about the first failure here, and end the ranks. The head agent tells
        all others about the first failure of all.
        """
        self.failures.append(failure)
        if len(self.failures) == 1 and (self.placement.is_head or not received):
            self.rendezvous.send(
                {"kind": "failed", "failure": asdict(failure), "sent": time.time()}
            )
        self.termination.start()

    def _check_progress(self) -> None:
        """End ranks that hang, and ranks that linger after others have exited; say why."""
        if self.termination.started:
            return
        found = self.liveness.check(self._running(), ended_agents=self.member_exits)
        if found is None:
            return
        if found.failure is not None and not (found.note and self.stop.requested):
            self._fail(found.failure)
            return
        self.say(f"warning: {found.note}; stacks: {self.folder.path}/stacks-*.txt")
        self.rendezvous.send({"kind": "end"})
        self._end_finished({})

    # -- other agents
    # ----------------------------------------------------------------------------------

    def _handle_messages(self) -> None:
        for message in self.rendezvous.poll():
            meaning = self.MEANINGS.get(message.get("kind", ""))
            if meaning is not None:
                meaning(self, message)

    def _handle_failure(self, message: Message) -> None:
        failure = rank_failures.received_failure(message["failure"], sent=message["sent"])
        self._fail(failure, received=True)

    def _handle_stop(self, message: Message) -> None:
        if self.stop.is_news(message["way"]):
            self._stop(message["cause"], message["way"], received=True)

    def _handle_member_exits(self, message: Message) -> None:
        self.member_exits[message["from"]] = [
            RankExit.from_json(fields, sent=message["sent"]) for fields in message["exits"]
        ]

    def _handle_verdict(self, message: Message) -> None:
        self.outcome = Outcome(
            message["verdict"],
            restart_delay=message["restart_delay"],
            agent_killed=message["agent_killed"],
        )

    def _end_finished(self, _: Message) -> None:
        self.ends_finished = True
        self.termination.start()

    def _dump_stacks(self, _: Message) -> None:
        self.liveness.dump_stacks(self._running())

    def _handle_departure(self, message: Message) -> None:
        # Of another member: the head agent knows whether its ranks had ended before.
        if self.placement.is_head or not message.get("index"):
            index = message["index" if message["kind"] == "lost" else "from"]
            self._handle_loss(index, closed=message.get("closed", False))

    # What each message of another agent means.
    MEANINGS: ClassVar[dict[str, Callable[[Attempt, Message], None]]] = {
        "failed": _handle_failure,
        "stop": _handle_stop,
        "exits": _handle_member_exits,
        "verdict": _handle_verdict,
        "end": _end_finished,
        "stacks": _dump_stacks,
        "lost": _handle_departure,
        "left": _handle_departure,
        **dict.fromkeys(liveness.KINDS, lambda self, message: self.liveness.update(message)),
    }

    def _handle_loss(self, index: int, *, closed: bool) -> None:
        if index in self.member_exits or self.outcome is not None:
            return
        self.member_exits[index] = []
        host = str(self.rendezvous.roster[index].get("host", "?"))
        self.events.write("lost", attempt=self.folder.number, host=host, closed=closed)
        lost = time.time()
        self.termination.start()  # before asking the node, which may take a moment
        if self.placement.is_head:
            killed = self.rendezvous.was_killed(index, closed=closed)
            self.agent_killed |= killed
            cause, message = (KILLED, AGENT_KILLED) if killed else (LOST, AGENT_GONE)
            self._fail(Failure(cause, host, message=message, time=lost))
        else:
            self.outcome = Outcome(FAILED)

    def _report_exits(self) -> None:
        """End what the ranks of this node left behind, and report their exits to the head agent."""
        self.workers.kill_leftovers()
        self.rendezvous.send(
            {"kind": "exits", "exits": list(map(asdict, self.exits)), "sent": time.time()}, to=0
        )

    def _find_outcome(self) -> Outcome | None:
        """Return the outcome once the head agent knows how all ranks have ended, or the others take
        too long to end theirs.
        """
        since, limit = self.termination.since, self.launch_spec.kill_after + MEMBERS_TIMEOUT
        is_late = since is not None and time.monotonic() - since > limit
        if not self.placement.is_head:
            return Outcome(FAILED) if self.outcome is None and is_late else self.outcome
        if len(self.member_exits) < self.placement.count - 1 and not is_late:
            return None
        exits = sorted(
            [*self.exits, *itertools.chain(*self.member_exits.values())], key=attrgetter("rank")
        )
        verdict, failure = decide_verdict(self.failures, exits, stop_requested=self.stop.requested)
        return Outcome(verdict, failure, exits, self.stop.requested, agent_killed=self.agent_killed)


class Termination:
    """Ends the ranks of this node: SIGTERM first, then SIGKILL to the process group of each that
    remains.
    """

    def __init__(self, workers: StartedRanks, heartbeats: Heartbeats, *, kill_after: float) -> None:
        self._workers = workers
        self._heartbeats = heartbeats
        self._kill_after = kill_after
        self.since: float | None = None
        self.killed: set[int] = set()  # local ranks

    @property
    def started(self) -> bool:
        return self.since is not None

    def start(self) -> None:
        if self.since is not None:
            return
        self.since = time.monotonic()
        self._heartbeats.mark_terminating()
        for pid in self._workers.pids().values():
            process_tree.send_signal(pid, signal.SIGTERM)

    def kill_now(self) -> None:
        """Skip the time between SIGTERM and SIGKILL."""
        self.start()
        self._kill_after = 0.0
        self.tick()

    def tick(self) -> None:
        """Kill the ranks whose time is up."""
        if self.since is None:
            return
        waited = time.monotonic() - self.since
        for local_rank, pid in self._workers.pids().items():
            uses_runtime = self._heartbeats.read(local_rank).state >= RUNNING
            kill_after = (
                min(self._kill_after, RUNTIME_KILL_AFTER) if uses_runtime else self._kill_after
            )
            if waited >= kill_after:
                self.killed.add(local_rank)
                process_tree.signal_group(pid, signal.SIGKILL)
                process_tree.send_signal(pid, signal.SIGKILL)
