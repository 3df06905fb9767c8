"""The faults of a soak. Each one picks a victim among the live runs, and says which runs it hits."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Sequence

from tests.slurm.harness import Cluster
from tests.soak.runs import SoakRun

TOO_EARLY = 0.2  # share of the faults that may hit a run which has not recovered from its last one

Hit = Callable[[str, Sequence[SoakRun]], None]  # is told before the fault happens


class Faults:
    """Injects faults. `hit` records which runs each one concerns; `ending` cuts pauses short."""

    def __init__(
        self, cluster: Cluster, rng: random.Random, hit: Hit, ending: threading.Event
    ) -> None:
        self.cluster, self.rng, self.hit, self.ending = cluster, rng, hit, ending

    def _pick(self, runs: Sequence[SoakRun]) -> SoakRun | None:
        """Pick a run that has trained since its last fault, or now and then any.

        On a busy machine, runs would otherwise get faults faster than they can start.
        """
        any_run = self.rng.random() < TOO_EARLY
        ready = [run for run in runs if any_run or run.has_recovered]
        return ready[int(self.rng.random() * len(ready))] if ready else None

    def _pick_node(self, runs: Sequence[SoakRun]) -> tuple[str, list[SoakRun]]:
        """Return a node, one with runs if there is any, and the runs on it."""
        nodes = [
            node for node in self.cluster.nodes if any(node in run.hosts for run in runs)
        ] or self.cluster.nodes
        node = nodes[int(self.rng.random() * len(nodes))]
        return node, [run for run in runs if node in run.hosts]

    # -- to one run ------------------------------------------------------------------------------------

    def kill_rank(self, runs: Sequence[SoakRun]) -> None:
        if run := self._pick([run for run in runs if run.step and run.ranks()]):
            self._kill("rank", run, run.ranks())

    def kill_head_agent(self, runs: Sequence[SoakRun]) -> None:
        if run := self._pick([run for run in runs if run.agents()]):
            self._kill("head agent", run, run.agents()[:1])

    def kill_member_agent(self, runs: Sequence[SoakRun]) -> None:
        if run := self._pick([run for run in runs if len(run.agents()) > 1]):
            self._kill("member agent", run, run.agents()[1:])

    def _kill(self, kind: str, run: SoakRun, processes: Sequence[tuple[str, int]]) -> None:
        host, pid = processes[int(self.rng.random() * len(processes))]
        if host in run.hosts and self.cluster.is_running(host) and self._belongs(host, pid, run):
            self.hit(kind, [run])
            self.cluster.exec(host, ["kill", "-KILL", str(pid)], timeout=60)

    def _belongs(self, host: str, pid: int, run: SoakRun) -> bool:
        """Return whether a pid on a node is still a process of this run: pids are reused."""
        command = ["grep", "-qz", f"PACELINE_RUN={run.folder.path}", f"/proc/{pid}/environ"]
        return self.cluster.exec(host, command, timeout=60).returncode == 0

    def requeue(self, runs: Sequence[SoakRun]) -> None:
        if run := self._pick(runs):
            self.hit("requeue", [run])
            self.cluster.run(["scontrol", "requeue", run.job], check=False)

    def time_limit(self, runs: Sequence[SoakRun]) -> None:
        """Slurm signals the job 100 s before the limit, and looks at limits every 30 s."""
        if run := self._pick([run for run in runs if run.step]):
            self.hit("time limit", [run])
            update = ["scontrol", "update", f"jobid={run.job}"]
            self.cluster.run([*update, "endtime=now+105"], check=False)
            self._later(60, lambda: self.cluster.run([*update, "timelimit=60"], check=False))

    def fill_disk(self, runs: Sequence[SoakRun]) -> None:
        if run := self._pick([run for run in runs if run.disk.mounted]):
            self.hit("full disk", [run])
            run.disk.fill()
            self._later(self.rng.uniform(5, 60), run.disk.free)

    @staticmethod
    def _later(seconds: float, action: Callable[[], object]) -> None:
        timer = threading.Timer(seconds, action)
        timer.daemon = True
        timer.start()

    # -- to nodes and to the cluster -------------------------------------------------------------------

    def kill_node(self, runs: Sequence[SoakRun]) -> None:
        node, victims = self._pick_node(runs)
        self.hit("node", victims)
        self.cluster.kill_node(node, mark_down=self.rng.random() < 0.5)
        self.ending.wait(self.rng.uniform(5, 45))
        self.cluster.start_node(node, timeout=180)

    def cut_cable(self, runs: Sequence[SoakRun]) -> None:
        """Shorter and longer than Slurm waits for a node (40 s)."""
        node, victims = self._pick_node(runs)
        self.hit("cable", victims)
        self.cluster.cut(node)
        self.ending.wait(self.rng.uniform(3, 70))
        self.cluster.heal(node)
        self.cluster.wait_ready(timeout=180, names=[node])

    def preempt(self, runs: Sequence[SoakRun]) -> None:
        node, victims = self._pick_node(runs)
        self.hit("preemption", victims)
        options = ["--partition=high", "--exclusive", f"--nodelist={node}", "--time=5"]
        urgent = self.cluster.submit("sleep 600", *options)
        for _ in range(60):
            if self.cluster.state(urgent) == "RUNNING" or self.ending.wait(1):
                break
        self.ending.wait(self.rng.uniform(0, 5))
        self.cluster.run(["scancel", urgent], check=False)

    def restart_controller(self, runs: Sequence[SoakRun]) -> None:
        self.hit("controller", runs)
        self.cluster.restart_controller(kill=self.rng.random() < 0.7)

    # -- what may happen when --------------------------------------------------------------------------

    def of_runs(self) -> list[Callable[[Sequence[SoakRun]], None]]:
        """The faults that concern one run, the more frequent ones several times."""
        kinds = [
            self.kill_rank,
            self.kill_head_agent,
            self.kill_member_agent,
            self.requeue,
            self.time_limit,
        ]
        return [*kinds, self.kill_rank, *([self.fill_disk] if os.geteuid() == 0 else [])]

    def of_nodes(self) -> list[Callable[[Sequence[SoakRun]], None]]:
        """The faults that concern a node or the whole cluster. Only one of them happens at a time."""
        kinds = [self.kill_node, self.preempt, self.restart_controller]
        return [*kinds, *([self.cut_cable] if os.geteuid() == 0 else [])]
