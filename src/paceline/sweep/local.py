"""Trials on this machine: opened and closed as jobs do it, several at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.agent.trial import close_trial, open_trial
from paceline.cluster.local.parallel_runs import ParallelRuns
from paceline.contract.gpus import VISIBLE_DEVICES
from paceline.contract.sweep_folder import NoPoint
from paceline.contract.verdict import FAILED, STOPPED
from paceline.errors import PacelineError
from paceline.plan.local import LocalPlan, plan_local
from paceline.plan.secrets import NO_SECRETS, Secrets
from paceline.plan.shape import Machine
from paceline.spec import Job
from paceline.sweep.folder import Ledger

Tell = Callable[[int, Mapping[str, Any]], None]


def with_ranks(job: Job) -> Job:
    """Where nobody said how many: a rank per GPU that each trial asks for, or one."""
    if job.launch.nproc is not None:
        return job
    ranks = max(1, job.resources.gpus_per_node or 1)
    launch = job.launch.model_copy(update={"nproc": ranks})
    return replace(job, tables=job.tables.model_copy(update={"launch": launch}))


def slots(job: Job, machine: Machine, parallel: int | None) -> list[Machine]:
    """What each of the trials that run at the same time may use of this machine."""
    ranks = (job.launch.nproc or 1) * (job.resources.nodes if job.is_typed("job.nodes") else 1)
    if job.runtime.cpu or not machine.gpus:
        count = parallel or max(1, machine.cores // ranks)
        return [replace(machine, cores=max(1, machine.cores // count))] * count
    count = max(1, min(machine.gpus // ranks, parallel or machine.gpus))
    cores, names = max(1, machine.cores // count), machine.device_names()
    return [
        replace(machine, cores=cores, gpus=ranks, devices=names[slot * ranks : (slot + 1) * ranks])
        for slot in range(count)
    ]


class LocalTrials:
    def __init__(
        self,
        ledger: Ledger,
        job: Job,
        kit: Path,
        *,
        room: list[Machine],
        python: str,
        filed: Secrets = NO_SECRETS,
        tell: Tell,
    ) -> None:
        self.ledger, self.job, self.kit = ledger, job, kit
        self.room, self.python, self.filed, self.tell = room, python, filed, tell
        self.ended: dict[int, Mapping[str, Any]] = {}
        self.pool = ParallelRuns(len(room))

    def run(self, numbers: list[int]) -> None:
        self.pool.run(numbers, begin=self._begin, end=self._end)

    def _begin(self, number: int, slot: int) -> LocalPlan | None:
        folder = self.ledger.folder
        if folder.cancelled.exists():  # somebody, in another terminal
            return None
        try:
            variables = {**self.job.environment.variables, **self.filed.values}
            open_trial(folder, self.kit, number, variables=variables)
        except NoPoint:
            return None
        except PacelineError as problem:
            self.tell(number, {"state": FAILED, "error": problem.message})
            self.ended[number] = close_trial(folder, number, FAILED, error=problem.message)
            return None
        plan = plan_local(
            self.job, run_path=self.ledger.trial_path(number), machine=self.room[slot], python=self.python,
            environ=os.environ, filed=self.filed,
        )  # fmt: skip
        devices = self.room[slot].devices
        if not plan.launch_spec.gpus or len(plan.agents) > 1:
            return plan
        own = {VISIBLE_DEVICES: ",".join(devices)}
        agents = tuple(replace(each, variables={**each.variables, **own}) for each in plan.agents)
        return replace(plan, agents=agents)

    def _end(self, number: int, verdict: str) -> None:
        if verdict == STOPPED or (verdict == FAILED and self.pool.stopping):
            self.tell(number, {"state": STOPPED})
            return
        self.ended[number] = close_trial(self.ledger.folder, number, verdict)
        self.tell(number, self.ended[number])
