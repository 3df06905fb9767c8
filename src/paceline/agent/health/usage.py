"""A thread of the agent that records its node's usage in `system/node-K.jsonl`."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.agent.health.hang import process_state
from paceline.agent.health.heartbeat import Heartbeat, Heartbeats
from paceline.agent.launcher_placement import Placement
from paceline.contract.gpus import VISIBLE_DEVICES
from paceline.contract.jsonl import LineWriter
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import RunFolder

if TYPE_CHECKING:
    from paceline.agent.health.node_metrics import NodeMetrics

# seconds; it doubles up to the configured one, so that short runs leave samples too
FIRST_INTERVAL = 1.0
CLOSE_TIMEOUT = 2.0  # seconds; a driver that hangs must not hold the agent


class Sampler:
    """Appends one line per sample, or at least renews the file's date: `paceline ps` takes that as
    a sign of life.
    """

    def __init__(
        self,
        path: Path,
        *,
        interval: float,
        roots: Callable[[], Collection[int]],
        header: Mapping[str, Any],
        ranks: Callable[[], list[list[Any]]] = list,
        gpu_environ: Mapping[str, str] | None,
        warn: Callable[[str], None],
    ) -> None:
        """`header` goes into the first line, and `ranks` into each of the others.

        `gpu_environ` says which GPUs are visible; None samples no GPU.
        """
        self._path, self._interval, self._roots, self._header = path, interval, roots, dict(header)
        self._ranks, self._gpu_environ, self._warn = ranks, gpu_environ, warn
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-sampler", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(CLOSE_TIMEOUT)

    def _run(self) -> None:
        pause = min(FIRST_INTERVAL, self._interval)
        # The ranks start meanwhile, so wait before importing what is needed here.
        if self._closed.wait(pause):
            return
        try:
            self._sample(pause)
        except OSError as problem:
            self._warn(
                f"system metrics stop here ({problem.filename or self._path}: {problem.strerror})"
            )

    def _sample(self, pause: float) -> None:
        from paceline.agent.health.node_metrics import NodeMetrics
        from paceline.agent.health.nvml import Gpus

        gpus = Gpus.open(self._gpu_environ) if self._gpu_environ is not None else None
        metrics = NodeMetrics(self._roots, gpus=gpus)
        lines = LineWriter(self._path)
        header = {**self._header, "interval": self._interval, **metrics.facts()}
        try:
            has_header = lines.append(_line(header))
            while not self._closed.wait(pause):
                has_header = has_header or lines.append(_line(header))
                if not lines.append(self._line_of_sample(metrics)):
                    with suppress(OSError):  # a full disk still takes a date
                        os.utime(self._path)
                pause = min(2 * pause, self._interval)
        finally:
            lines.close()
            metrics.close()

    def _line_of_sample(self, metrics: NodeMetrics) -> str:
        try:
            return _line({**metrics.sample(), "ranks": self._ranks()})
        # this node is short of descriptors or memory: the next sample may work
        except OSError as problem:
            return _line({"error": f"{problem.filename or 'sample'}: {problem.strerror}"})


def start_sampler(
    run: RunFolder,
    launch_spec: LaunchSpec,
    placement: Placement,
    heartbeats: Heartbeats,
    *,
    environ: Mapping[str, str],
    job_start: str,
    warn: Callable[[str], None],
) -> Sampler | None:
    """Start sampling if the run asks for it; one agent of each node does it."""
    if not launch_spec.system_metrics or sys.platform != "linux" or placement.local_ranks[0] != 0:
        return None
    gpu_environ = {**environ, **launch_spec.variables}
    # this agent sees one of the node's GPUs, but reports on all of them
    if launch_spec.one_gpu_per_rank:
        gpu_environ.pop(VISIBLE_DEVICES, None)

    def roots() -> set[int]:
        """Return this agent and its ranks; if each rank has its own agent, the process that
        started them all.
        """
        parent = os.getppid()
        if placement.count > placement.nodes and parent > 1:
            return {parent}
        return {
            os.getpid(),
            *(heartbeats.read(local_rank).pid for local_rank in placement.local_ranks),
        } - {0}

    def ranks() -> list[list[Any]]:
        numbers = zip(placement.ranks, placement.local_ranks, strict=True)
        return [
            rank_row(rank, heartbeats.read(local), heartbeats.read_times(local))
            for rank, local in numbers
        ]

    return Sampler(
        run.node_metrics(placement.node),
        interval=launch_spec.system_metrics,
        roots=roots,
        header={"host": placement.host, "job_start": job_start},
        ranks=ranks,
        gpu_environ=gpu_environ if launch_spec.gpus else None,
        warn=warn,
    )


def rank_row(rank: int, heartbeat: Heartbeat, times: tuple[float, float]) -> list[Any]:
    """Return a rank's number, state, step, seconds since its heartbeat, process state, and how it
    spends its time.
    """
    age = round(max(0.0, time.time() - heartbeat.time), 1) if heartbeat.time else None
    process = process_state(heartbeat.pid) if heartbeat.pid else ""
    seconds = [round(each, 6) for each in (heartbeat.seconds_per_step, *times)]
    return [rank, heartbeat.state, heartbeat.step, age, process, *seconds]


def _line(values: Mapping[str, Any]) -> str:
    return json.dumps({"time": round(time.time(), 3), **values}, ensure_ascii=False) + "\n"
