"""A sweep from what was asked to its trials: here, or in the queue."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from paceline.cli import console
from paceline.cli.sweep_wandb import settle
from paceline.cluster.local.machine import detect_machine, interpreter
from paceline.cluster.runs import folder as folders
from paceline.cluster.runs.prepare import path_in_snapshot, prepare
from paceline.cluster.secrets.secrets import read_secrets
from paceline.cluster.slurm import commands as slurm
from paceline.cluster.slurm.arrays import array_size_limit, max_new_jobs
from paceline.cluster.slurm.submission import Draft
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import write_atomically
from paceline.contract.sweep_folder import DONE, FAILED, Point
from paceline.contract.verdict import INTERRUPTED_EXIT, STOPPED_EXIT
from paceline.errors import ClusterError, EnvironmentProblem, UsageError
from paceline.plan.local import plan_local
from paceline.plan.quote import command_line
from paceline.plan.run_path import RunPath
from paceline.plan.shape import Shape
from paceline.plan.slurm.array import Trials
from paceline.spec import Job
from paceline.sweep.folder import Ledger, at_work
from paceline.sweep.local import LocalTrials, slots, with_ranks
from paceline.sweep.points import new_trials, told
from paceline.sweep.settings import TPE_PARALLEL, Setting
from paceline.sweep.submission import Submission, fewest, plan_chunks

SHOWN = 20  # points of a dry run


class Start:
    """One `paceline sweep`: new trials of a sweep, or some of its old ones again."""

    def __init__(self, setting: Setting, *, local: bool) -> None:
        self.setting, self.local = setting, local
        self.search = setting.search
        run_path = folders.new_run_path(setting.job, os.environ)
        self.ledger = Ledger(
            RunPath(run_path.scratch, run_path.project, run_path.experiment, self.search.name)
        )
        self.ledger.refuse_another(self.search)

    @property
    def parallel(self) -> int | None:
        """Trials at the same time; None where only the room for them counts."""
        return self.search.parallel or (TPE_PARALLEL if self.search.sampler == "tpe" else None)

    def choose(self, resubmit: str | None) -> tuple[list[Point], list[int]]:
        """Trials to add, and the numbers of all that are to run."""
        known = self.ledger.known
        if resubmit is not None:
            numbers = self.ledger.chosen(resubmit)
            if not numbers:
                raise UsageError(
                    f"no trial of {self.search.name!r} is {resubmit}",
                    hint=f"look at them: paceline sweep show {self.search.name}",
                )
            return [], numbers
        new = new_trials(known, self.setting.wanted, seeds=self.setting.seeds)
        if not new:
            raise UsageError(
                f"the sweep {self.search.name!r} has all of these {len(known)} trials already",
                hint="add some by --count or more values, repeat some by --resubmit failed, or choose another --name",
            )
        return new, [point.number for point in new]

    def show(self, resubmit: str | None) -> str:
        """What a dry run prints: the trials, and what would be done with them."""
        new, numbers = self.choose(resubmit)
        points = {point.number: point for point in (*self.ledger.known, *new)}
        lines = [f"sweep   {self.ledger.folder.path}", f"trials  {len(numbers)}"]
        for number in numbers[:SHOWN]:
            seed = points[number].seed
            lines.append(
                f"  {number}: {told(points[number].point)}{'' if seed is None else f' (seed {seed})'}"
            )
        if len(numbers) > SHOWN:
            lines.append(f"  ... and {len(numbers) - SHOWN} more")
        if self.local:
            return "\n".join([*lines, f"here, {len(_Here(self).room)} at a time"])
        return "\n".join([*lines, "", _Queue(self).show(numbers)])

    def carry_out(self, resubmit: str | None) -> int:
        self._check_optuna()
        self.search = settle(self.search, self.setting, self.ledger)
        new, numbers = self.choose(resubmit)
        return _Here(self).carry_out(new, numbers) if self.local else _Queue(self).carry_out(new, numbers)

    def _check_optuna(self) -> None:
        """Where the trials' Python is this one, what it lacks is known before anything begins."""
        is_ours = self.setting.job.environment.kind == "current"
        if is_ours and self.search.needs_optuna and importlib.util.find_spec("optuna") is None:
            raise EnvironmentProblem(
                "this sweep needs Optuna, which is not installed", hint="pip install 'paceline[sweep]'"
            )

    # -- the submission's folder -----------------------------------------------------------------------

    @contextmanager
    def kit(self, new: Sequence[Point], numbers: Sequence[int]) -> Iterator[RunPath]:
        """A folder for what comes along, and the trials written down; all of it taken back where the body fails."""
        with folders.create_run_folder(self.ledger.kit_path()) as run_path:
            with self.ledger.written(self.search, new), self.ledger.reopened(numbers if not new else ()):
                yield run_path

    def fill(
        self, run_path: RunPath, launch_spec: LaunchSpec, *, job: Job, backend: str, snapshot_required: bool
    ) -> tuple[str, ...]:
        """The code, the run half, and what all trials have in common."""
        launch_spec = replace(launch_spec, experiment=self.ledger.run_path.experiment)
        shape = Shape(launch_spec.nodes, launch_spec.nproc, launch_spec.gpus, launch_spec.threads)
        prepared = prepare(
            job,
            run_path=run_path,
            shape=shape,
            launch_spec=launch_spec,
            command=["paceline", *sys.argv[1:]],
            backend=backend,
            snapshot_required=snapshot_required,
            compiled=job.environment.kind == "current",
        )
        if self.search.sampler == "list":
            before = (
                point.program for point in self.ledger.known if point.program
            )  # lines may be gone since
            programs = {
                name: self._place(name, job, run_path, copied=snapshot_required)
                for name in dict.fromkeys((*self.setting.scripts, *before))
            }
            write_atomically(run_path.folder.path / "programs.json", json.dumps(programs) + "\n")
        return prepared.notes

    @staticmethod
    def _place(name: str, job: Job, run_path: RunPath, *, copied: bool) -> str:
        path = job.cwd / name
        return str(
            path_in_snapshot(path, job=job, run_path=run_path) if copied and job.project.snapshot else path
        )

    def tell(self, lines: Sequence[str]) -> None:
        name = self.search.name
        print("\n".join([
            *lines,
            f"  folder  {self.ledger.folder.path}",
            f"  state   paceline sweep show {name}",
        ]), flush=True)  # fmt: skip


