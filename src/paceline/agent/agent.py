"""The agent: joins the other agents, then runs attempts until there is a verdict."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.agent import retry_policy
from paceline.agent.attempt import Attempt, Outcome
from paceline.agent.health import preflight
from paceline.agent.health.heartbeat import Heartbeats
from paceline.agent.health.node_metrics import start_sampler
from paceline.agent.launcher_placement import Placement, find_placement
from paceline.agent.notify import Notifier, StallNotifier
from paceline.agent.rank_failures import Failure
from paceline.agent.rendezvous import network
from paceline.agent.rendezvous.connected_agents import Rendezvous, join
from paceline.agent.rendezvous.membership import AgentsLost, AgentsMissing, await_verdict
from paceline.agent.stop import Requests
from paceline.agent.verdict_writer import VerdictWriter, last_step, newest_checkpoint
from paceline.agent.workers import fork_safety
from paceline.agent.workers.forked_ranks import ForkedRanks
from paceline.agent.workers.group_selection import GroupSelection
from paceline.agent.workers.output import OutputCapture
from paceline.agent.workers.process_tree import raise_descriptor_limit
from paceline.agent.workers.started_ranks import Launch
from paceline.contract.files import find_own_folder
from paceline.contract.foreign_records import EventWriter
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import (
    DONE,
    FAILED,
    INTERRUPTED_EXIT,
    RESTART_EXIT,
    STOPPED,
    USED_BY_JOBS,
    AttemptFolder,
    RunFolder,
)
from paceline.errors import LaunchError, PacelineError
from paceline.staging.working_directory import WorkingDirectory

if TYPE_CHECKING:  # most runs stage nothing
    from paceline.agent.staging import NodeData

FILES_PER_RANK = 7  # that an agent opens: a log, its times, both ends of two pipes, one to spare
SPARE_FILES = 32
MAX_FILES = 100  # names of written files that the events keep
# of an agent that does not know yet where it runs: alone, for all that anybody knows
NOWHERE = Placement(0, 1, 0, 1, [], first_rank=0, local_world_size=0, host="?")


class Agent:
    """One agent of a run. The head agent (index 0) also decides about restarts and writes the
    verdicts. `cleanup` ends what the agent has begun, the last first.
    """

    rendezvous: Rendezvous  # both once all agents have met
    heartbeats: Heartbeats

    def __init__(
        self,
        run: RunFolder,
        launch_spec: LaunchSpec,
        *,
        environ: Mapping[str, str],
        requests: Requests,
        zygote: ForkedRanks | None,
    ) -> None:
        self.run, self.launch_spec = run, launch_spec
        self.environ, self.requests = environ, requests
        self.cleanup = contextlib.ExitStack()
        self.placement = NOWHERE
        self.have_met = False
        self.output: OutputCapture | None = None  # of the newest attempt
        self.verdicts = VerdictWriter(
            run, launch_spec, environ=environ, requests=requests, say=self.say
        )
        self.job_start = self.verdicts.job_start
        self.workers = GroupSelection(
            launch_spec, environ, zygote=zygote, interrupted=self._interrupted, say=self.say
        )
        self.cleanup.callback(self._tell_whether_a_node_is_lost)
        self.cleanup.callback(self.workers.close)
        self.work = WorkingDirectory.of(launch_spec)
        self.node_data: NodeData | None = None
        self.notifier = Notifier(run, launch_spec, self.job_start, environ=environ, warn=self.warn)
        self.cleanup.callback(self.notifier.flush)
        self.events = EventWriter(run.events / "agent-0.jsonl")
        self.attempt_number = 0
        self.has_lost_node = False

    def say(self, text: str) -> None:
        """Print a note on the console."""
        start = "" if self.output is None else self.output.line_break()
        with contextlib.suppress(OSError):  # the console is gone, but the run is not
            print(f"{start}paceline: {text}", file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        self.say(f"warning: {text}")

    # -- from start to end
    # -----------------------------------------------------------------------------

    def run_to_verdict(self) -> int:
        """Return the exit code: 0 for done and stopped, 1 for failed, 130 if interrupted."""
        self.placement = find_placement(self.launch_spec, self.environ)
        self.events = EventWriter(self.run.events / f"agent-{self.placement.index}.jsonl")
        raise_descriptor_limit(FILES_PER_RANK * self.placement.local_world_size + SPARE_FILES)
        self._meet()
        self._check_nodes()
        if self.launch_spec.fitness:
            self._check_fitness()
        if self.placement.is_head:
            self._note_resume()
            if self.work is not None:
                # while the zygote imports torch; the ranks of all nodes wait for it
                self.work.fill(self.launch_spec.cwd)
        # until the end: copying files back may take long
        sampler = start_sampler(
            self.run,
            self.launch_spec,
            self.placement,
            self.heartbeats,
            environ=self.environ,
            job_start=self.verdicts.job_start_name,
            warn=self.warn,
        )
        if sampler is not None:
            self.cleanup.callback(sampler.close)
        if self.launch_spec.data:
            if not self._stage_data():
                return INTERRUPTED_EXIT if self.requests.interrupt else 0
        elif 0 in self.placement.local_ranks:
            self.verdicts.try_write(self._remove_leftovers)
        return self._run_attempts()

    def _meet(self) -> None:
        """Join the other agents, and write down who is here."""
        placement, job_start = self.placement, self.verdicts.job_start_name
        facts = preflight.collect_facts(placement, self.environ)
        attempts = self.run.attempts()
        facts["attempt"] = attempts[-1].number if attempts else 0
        queued = {}
        if placement.is_head:
            self.verdicts.announce()
            with contextlib.suppress(OSError, ValueError):  # nobody has said so
                queued["queued_at"] = float(self.job_start.queued_at.read_text(encoding="utf-8"))
        # Before it waits for the others: `paceline doctor` compares who has arrived, and with what.
        nodes = self.environ.get("SLURM_JOB_NODELIST", "")
        self.events.write(
            "node", job_start=job_start, index=placement.index, nodelist=nodes, **queued, **facts
        )
        report = functools.partial(
            self.events.write, "unreachable", job_start=job_start, host=placement.host
        )
        self.rendezvous = join(
            placement,
            self.environ,
            facts,
            timeout=self.launch_spec.join_timeout,
            interrupted=self._interrupted,
            report=report,
        )
        self.have_met = True
        self.cleanup.callback(self.rendezvous.close)
        self.attempt_number = self.rendezvous.roster[0]["attempt"]
        self.heartbeats = Heartbeats(placement.local_world_size)
        self.cleanup.callback(self.heartbeats.remove)
        self.events.write(
            "started",
            job_start=job_start,
            host=placement.host,
            pid=os.getpid(),
            index=placement.index,
            heartbeat=str(self.heartbeats.path),
            ranks=placement.ranks,
            local_ranks=placement.local_ranks,
        )
        if placement.is_head:
            self.verdicts.begin(host=placement.host, newest_attempt=self.attempt_number)
            self.notifier.begin()
            if self.verdicts.from_queue and self.launch_spec.scratch:
                # for the checks before the next submission
                self.verdicts.try_write((Path(self.launch_spec.scratch) / USED_BY_JOBS).touch)

    def fail(self, problem: PacelineError) -> int:
        """Report an error of the agent itself, on the console and in the run folder. Return the
        exit code.
        """
        self.say(f"error: {problem}")
        lost = {"lost_host": problem.hosts[0]} if isinstance(problem, AgentsLost) else {}
        self.events.write(
            "failed", reason=problem.message, job_start=self.job_start.path.name, **lost
        )
        if self.have_met:
            host = self.placement.host
            failure = Failure(retry_policy.ERROR, host, message=problem.message, time=time.time())
            self.rendezvous.send({"kind": "failed", "failure": vars(failure), "sent": time.time()})
        if not self.placement.is_head:
            if self.have_met:
                # The scheduler may end the whole step once one agent fails: let the head agent
                # write its verdict first.
                await_verdict(self.job_start, self._interrupted)
            return problem.exit_code
        if isinstance(problem, AgentsMissing):
            self.has_lost_node = True
            if problem.killed and not self.requests.interrupt:
                # Its node may have died too, and come back. Without a verdict, this counts like a
                # head agent that was killed.
                return RESTART_EXIT
            self._exclude(problem.hosts)
        self.verdicts.write_verdict(FAILED)
        self.notifier.failed(problem.message)
        return problem.exit_code

    def cancel_start(self) -> None:
        """End before any rank runs, because the user pressed Ctrl-C: the run is stopped, and has
        not failed.
        """
        self.events.write(STOPPED)
        if self.placement.is_head:
            self.say("interrupted before the ranks started")
            self.verdicts.write_stopped(progress=False)

    def _tell_whether_a_node_is_lost(self) -> None:
        if self.has_lost_node and self.placement.is_head:
            self.verdicts.try_write(self.job_start.node_lost.touch)

    def _interrupted(self) -> bool:
        return self.requests.cancels_start

    # -- before the first attempt
    # ----------------------------------------------------------------------

    def _check_nodes(self) -> None:
        """Check the facts about all nodes. All agents see the same facts and so reach the same
        result.
        """
        if not self.launch_spec.check:
            return
        problems = preflight.find_problems(self.launch_spec, self.rendezvous.roster)
        unfit = preflight.unfit_nodes(problems)
        if self.placement.is_head:
            for problem in problems:
                if not problem.fatal:
                    self.warn(str(problem))
            if unfit:
                lines = [f"✗ {each.host}  {each.text}" for each in problems if each.fatal]
                self.say("\n".join(["some nodes cannot run this job", *lines]))
        if unfit:
            self._exclude(unfit)
            fatal = "; ".join(str(problem) for problem in problems if problem.fatal)
            raise LaunchError(f"Some nodes cannot run this job: {fatal}.")

    def _check_fitness(self) -> None:
        """Measure all nodes. If there is a queue to go back to, it goes on without those that are
        slow.
        """
        if self.placement.is_head:
            self.say("measuring the nodes (--fitness)")
        launch = self._make_launch(self.run.attempt(0))
        found = preflight.FitnessCheck(launch, self.run, self.rendezvous, self._interrupted).run()
        if self.placement.is_head:
            for each in found:
                evidence = f" ({'; '.join(each.evidence)})" if each.evidence else ""
                self.warn(f"node {each.host}: {each.text}{evidence}")
        unfit = sorted({each.host for each in found if each.unfit})
        if unfit and self.verdicts.from_queue and not self.launch_spec.fixed_nodes:
            self._exclude(unfit)
            reasons = "; ".join(f"node {each.host}: {each.text}" for each in found if each.unfit)
            raise LaunchError(f"Some nodes are unfit for this job: {reasons}.")

    def _exclude(self, hosts: Sequence[str]) -> None:
        if self.placement.is_head:
            self.verdicts.try_write(lambda: preflight.exclude_nodes(self.job_start, hosts))

    def _note_resume(self) -> None:
        """Say where a run that was started before continues, unless the runtime will say so."""
        saved = newest_checkpoint(self.run)
        uses_runtime = fork_safety.uses_runtime(self.launch_spec)
        if self.attempt_number and not (uses_runtime and saved >= 0):
            self.say(f"continuing {retry_policy.describe_start(saved, uses_runtime=uses_runtime)}")

    def _stage_data(self) -> bool:
        """Stage data in while the zygote imports torch. Return False if a stop was requested
        meanwhile.
        """
        from paceline.agent.staging import NodeData

        self.node_data = NodeData(self)
        self.cleanup.callback(self.verdicts.try_write, self.node_data.stage_out)
        if self.node_data.stage_in():
            return True
        if self.placement.is_head:
            self.say("stop requested during staging: no ranks were started")
            self.verdicts.write_stopped(progress=False)
        return False

    def _remove_leftovers(self) -> None:
        """Remove what the user's earlier runs left in the default folders. Runs with data do so
        while staging.
        """
        bases = {self.environ.get("TMPDIR") or "/tmp", "/tmp"}
        if not any(map(find_own_folder, bases)):
            return
        from paceline.staging.cleanup import remove_leftovers

        name = self.verdicts.job_start_name
        removed = [remove_leftovers(Path(base), self.environ, job_start=name) for base in bases]
        if count := sum(map(len, removed)):
            self.say(f"removed {count} folders that earlier runs left on {self.placement.host}")

    # -- attempts
    # --------------------------------------------------------------------------------------

    def _run_attempts(self) -> int:
        while True:
            outcome = self._run_attempt()
            if outcome.restart_delay is None:
                if self.requests.interrupt:
                    return INTERRUPTED_EXIT
                return 0 if outcome.verdict in (DONE, STOPPED) else 1
            deadline = time.monotonic() + outcome.restart_delay
            while time.monotonic() < deadline and not self.requests.wants_stop:
                time.sleep(0.05)
            if outcome.agent_killed and not self.requests.interrupt:
                return self._make_way() if self.placement.is_head else 0
            if self.requests.cancels_start:
                if self.placement.is_head:
                    self.verdicts.write_verdict(STOPPED if self.requests.interrupt else FAILED)
                return INTERRUPTED_EXIT if self.requests.interrupt else 1

    def _make_way(self) -> int:
        """End this head agent, so that whoever started the agents starts all of them again."""
        self.say("starting the agents again")
        self.has_lost_node = True  # the killed agent's node may have died too, and come back
        return RESTART_EXIT

    def _run_attempt(self) -> Outcome:
        self.attempt_number += 1
        folder = self.run.attempt(self.attempt_number)
        for path in (folder.path, self.run.checkpoints):  # the script's variables name both
            self.verdicts.try_write(functools.partial(path.mkdir, parents=True, exist_ok=True))
        saved_before = newest_checkpoint(self.run)
        if self.placement.is_head:
            self.verdicts.begin_attempt(folder, saved_before=saved_before)
        self.heartbeats.reset(self.attempt_number)
        self.events.write("launch", attempt=self.attempt_number, ranks=self.placement.ranks)
        # it may wait for torch to be imported
        workers = self.workers.select(self.placement, self.heartbeats)
        launch = self._make_launch(folder)
        output = self.output = OutputCapture(
            log_path=launch.log,
            shared_log=folder.node_log(self.placement.node) if launch.shares_log else None,
            tee=self.launch_spec.tee,
            warn=self.warn,
        )
        attempt = Attempt(
            launch,
            workers=workers,
            output=output,
            heartbeats=self.heartbeats,
            rendezvous=self.rendezvous,
            requests=self.requests,
            job_start=self.job_start,
            events=self.events,
            say=self.say,
            stalls=StallNotifier(
                folder, self.notifier, self.heartbeats, self.placement.local_ranks
            ),
        )
        try:
            outcome = attempt.run()
        finally:
            workers.kill_leftovers()
            output.close()
            self.verdicts.try_write(lambda: _remove_empty(folder.path.glob("stacks-*.txt")))
        if self.placement.is_head:
            self._conclude(outcome, folder, saved_before)
        return outcome

    def _make_launch(self, folder: AttemptFolder) -> Launch:
        """Wait until all agents are ready, and return how the ranks start."""
        master = self.rendezvous.prepare(folder.number)
        environ = {**self.environ, **self.launch_spec.variables}
        peer = self.rendezvous.peer_address
        variables = network.network_variables(
            nodes=self.launch_spec.nodes,
            peer=peer,
            runtime=self.launch_spec.runtime,
            environ=environ,
        )
        if self.launch_spec.nodes > 1 and folder.number:
            self.events.write(
                "network",
                attempt=folder.number,
                host=self.placement.host,
                peer=peer,
                interface=network.interface_towards(peer),
                master=network.join_address(master.address, master.port),
                chosen=variables,
                set={
                    name: environ[name] for name in network.INTERFACE_VARIABLES if name in environ
                },
            )
        is_shown = self.placement.is_head and folder.number and not self.requests.wants_stop
        # so that the user can override a wrong choice with --env
        if "NCCL_SOCKET_IFNAME" in variables and is_shown:
            self.say(network.describe_network(variables))
        if self.node_data is not None:
            variables |= self.node_data.variables
        return Launch(
            self.launch_spec,
            self.placement,
            folder,
            heartbeat=str(self.heartbeats.path),
            address=master.address,
            port=master.port,
            environ=self.environ,
            extra=variables,
        )

    def _conclude(self, outcome: Outcome, folder: AttemptFolder, saved_before: int) -> None:
        """On the head agent: decide what follows from an attempt, write it, and tell everybody."""
        failure = outcome.failure
        self.has_lost_node = failure is not None and failure.cause == retry_policy.LOST
        may_restart = not self.requests.cancels_start
        self.verdicts.record_attempt(
            outcome, folder, saved_before=saved_before, may_restart=may_restart
        )
        step, failure = last_step(outcome), outcome.failure
        # of rank 0, for data
        fields: dict[str, Any] = {"waited": round(self.heartbeats.read(0).seconds_waited, 3)}
        if failure is not None:
            fields |= {"rank": failure.rank, "host": failure.host, "error": failure.error}
        self.events.write(outcome.verdict, attempt=folder.number, step=step, **fields)
        delay = outcome.restart_delay
        if delay is not None:
            self.events.write("restarted", attempt=folder.number + 1, delay=delay)
        self.rendezvous.send(
            {
                "kind": "verdict",
                "verdict": outcome.verdict,
                "restart_delay": delay,
                "agent_killed": outcome.agent_killed,
            }
        )
        self.notifier.attempt_over(
            outcome,
            attempt=folder.number,
            step=step,
            by_term=self.requests.by_term,
            from_queue=self.verdicts.from_queue,
        )
        if self.work is not None and delay is None and outcome.verdict != STOPPED:
            self._clean_working_directory(self.work, outcome)

    def _clean_working_directory(self, work: WorkingDirectory, outcome: Outcome) -> None:
        """Leave only what the script has written. A failed run keeps its code too, because its
        traceback names it.
        """
        if outcome.failure is not None and outcome.failure.type == "FileNotFoundError":
            self.say(
                f"relative paths start in {self.launch_spec.cwd}; see --workdir to start in the "
                "project itself"
            )
        keeps_code = outcome.verdict != DONE and not self.launch_spec.trial
        self.verdicts.try_write(work.remove_links if keeps_code else work.prune)
        if keeps_code or not os.path.isdir(work.path):
            return
        with os.scandir(work.path) as entries:
            left = sorted(f"{entry.name}{'/' * entry.is_dir()}" for entry in entries)
        # Names may have any characters, also those that are not text.
        names = [name if name.isprintable() else ascii(name)[1:-1] for name in left]
        self.events.write("files", names=names[:MAX_FILES])
        more = ", ..." if len(names) > 5 else ""
        self.say(f"files written in {work.path}: {', '.join(names[:5])}{more}")


def _remove_empty(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.stat().st_size == 0:
            path.unlink()
