"""The agent: joins the other agents, then runs attempts until there is a verdict."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.agent import retry_policy
from paceline.agent.attempt import Attempt, Outcome
from paceline.agent.health import preflight
from paceline.agent.health.heartbeat import Heartbeats
from paceline.agent.health.usage import Sampler, start_sampler
from paceline.agent.launcher_placement import Placement, find_placement
from paceline.agent.notify import Notifier, StallNotifier
from paceline.agent.rank_failures import FENCED_OFF, Failure
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
from paceline.agent.workers.rank_variables import thread_count
from paceline.agent.workers.standard_input import StandardInput
from paceline.agent.workers.started_ranks import Launch
from paceline.agent.workers.zygote.start import THREADS
from paceline.contract.files import find_own_folder
from paceline.contract.jsonl import EventWriter
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import USED_BY_JOBS, AttemptFolder, JobStartFolder, RunFolder
from paceline.contract.verdict import DONE, FAILED, INTERRUPTED_EXIT, RESTART_EXIT, STOPPED
from paceline.errors import LaunchError, PacelineError
from paceline.staging.working_directory import WorkingDirectory

if TYPE_CHECKING:  # most runs stage nothing
    from paceline.agent.staging import NodeData

MAX_FILES = 100  # names of written files that the events keep
FILES_PER_RANK = 7  # that an agent opens: a log, its times, both ends of two pipes, one to spare
SPARE_FILES = 32


class Agent:
    """One agent of a run. The head agent (index 0) also decides about restarts and writes the
    verdicts.
    """

    def __init__(
        self,
        run: RunFolder,
        launch_spec: LaunchSpec,
        *,
        environ: Mapping[str, str],
        requests: Requests,
        zygote: ForkedRanks | None,
    ) -> None:
        self.run, self.launch_spec, self.environ, self.requests = (
            run,
            launch_spec,
            environ,
            requests,
        )
        self.output: OutputCapture | None = None  # of the newest attempt
        self.verdicts = VerdictWriter(run, launch_spec, environ=environ, say=self.say)
        self.job_start = self.verdicts.job_start
        self.workers = GroupSelection(
            launch_spec, environ, zygote=zygote, interrupted=self._interrupted, say=self.say
        )
        self.work = WorkingDirectory.of(launch_spec)
        self.placement: Placement | None = None
        self.rendezvous: Rendezvous | None = None
        self.heartbeats: Heartbeats | None = None
        self.node_data: NodeData | None = None
        self.sampler: Sampler | None = None
        self.notifier = Notifier(run, launch_spec, self.job_start, environ=environ, warn=self.warn)
        self.events = EventWriter(run.events / "agent-0.jsonl")
        self.attempt_number = 0
        self.has_lost_node = False
        self.input = StandardInput()

    def say(self, text: str) -> None:
        """Print a note on the console."""
        try:
            with (
                contextlib.nullcontext("")
                if self.output is None
                else self.output.separate_line() as start
            ):
                print(f"{start}paceline: {text}", file=sys.stderr, flush=True)
        except OSError:
            pass  # the console is gone, but the run is not

    def warn(self, text: str) -> None:
        self.say(f"warning: {text}")

    # -- from start to end
    # -----------------------------------------------------------------------------

    def run_to_verdict(self) -> int:
        """Return the exit code: 0 for done and stopped, 1 for failed, 130 if interrupted."""
        self.placement = placement = find_placement(self.launch_spec, self.environ)
        self.events = EventWriter(self.run.events / f"agent-{placement.index}.jsonl")
        _require_descriptors(placement.local_world_size)
        facts = preflight.collect_facts(placement, folder=self.run.path, environ=self.environ)
        attempts = self.run.attempts()
        facts["attempt"] = attempts[-1].number if attempts else 0
        job_start = self.verdicts.job_start_name
        # Before it waits for the others: `paceline doctor` compares who has arrived, and with what.
        nodes = self.environ.get("SLURM_JOB_NODELIST", "")
        queued = _queue_time(self.job_start) if placement.is_head else {}
        self.events.write(
            "node", job_start=job_start, index=placement.index, nodelist=nodes, **queued, **facts
        )
        if placement.is_head:
            self.verdicts.announce()
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
        self.attempt_number = self.rendezvous.roster[0]["attempt"]
        self.heartbeats = Heartbeats(placement.local_world_size)
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
        self._check_nodes()
        if self.launch_spec.fitness:
            self._check_fitness()
        self._note_thread_count()
        self._note_resume()
        if placement.is_head and self.work is not None:
            # while the zygote imports torch; the ranks of all nodes wait for it
            self.work.fill(self.launch_spec.cwd)
        self.sampler = start_sampler(
            self.run,
            self.launch_spec,
            placement,
            self.heartbeats,
            environ=self.environ,
            job_start=job_start,
            warn=self.warn,
        )
        if self.launch_spec.data:
            if not self._stage_data():
                return INTERRUPTED_EXIT if self.requests.interrupt else 0
        elif 0 in placement.local_ranks:
            self.verdicts.try_write(self._remove_leftovers)
        return self._run_attempts()

    def fail(self, problem: PacelineError) -> int:
        """Report an error of the agent itself, on the console and in the run folder. Return the
        exit code.
        """
        self.say(f"error: {problem}")
        if self.rendezvous is not None and self.rendezvous.placement.count > 1:
            host = self.placement.host if self.placement else "?"
            failure = Failure(retry_policy.ERROR, host, message=problem.message, time=time.time())
            self.rendezvous.send({"kind": "failed", "failure": vars(failure), "sent": time.time()})
        lost = {"lost_host": problem.hosts[0]} if isinstance(problem, AgentsLost) else {}
        self.events.write(
            "failed", reason=problem.message, job_start=self.job_start.path.name, **lost
        )
        is_head = self.placement is None or self.placement.is_head
        if (
            is_head
            and isinstance(problem, AgentsMissing)
            and problem.killed
            and not self.requests.interrupt
        ):
            self.has_lost_node = True  # its node may have died too, and come back
            # without a verdict, so this counts like a head agent that was killed
            return RESTART_EXIT
        if is_head and isinstance(problem, AgentsMissing):
            self.has_lost_node = True
            self.verdicts.try_write(lambda: preflight.exclude_nodes(self.job_start, problem.hosts))
        if is_head:
            self.verdicts.write_verdict(FAILED)
            self.notifier.failed(problem.message)
        elif self.rendezvous is not None:
            # The scheduler may end the whole step once one agent fails: let the head agent write
            # its verdict first.
            await_verdict(self.job_start, self._interrupted)
        return problem.exit_code

    def cancel_start(self) -> None:
        """End before any rank runs, because the user pressed Ctrl-C: the run is stopped, and has
        not failed.
        """
        self.events.write(STOPPED)
        if self.placement is None or self.placement.is_head:
            self.say("interrupted before the ranks started")
            self.verdicts.write_stopped(progress=False)

    def close(self) -> None:
        if self.node_data is not None:
            self.verdicts.try_write(self.node_data.stage_out)
        if self.sampler is not None:  # until now: copying files back may take long
            self.sampler.close()
        self.notifier.flush()  # its command is a child of this process, as the workers are
        self.workers.close()
        if self.rendezvous is not None:
            self.rendezvous.close()
        if self.heartbeats is not None:
            self.heartbeats.remove()
        if self.has_lost_node and self.placement is not None and self.placement.is_head:
            self.verdicts.try_write(self.job_start.node_lost.touch)

    def _interrupted(self) -> bool:
        return self.requests.cancels_start

    # -- before the first attempt
    # ----------------------------------------------------------------------

    def _check_nodes(self) -> None:
        """Check the facts about all nodes. All agents see the same facts and so reach the same
        result.
        """
        assert self.placement is not None
        assert self.rendezvous is not None
        if not self.launch_spec.check:
            return
        problems = preflight.find_problems(self.launch_spec, self.rendezvous.roster)
        for problem in problems:
            if not problem.fatal and self.placement.is_head:
                self.warn(str(problem))
        unfit = preflight.unfit_nodes(problems)
        if not unfit:
            return
        if self.placement.is_head:
            self.verdicts.try_write(lambda: preflight.exclude_nodes(self.job_start, unfit))
            table = preflight.format_table(self.launch_spec, self.rendezvous.roster)
            self.say(f"some nodes cannot run this job\n{table}")
        fatal = "; ".join(str(problem) for problem in problems if problem.fatal)
        raise LaunchError(f"Some nodes cannot run this job: {fatal}.")

    def _check_fitness(self) -> None:
        """Measure all nodes. If there is a queue to go back to, it goes on without those that are
        slow.
        """
        from paceline.agent.health.fitness import FitnessCheck

        assert self.placement is not None
        assert self.rendezvous is not None
        if self.placement.is_head:
            self.say("measuring the nodes (--fitness)")
        launch = self._make_launch(self.run.attempt(0))
        found = FitnessCheck(launch, self.run, self.rendezvous, self._interrupted).run()
        unfit = sorted({each.host for each in found if each.unfit})
        if self.placement.is_head:
            for each in found:
                evidence = f" ({'; '.join(each.evidence)})" if each.evidence else ""
                self.warn(f"node {each.host}: {each.text}{evidence}")
        if not unfit or not self.verdicts.from_queue or self.launch_spec.fixed_nodes:
            return
        if self.placement.is_head:
            self.verdicts.try_write(lambda: preflight.exclude_nodes(self.job_start, unfit))
        reasons = "; ".join(f"node {each.host}: {each.text}" for each in found if each.unfit)
        raise LaunchError(f"Some nodes are unfit for this job: {reasons}.")

    def _note_thread_count(self) -> None:
        """Say so if the environment overrides the number of threads that a rank gets by default."""
        default, chosen = self.launch_spec.threads, thread_count(self.launch_spec, self.environ)
        is_head = self.placement is not None and self.placement.is_head
        if is_head and THREADS not in self.launch_spec.variables and chosen != default:
            value = self.environ[THREADS]
            self.say(
                f"{THREADS}={value} from the environment; the default would be {default} per rank"
            )

    def _note_resume(self) -> None:
        """Say where a run that was started before continues, unless the runtime will say so."""
        if not self.attempt_number or self.placement is None or not self.placement.is_head:
            return
        saved, uses_runtime = (
            newest_checkpoint(self.run),
            fork_safety.uses_runtime(self.launch_spec),
        )
        if not uses_runtime or saved < 0:
            self.say(f"continuing {retry_policy.describe_start(saved, uses_runtime=uses_runtime)}")

    def _stage_data(self) -> bool:
        """Stage data in while the zygote imports torch. Return False if a stop was requested
        meanwhile.
        """
        from paceline.agent.staging import NodeData

        assert self.placement is not None
        assert self.rendezvous is not None
        self.node_data = NodeData(self, self.placement, self.rendezvous)
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
        assert self.placement is not None
        bases = {self.environ.get("TMPDIR") or "/tmp", "/tmp"}
        ours = [Path(base) for base in sorted(bases) if find_own_folder(base) is not None]
        if not ours:
            return
        from paceline.staging.cleanup import remove_leftovers

        job_start = self.job_start.path.name
        removed = [
            gone
            for base in ours
            for gone in remove_leftovers(base, self.environ, job_start=job_start)
        ]
        if removed:
            self.say(
                f"removed {len(removed)} folders that earlier runs left on {self.placement.host}"
            )

    # -- attempts
    # --------------------------------------------------------------------------------------

    def _run_attempts(self) -> int:
        assert self.placement is not None
        while True:
            outcome = self._run_attempt()
            if outcome.restart_delay is None:
                if self.requests.interrupt:
                    return INTERRUPTED_EXIT
                return 0 if outcome.verdict in (DONE, STOPPED) else 1
            self._sleep(outcome.restart_delay)
            if outcome.agent_killed and not self.requests.interrupt:
                return self._make_way() if self.placement.is_head else 0
            if self.placement.is_head and (
                warning := self.input.rewind(fork_safety.read_program(self.launch_spec))
            ):
                self.warn(warning)
            if self.requests.cancels_start:
                if self.placement.is_head:
                    self.verdicts.write_verdict(STOPPED if self.requests.interrupt else FAILED)
                return INTERRUPTED_EXIT if self.requests.interrupt else 1

    def _make_way(self) -> int:
        """End this head agent, so that whoever started the agents starts all of them again."""
        self.say("starting the agents again")
        self.has_lost_node = True  # the killed agent's node may have died too, and come back
        self.verdicts.expect_new_agents()
        return RESTART_EXIT

    def _run_attempt(self) -> Outcome:
        assert self.placement is not None
        assert self.rendezvous is not None
        assert self.heartbeats is not None
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
                self.run, folder, self.notifier, self.heartbeats, self.placement.local_ranks
            ),
        )
        try:
            outcome = attempt.run()
        finally:
            workers.kill_leftovers()
            output.close()
            self.verdicts.try_write(lambda: _remove_empty(folder.path.glob("stacks-*.txt")))
        if self.placement.is_head:
            self.has_lost_node = (
                outcome.failure is not None and outcome.failure.cause == retry_policy.LOST
            )
            may_restart = not self.requests.cancels_start
            self.verdicts.record_attempt(
                outcome, folder, saved_before=saved_before, may_restart=may_restart
            )
            self._announce(outcome)
            self.notifier.attempt_over(
                outcome,
                attempt=self.attempt_number,
                step=last_step(outcome),
                by_term=self.requests.by_term,
                from_queue=self.verdicts.from_queue,
            )
            if (
                self.work is not None
                and outcome.restart_delay is None
                and outcome.verdict != STOPPED
            ):
                self._clean_working_directory(self.work, outcome)
        return outcome

    def _make_launch(self, folder: AttemptFolder) -> Launch:
        """Wait until all agents are ready, and return how the ranks start."""
        assert self.placement is not None
        assert self.rendezvous is not None
        assert self.heartbeats is not None
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

    def _announce(self, outcome: Outcome) -> None:
        """Send the verdict to the other agents, and write it to the events."""
        assert self.rendezvous is not None
        failure = outcome.failure if outcome.verdict == FAILED else None
        fields: dict[str, Any] = {}
        if failure is not None:
            fields = {"rank": failure.rank, "host": failure.host, "error": failure.error}
        if self.heartbeats is not None:
            fields["waited"] = round(self.heartbeats.read_times(0)[0], 3)  # of rank 0, for data
        if failure is None or failure.cause != FENCED_OFF:  # the events are another job start's now
            self.events.write(
                outcome.verdict, attempt=self.attempt_number, step=last_step(outcome), **fields
            )
        if outcome.restart_delay is not None:
            self.events.write(
                "restarted", attempt=self.attempt_number + 1, delay=outcome.restart_delay
            )
        message = {
            "kind": "verdict",
            "verdict": outcome.verdict,
            "restart_delay": outcome.restart_delay,
            "agent_killed": outcome.agent_killed,
        }
        self.rendezvous.send(message)

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
        # Names may have any characters, also those that are not text.
        names = [name if name.isprintable() else ascii(name)[1:-1] for name in work.written()]
        if names:
            self.events.write("files", names=names[:MAX_FILES])
            self.say(
                f"files written in {work.path}: "
                f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
            )

    def _sleep(self, seconds: float) -> None:
        """Wait before a restart, or until a request arrives."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.requests.wants_stop:
            time.sleep(0.05)


def _remove_empty(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.stat().st_size == 0:
            path.unlink()


def _queue_time(job_start: JobStartFolder) -> dict[str, float]:
    """Return since when this job start was in the queue; empty if nobody has said so."""
    try:
        return {"queued_at": float(job_start.queued_at.read_text(encoding="utf-8"))}
    except (OSError, ValueError):
        return {}


def _require_descriptors(ranks: int) -> None:
    """Raise the limit on open files if this node's ranks need more, or say that it is too low."""
    wanted = FILES_PER_RANK * ranks + SPARE_FILES
    allowed = raise_descriptor_limit(wanted)
    if allowed < wanted:
        raise LaunchError(
            f"{ranks} ranks on one node need {wanted} open files, but the limit is {allowed}.",
            hint=f"Raise it with `ulimit -n {wanted}`, start fewer ranks, or ask an administrator "
            "for a higher limit.",
        )