@dataclass
class _Queue:
    """On Slurm."""

    start: Start

    def __post_init__(self) -> None:
        start, setting = self.start, self.start.setting
        self.draft = Draft(setting.job, trials=Trials(start.ledger.folder.path, setting.pack))
        self.draft.run_path = start.ledger.kit_path()

    def show(self, numbers: Sequence[int]) -> str:
        plan = self.draft.plan(self.draft.run_path)
        job, pack = self.draft.job, self.start.setting.pack
        known = slurm.available()
        allowed = max_new_jobs(job.resources.account, wanted=len(numbers)) if known else None
        chunks = plan_chunks(
            numbers, pack=pack, largest=array_size_limit() if known else 1001,
            most=fewest(allowed, self.start.setting.tasks),
        )  # fmt: skip
        throttle = Submission(self.start.ledger, plan, pack=pack, parallel=self.start.parallel).throttle
        calls = [
            command_line(
                [*plan.sbatch[:-1], f"--array={chunk.array(throttle)}", plan.sbatch[-1], f"tasks-{number}"]
            )
            for number, chunk in enumerate(chunks, 1)
        ]
        return "\n".join([plan.script, *(f"# submitted by: {call}" for call in calls)])

    def carry_out(self, new: Sequence[Point], numbers: Sequence[int]) -> int:
        for warning in self.draft.check():
            console.say_note(f"{warning.text}{f' ({warning.hint})' if warning.hint else ''}")
        start, job = self.start, self.draft.job
        refusal: ClusterError | None = None
        with start.kit(new, numbers) as run_path, at_work(run_path.folder.path):
            self.draft.run_path = run_path
            plan = self.draft.plan(run_path)
            notes = start.fill(run_path, plan.launch_spec, job=job, backend="slurm", snapshot_required=True)
            slurm.write_files(plan)
            (run_path.folder.path / "logs").mkdir()
            setting = start.setting
            submission = Submission(
                start.ledger, plan, pack=setting.pack, parallel=start.parallel, tasks=setting.tasks
            )
            try:
                submission.give(numbers, account=job.resources.account)
            except ClusterError as problem:
                if not submission.jobs:
                    raise
                refusal = problem  # what is queued stays
        for note in (*plan.notes, *notes):
            console.say_note(note)
        self._tell(submission, len(numbers))
        if refusal is not None:
            raise ClusterError(
                f"{len(numbers) - submission.submitted} trials were not taken: {refusal.message}",
                hint=f"submit them later: paceline sweep --resubmit missing {start.search.name}",
            )
        return 0

    def _tell(self, submission: Submission, count: int) -> None:
        jobs = submission.jobs
        shown = f"job{'s' if len(jobs) > 1 else ''} {', '.join(jobs[:5])}{', ...' if len(jobs) > 5 else ''}"
        parallel = f", {self.start.parallel} at a time" if self.start.parallel else ""
        name = self.start.search.name
        self.start.tell([f"submitted {_trials(submission.submitted)} of {name} as {shown}{parallel}"])
        print(f"  end it  paceline sweep cancel {name}", flush=True)


