"""Run a sweep's trials on this machine, several at a time. They are opened and closed as in
jobs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.agent.sweep_trial import close_trial, open_trial
from paceline.contract.gpus import VISIBLE_DEVICES
from paceline.contract.run_folder import FAILED, INTERRUPTED_EXIT, STOPPED, STOPPED_EXIT
from paceline.contract.sweep_folder import DONE, NoPoint, Point
from paceline.errors import ClusterError, PacelineError, UsageError
from paceline.launch.agents import ParallelRuns
from paceline.launch.local_run import LocalPlan, Machine, detect_machine, interpreter, plan_local
from paceline.launch.resume import resolve_start
from paceline.launch.run_folder import claim_run
from paceline.launch.secrets import read_secrets
from paceline.spec.job import Job
from paceline.spec.shell_text import quote
from paceline.sweep.folder import mark_starter
from paceline.sweep.results import find_error
from paceline.sweep.settings import SweepSettings, describe_point
from paceline.sweep.start import SweepStart, count_trials

log = logging.getLogger(__name__)


class LocalSweep(SweepStart):
    """A sweep whose trials run on this machine."""

    def __init__(self, settings: SweepSettings) -> None:
        super().__init__(settings)
        self.job = with_ranks(resolve_start(settings.job, os.environ))
        self.slots = slots(self.job, detect_machine(os.environ), self.search.parallel)[
            : self.parallel
        ]
        self.pool = ParallelRuns(len(self.slots))
        self.results: dict[int, Mapping[str, Any]] = {}

    def describe_trials(self, numbers: Sequence[int]) -> str:
        return f"on this machine, {len(self.slots)} at a time"

    def run_trials(self, new: Sequence[Point], numbers: Sequence[int]) -> int:
        self.python, self.secrets = interpreter(self.job), read_secrets(self.job, os.environ)
        run_path = self.writer.submission_path()
        with self.new_submission(run_path, new, numbers), mark_starter(run_path.folder.path):
            plan = plan_local(
                self.job,
                run_path=run_path,
                machine=self.slots[0],
                python=self.python,
                environ=os.environ,
                file_secrets=self.secrets,
            )
            notes = self.prepare(
                run_path, plan.launch_spec, job=self.job, backend="local", snapshot_required=False
            )
        for note in (*plan.notes, *notes):
            log.info(note)
        name = self.search.name
        self.report_start(f"{count_trials(len(numbers))} of {name}, {len(self.slots)} at a time")
        self.submission: Path = run_path.folder.path
        with mark_starter(self.submission):
            self.pool.run(list(numbers), begin=self._begin, end=self._end, stop=self._report_stop)
        self._report_best()
        if self.pool.stopping:
            log.info(f"to continue: paceline sweep --local --resubmit missing {quote(name)}")
            return INTERRUPTED_EXIT if self.pool.interrupted else STOPPED_EXIT
        return int(any(result["state"] == FAILED for result in self.results.values()))

    def _begin(self, number: int, slot: int) -> LocalPlan | None:
        folder = self.writer.folder
        if folder.cancelled.exists():  # from another terminal
            return None
        try:
            claim_run(folder.trial(number))
        except (UsageError, ClusterError) as problem:  # another command or a job runs it
            log.info(f"skipping trial {number}: {problem.message}")
            return None
        if folder.trial(number).result.exists():  # another host has run it since
            return None
        try:
            variables = {**self.job.environment.variables, **self.secrets.values}
            open_trial(folder, self.submission, number, variables=variables)
        except NoPoint as reason:
            if folder.trial(number).pruned.exists():
                log.info(str(reason))
            return None
        except PacelineError as problem:
            self._report(number, {"state": FAILED, "error": problem.message})
            self.results[number] = close_trial(folder, number, FAILED, error=problem.message)
            return None
        plan = plan_local(
            self.job,
            run_path=self.writer.trial_path(number),
            machine=self.slots[slot],
            python=self.python,
            environ=os.environ,
            file_secrets=self.secrets,
        )
        if not plan.launch_spec.gpus or len(plan.agents) > 1:
            return plan
        devices = {VISIBLE_DEVICES: ",".join(self.slots[slot].devices)}
        agents = tuple(
            replace(agent, variables={**agent.variables, **devices}) for agent in plan.agents
        )
        return replace(plan, agents=agents)

    def _end(self, number: int, verdict: str) -> None:
        if verdict == STOPPED or (verdict == FAILED and self.pool.stopping):
            self._report(number, {"state": STOPPED})
            return
        self.results[number] = close_trial(self.writer.folder, number, verdict)
        self._report(number, self.results[number])

    def _report_stop(self, count: int) -> None:
        again = "; press Ctrl-C again to end at once" if self.pool.interrupted else ""
        log.info(
            f"stop requested: {count_trials(count)} will save and stop, and no more will "
            f"start{again}"
        )

    def _report(self, number: int, result: Mapping[str, Any]) -> None:
        parts = [f"trial {number}: {result['state']}"]
        if result.get("value") is not None:
            parts.append(f"{self.search.metric or 'value'} {result['value']:.6g}")
        if result.get("point"):
            parts.append(describe_point(result["point"]))
        error = result.get("error")
        if result["state"] == FAILED:
            error = error or find_error(self.writer.folder.trial(number))
        if error:
            parts.append(error)
        log.info(", ".join(parts))

    def _report_best(self) -> None:
        """Print the best single trial. `sweep show` has the means over seeds."""
        values = {
            number: result["value"]
            for number, result in self.results.items()
            if result["state"] == DONE and result["value"] is not None
        }
        if not values or self.search.metric is None:
            return
        choose = max if self.search.direction == "maximize" else min
        best = choose(values, key=lambda number: values[number])
        point = describe_point(self.results[best]["point"])
        log.info(
            f"best of {len(values)}: trial {best}, {self.search.metric} {values[best]:.6g}, {point}"
        )
        log.info(f"its folder: {self.writer.folder.trial(best).path}")


def with_ranks(job: Job) -> Job:
    """Set the number of ranks if it is open: one per GPU that each trial asks for, or one."""
    if job.launch.nproc is not None:
        return job
    ranks = max(1, job.resources.gpus_per_node or 1)
    launch = job.launch.model_copy(update={"nproc": ranks})
    return replace(job, tables=job.tables.model_copy(update={"launch": launch}))


def slots(job: Job, machine: Machine, parallel: int | None) -> list[Machine]:
    """Return each concurrent trial's share of this machine."""
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
