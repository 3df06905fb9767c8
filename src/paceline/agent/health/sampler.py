"""A thread of the agent that writes down, now and then, what its node does: `system/node-K.jsonl`."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from paceline.agent.health.heartbeat import Beats
from paceline.agent.placement import Place
from paceline.contract.gpus import VISIBLE_DEVICES
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import RunFolder

FIRST = 1.0  # seconds: a short run leaves lines too; each pause is twice the last, up to what was asked for
CLOSED_WITHIN = 2.0  # a driver that hangs must not keep the agent


class Sampling:
    """One line per sample, appended. What cannot be read or written costs the samples, never the run."""

    def __init__(
        self,
        path: Path,
        *,
        every: float,
        roots: Callable[[], Collection[int]],
        told: Mapping[str, Any],
        gpus_in: Mapping[str, str] | None,
        warn: Callable[[str], None],
    ) -> None:
        """`told` goes into the first line; `gpus_in` is the environment that says which GPUs to ask, None for none."""
        self._path, self._every, self._roots, self._told = path, every, roots, dict(told)
        self._gpus_in, self._warn = gpus_in, warn
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="system metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(CLOSED_WITHIN)

    def _run(self) -> None:
        pause = min(FIRST, self._every)
        # The ranks start meanwhile: what is needed here is imported after them.
        if self._over.wait(pause):
            return
        try:
            self._sample(pause)
        except OSError as problem:
            self._warn(f"system metrics end here ({problem.filename or self._path}: {problem.strerror})")

    def _sample(self, pause: float) -> None:
        from paceline.agent.health.node_metrics import Sampler
        from paceline.agent.health.nvml import Gpus

        sampler = Sampler(self._roots, gpus=Gpus.open(self._gpus_in) if self._gpus_in is not None else None)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(self._path, flags, 0o644)
        try:
            _write(descriptor, {**self._told, "every": self._every, **sampler.facts()})
            while not self._over.wait(pause):
                _write(descriptor, sampler.sample())
                pause = min(2 * pause, self._every)
        finally:
            os.close(descriptor)
            sampler.close()


def begin_sampling(
    run: RunFolder,
    launch_spec: LaunchSpec,
    place: Place,
    beats: Beats,
    *,
    environ: Mapping[str, str],
    job_start: str,
    say: Callable[[str], None],
) -> Sampling | None:
    """Where it is wanted: one agent of each node looks at it."""
    if not launch_spec.system_metrics or sys.platform != "linux" or place.local_ranks[0] != 0:
        return None
    around = {**environ, **launch_spec.variables}
    if launch_spec.one_gpu_per_rank:  # this agent is shown one of the node's GPUs, and reports on all
        around.pop(VISIBLE_DEVICES, None)

    def roots() -> set[int]:
        """This agent and its ranks; where each rank has its own agent, whoever started all of them."""
        parent = os.getppid()
        if place.count > place.nodes and parent > 1:
            return {parent}
        return {os.getpid(), *(beats.read(local_rank).pid for local_rank in place.local_ranks)} - {0}

    return Sampling(
        run.node_metrics(place.node), every=launch_spec.system_metrics, roots=roots,
        told={"host": place.host, "job_start": job_start}, gpus_in=around if launch_spec.gpus else None,
        warn=lambda text: say(f"warning: {text}"),
    )  # fmt: skip


def _write(descriptor: int, values: Mapping[str, Any]) -> None:
    line = json.dumps({"time": round(time.time(), 3), **values}, ensure_ascii=False) + "\n"
    os.write(descriptor, line.encode())