class _Here:
    """On this machine."""

    def __init__(self, start: Start) -> None:
        self.start = start
        self.job = with_ranks(start.setting.job)
        self.room = slots(self.job, detect_machine(os.environ), start.search.parallel)[: start.parallel]

    def carry_out(self, new: Sequence[Point], numbers: list[int]) -> int:
        start, job = self.start, self.job
        python, filed = interpreter(job), read_secrets(job, os.environ)
        with start.kit(new, numbers) as run_path, at_work(run_path.folder.path):
            plan = plan_local(
                job, run_path=run_path, machine=self.room[0], python=python, environ=os.environ, filed=filed
            )
            notes = start.fill(run_path, plan.launch_spec, job=job, backend="local", snapshot_required=False)
        for note in (*plan.notes, *notes):
            console.say_note(note)
        start.tell([f"{_trials(len(numbers))} of {start.search.name}, {len(self.room)} at a time"])
        trials = LocalTrials(
            start.ledger,
            job,
            run_path.folder.path,
            room=self.room,
            python=python,
            filed=filed,
            tell=self._tell,
        )
        with at_work(run_path.folder.path):
            trials.run(numbers)
        self._tell_best(trials.ended)
        if trials.pool.stopping:
            name = start.search.name
            console.say_note(f"go on with it: paceline sweep --local --resubmit missing {name}")
            return INTERRUPTED_EXIT if trials.pool.interrupted else STOPPED_EXIT
        return int(any(result["state"] == FAILED for result in trials.ended.values()))

    def _tell(self, number: int, result: Mapping[str, Any]) -> None:
        value = result.get("value")
        metric = self.start.search.metric or "value"
        words = [f"trial {number}: {result['state']}"]
        if value is not None:
            words.append(f"{metric} {value:.6g}")
        if result.get("point"):
            words.append(told(result["point"]))
        if result.get("error"):
            words.append(result["error"])
        colour = {DONE: console.GREEN, FAILED: console.RED}.get(result["state"], console.GREY)
        console.say("paceline: " + ", ".join(words), colour=colour)

    def _tell_best(self, ended: Mapping[int, Mapping[str, Any]]) -> None:
        """The best single trial; means over seeds are what `sweep show` is for."""
        search = self.start.search
        values = {
            number: result["value"] for number, result in ended.items()
            if result["state"] == DONE and result["value"] is not None
        }  # fmt: skip
        if not values or search.metric is None:
            return
        choose = max if search.direction == "maximize" else min
        best = choose(values, key=lambda number: values[number])
        point = told(ended[best]["point"])
        console.say(
            f"paceline: best of {len(values)}: trial {best}, {search.metric} {values[best]:.6g}, {point}",
            colour=console.GREEN,
        )
        console.say_note(f"its folder: {self.start.ledger.folder.trial(best).path}")


def _trials(number: int) -> str:
    return f"{number} trial{'' if number == 1 else 's'}"
