"""Carrying an order out: meet the other agents, then attempt after attempt until there is a verdict."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.agent import restart_policy
from paceline.agent.attempt import Outcome, Supervision
from paceline.agent.failures import Failure
from paceline.agent.health import preflight
from paceline.agent.health.heartbeat import Beats
from paceline.agent.health.sampler import Sampling, begin_sampling
from paceline.agent.placement import Place, find_place
from paceline.agent.rendezvous import network
from paceline.agent.rendezvous.rendezvous import Absent, Meeting, await_verdict, join
from paceline.agent.signals import Requests
from paceline.agent.verdict import Conclusions, Next, newest_checkpoint, step_of
from paceline.agent.workers.environment import thread_count
from paceline.agent.workers.exec import ExecWorkers
from paceline.agent.workers.fork import ForkedWorkers, Interrupted, UnsafeToFork
from paceline.agent.workers.group import Launch, WorkerGroup
from paceline.agent.workers.output import OutputCapture
from paceline.agent.workers.torchrun import TorchrunWorkers
from paceline.agent.workers.zygote.start import THREADS
from paceline.contract import env
from paceline.contract.jsonl import EventWriter
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import RunFolder
from paceline.contract.verdict import DONE, FAILED, INTERRUPTED_EXIT, STOPPED
from paceline.errors import LaunchError, PacelineError

if TYPE_CHECKING:  # most runs stage nothing
    from paceline.agent.staging.node_staging import NodeStaging


class Agent:
    """One agent of a run. The head (index 0) also judges, decides and writes."""

    def __init__(
        self,
        run: RunFolder,
        launch_spec: LaunchSpec,
        *,
        environ: Mapping[str, str],
        requests: Requests,
        zygote: ForkedWorkers | None,
    ) -> None:
        self.run, self.launch_spec, self.environ, self.requests = run, launch_spec, environ, requests
        self.zygote = zygote
        self.conclusions = Conclusions(run, launch_spec, environ=environ, say=self.say)
        self.job_start = self.conclusions.job_start
        self.place: Place | None = None
        self.meeting: Meeting | None = None
        self.starter: WorkerGroup | None = zygote
        self.beats: Beats | None = None
        self.data: NodeStaging | None = None
        self.sampling: Sampling | None = None
        self.events = EventWriter(run.events / "agent-0.jsonl")
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
        self.place = place = find_place(self.launch_spec, self.environ)
        self.events = EventWriter(self.run.events / f"agent-{place.index}.jsonl")
        facts = preflight.gather(place, folder=self.run.path, environ=self.environ)
        facts["attempt"] = len(self.run.attempts()) and self.run.attempts()[-1].number
        self.meeting = join(place, self.environ, facts, give_up=lambda: self.requests.end_now)
        self.number = self.meeting.roster[0]["attempt"]
        self.beats = Beats(place.local_world_size)
        self.events.write(
            "started",
            job_start=self.conclusions.job_start_name,
            host=place.host,
            pid=os.getpid(),
            index=place.index,
        )
        if place.is_head:
            self.conclusions.quietly(lambda: self.job_start.path.mkdir(parents=True, exist_ok=True))
        self._check_nodes()
        self._tell_threads()
        self.sampling = begin_sampling(
            self.run,
            self.launch_spec,
            place,
            self.beats,
            environ=self.environ,
            job_start=self.conclusions.job_start_name,
            say=self.say,
        )
        if self.launch_spec.data:
            if not self._bring_data():
                return 0
        elif 0 in place.local_ranks:
            self.conclusions.quietly(self._sweep)
        while True:
            outcome, follows = self._attempt()
            if not follows.relaunch:
                return self._exit_code(outcome)
            if not self._rest(follows.wait):
                if place.is_head:
                    self.conclusions.write_verdict(FAILED)
                return INTERRUPTED_EXIT if self.requests.interrupt else 1

    def give_up(self, problem: PacelineError) -> None:
        """The agent itself cannot go on: say so, here and in the folder."""
        self.say(str(problem))
        if self.meeting is not None and self.meeting.place.count > 1:
            host = self.place.host if self.place else "?"
            failure = Failure(restart_policy.ERROR, host, message=problem.message, time=time.time())
            self.meeting.say({"kind": "failed", "failure": vars(failure)})
        self.events.write("failed", why=problem.message)
        if isinstance(problem, Absent):
            self.conclusions.quietly(lambda: preflight.mark_unfit(self.job_start, problem.hosts))
        if self.place is None or self.place.is_head:
            self.conclusions.write_verdict(FAILED)
        elif self.meeting is not None:
            # A scheduler may end the whole step when one agent fails: the head is to write the verdict first.
            await_verdict(self.job_start, lambda: self.requests.end_now)

    def close(self) -> None:
        if self.sampling is not None:
            self.sampling.close()
        if self.data is not None:
            self.conclusions.quietly(self.data.stage_out)
        for each in {id(part): part for part in (self.starter, self.zygote, self.meeting)}.values():
            if each is not None:
                each.close()
        if self.beats is not None:
            self.beats.remove()

    # -- parts -----------------------------------------------------------------------------------------

    def _check_nodes(self) -> None:
        """Preflight: all agents see the same facts and so come to the same end; the head speaks."""
        assert self.place is not None
        assert self.meeting is not None
        if not self.launch_spec.check:
            return
        problems = preflight.judge(self.launch_spec, self.meeting.roster)
        for problem in problems:
            if not problem.fatal and self.place.is_head:
                self.say(f"warning: {problem}")
        unfit = preflight.unfit_hosts(problems)
        if not unfit:
            return
        if self.place.is_head:
            self.conclusions.quietly(lambda: preflight.mark_unfit(self.job_start, unfit))
            self.say(
                "some nodes are not fit for this run\n"
                + preflight.table(self.launch_spec, self.meeting.roster)
            )
        raise LaunchError("; ".join(str(problem) for problem in problems if problem.fatal))

    def _tell_threads(self) -> None:
        """A number from the environment decides over the one that was worked out: not without a word."""
        chosen = thread_count(self.launch_spec, self.environ)
        if (
            self.place
            and self.place.is_head
            and THREADS not in self.launch_spec.variables
            and chosen != self.launch_spec.threads
        ):
            self.say(
                f"{THREADS}={self.environ[THREADS]}, as the environment says; a rank's share of the cores is "
                f"{self.launch_spec.threads}"
            )

    def _bring_data(self) -> bool:
        """Stage in, while the zygote imports torch. False when a stop was asked for meanwhile: nothing has begun."""
        from paceline.agent.staging.node_staging import NodeStaging, StagingContext

        assert self.place is not None
        assert self.meeting is not None
        self.data = NodeStaging(
            StagingContext(
                self.run,
                self.launch_spec,
                self.place,
                self.environ,
                self.meeting,
                self.requests,
                self.job_start,
                self.events,
                self.say,
            )
        )
        if self.data.stage_in():
            return True
        if self.place.is_head:
            self.say("asked to stop while data was staged: no rank was started")
            self.conclusions.stopped(in_vain=True)
        return False

    def _sweep(self) -> None:
        """A run without data of its own looks after what others of the user's left, where they leave it by default."""
        assert self.place is not None
        bases = {self.environ.get("TMPDIR") or "/tmp", "/tmp"}
        private = [Path(base) / f"paceline-{os.geteuid()}" for base in sorted(bases)]
        if not any(path.is_dir() for path in private):
            return
        from paceline.agent.staging.cleanup import remove_leftovers

        job_start = self.job_start.path.name
        removed = [
            gone for path in private for gone in remove_leftovers(path, self.environ, job_start=job_start)
        ]
        if removed:
            self.say(f"removed {len(removed)} folders that earlier runs had left on {self.place.host}")

    def _attempt(self) -> tuple[Outcome, Next]:
        assert self.place is not None
        assert self.meeting is not None
        assert self.beats is not None
        self.number += 1
        attempt = self.run.attempt(self.number)
        for path in (attempt.path, self.run.checkpoints):  # a script may write to them, as its variables tell
            self.conclusions.quietly(functools.partial(path.mkdir, parents=True, exist_ok=True))
        self.beats.begin(self.number)
        starter = self._starter()
        master = self.meeting.prepare(self.number)
        extra = network.network_variables(
            nodes=self.launch_spec.nodes, peer=self.meeting.peer, runtime=self.launch_spec.runtime,
            environ={**self.environ, **self.launch_spec.variables},
        )  # fmt: skip
        if "NCCL_SOCKET_IFNAME" in extra:
            self._show_network(extra)
        if self.data is not None:
            extra = {**extra, **self.data.variables}
        launch = Launch(
            self.launch_spec, self.place, attempt, heartbeat=str(self.beats.path), address=master.addr,
            port=master.port, environ=self.environ, extra=extra,
        )  # fmt: skip
        saved_before = newest_checkpoint(self.run)
        streams = OutputCapture(
            log_path=launch.log, shared_log=attempt.node_log(self.place.node) if launch.shares_log else None,
            tee=self.launch_spec.tee, warn=lambda text: self.say(f"warning: {text}"),
        )  # fmt: skip
        supervision = Supervision(
            launch, starter=starter, streams=streams, beats=self.beats, meeting=self.meeting,
            requests=self.requests, job_start=self.job_start, events=self.events, say=self.say,
        )  # fmt: skip
        try:
            outcome = supervision.run()
        finally:
            starter.kill_leftovers()
            streams.close()
            self.conclusions.quietly(lambda: _remove_empty(attempt.path.glob("stacks-*.txt")))
        if not self.place.is_head:
            told = outcome.next or {"verdict": FAILED, "next": None}
            outcome.verdict = told["verdict"]
            return outcome, Next(**told["next"]) if told["next"] else Next(False)
        follows = self.conclusions.conclude(
            outcome, attempt, saved_before=saved_before, may_go_on=not self.requests.end_now
        )
        self._announce(outcome, follows)
        return outcome, follows

    def _show_network(self, chosen: Mapping[str, str]) -> None:
        """What was found out about the network, so that it can be overridden (`--env`) where it is wrong."""
        assert self.place is not None
        self.events.write("network", attempt=self.number, host=self.place.host, **chosen)
        if self.place.is_head and not self.requests.stop:
            self.say("network: " + " ".join(f"{name}={value}" for name, value in chosen.items()))

    def _starter(self) -> WorkerGroup:
        """Made once; a relaunch uses the same."""
        assert self.beats is not None
        if self.zygote is not None and self.starter is self.zygote:
            if self.zygote.gone:  # somebody killed it: another one serves the next attempt
                self.zygote.close()
                around = {name: text for name, text in self.environ.items() if name != env.ZYGOTE}
                self.zygote = self.starter = ForkedWorkers.prepare(self.launch_spec, around)
            try:
                self.zygote.wait_until_ready(lambda: self.requests.end_now)
                return self.zygote
            except Interrupted:
                raise LaunchError("interrupted before the ranks were started") from None
            except UnsafeToFork as why:
                self.say(f"{why}: ranks are started as fresh processes instead of being forked")
                self.zygote.close()
                self.zygote = self.starter = None
        if self.starter is None:
            if self.launch_spec.style == "torchrun" or (
                self.launch_spec.style == "mpirun" and not self._starts_one()
            ):
                self.starter = TorchrunWorkers(self.beats)
            else:
                self.starter = ExecWorkers(per_node=self.launch_spec.style == "spawn")
        return self.starter

    def _starts_one(self) -> bool:
        """mpirun starts a agent per rank, or one per node, whose ranks are then torchrun's."""
        assert self.place is not None
        return self.place.count == self.launch_spec.world_size

    def _announce(self, outcome: Outcome, follows: Next) -> None:
        """The head tells the others, and whoever reads the events."""
        assert self.meeting is not None
        failure = outcome.failure if outcome.verdict == FAILED else None
        told = {} if failure is None else {"rank": failure.rank, "host": failure.host, "how": failure.error}
        self.events.write(outcome.verdict, attempt=self.number, step=step_of(outcome), **told)
        if follows.relaunch:
            self.events.write("relaunched", attempt=self.number + 1, wait=follows.wait)
        self.meeting.say({
            "kind": "verdict", "verdict": outcome.verdict,
            "next": {"relaunch": True, "wait": follows.wait} if follows.relaunch else None,
        })  # fmt: skip

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


def _remove_empty(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.stat().st_size == 0:
            path.unlink()
