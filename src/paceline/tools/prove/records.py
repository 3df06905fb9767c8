"""The runs of a proof on this machine, and what they have recorded."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from paceline.contract import env
from paceline.contract.checkpoint import checkpoint_step, find_checkpoints
from paceline.contract.foreign_records import read_object, read_objects
from paceline.contract.rank_records import END, OTHER_DRAWS, START, STEP, ProofSpec, record_path
from paceline.contract.run_folder import RunFolder
from paceline.contract.verdict import DONE, FAILED, STOPPED
from paceline.errors import RunError, UsageError
from paceline.launch.agents import ParallelRuns
from paceline.launch.local_plan import LocalPlan
from paceline.launch.local_run import LocalRun
from paceline.launch.resume import read_launch_spec
from paceline.launch.submission import EarlierRun
from paceline.spec.job import Job, Program
from paceline.spec.option import Flag
from paceline.spec.shell_text import quote
from paceline.watch.failure import describe_failure

DEFAULT_STYLE = "fork"


@dataclass(frozen=True)
class Case:
    """One run of the script."""

    ranks: int
    steps: int
    style: str = DEFAULT_STYLE
    interrupted: bool = False  # stopped in the middle, and resumed
    # what is off or different, to find out what a difference comes from
    changes: tuple[str, ...] = ()
    without: tuple[str, ...] = ()  # the same for all cases of a proof, so not part of the name
    repeat: int = 0

    @property
    def name(self) -> str:
        parts = [f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"]
        if self.style != DEFAULT_STYLE:
            parts.append(self.style)
        if self.interrupted:
            parts.append("interrupted")
        changes = [each for each in self.changes if each != OTHER_DRAWS]
        if changes:
            parts.append(f"without {' and '.join(changes)}")
        if OTHER_DRAWS in self.changes:
            parts.append(OTHER_DRAWS)
        if self.repeat:
            parts.append("again")
        return ", ".join(parts)

    @property
    def slug(self) -> str:
        """The name of its folder."""
        return f"{self.name}, {self.steps} steps".replace(",", "").replace(" ", "-")


def plan_cases(
    ranks: Sequence[int], styles: Sequence[str], *, steps: int, interrupt: bool
) -> list[Case]:
    """Return the runs of a proof, the reference first.

    Every number of ranks runs in the first style. The other styles, and the interruption, run at the first number
    above one: they have to repeat that run bit for bit.
    """
    if not ranks or min(ranks) < 1 or len(set(ranks)) < len(ranks):
        raise UsageError(
            "--ranks needs different numbers, each at least 1.", hint="For example --ranks 1,2,4."
        )
    if not styles:
        raise UsageError("--styles is empty.", hint="For example --styles fork,torchrun.")
    if steps < 2:
        raise UsageError(
            f"--steps {steps} is too few to compare.", hint="Use at least 2; the default is 30."
        )
    found = [Case(count, steps, styles[0]) for count in ranks]
    several = next((case for case in found if case.ranks > 1), found[0])
    found += [replace(several, style=style) for style in styles[1:]]
    if interrupt:
        found.append(replace(several, interrupted=True))
    if len(found) == 1:
        found.append(replace(several, repeat=1))
    return found


@dataclass
class RankRecords:
    """The records of one rank. A run that was interrupted has written some steps twice: the last ones count."""

    start: dict[str, Any] = field(default_factory=dict)
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    end: dict[str, Any] = field(default_factory=dict)
    starts: int = 0

    @classmethod
    def read(cls, path: Path) -> RankRecords:
        found = cls()
        for record in read_objects(path):
            if record.get("kind") == START:
                found.start = found.start or record
                found.starts += 1
            elif record.get("kind") == STEP:
                found.steps[int(record["step"])] = record
            elif record.get("kind") == END:
                found.end = record
        return found


@dataclass
class CaseRecords:
    """What a case has done: the records of its ranks, and what it logged."""

    case: Case
    ranks: list[RankRecords]
    logged: dict[str, dict[int, float]] = field(default_factory=dict)  # by name, then by step
    note: str = ""  # what a reader should know about this run

    stopped_after: int = 0  # the step of the interruption

    @property
    def first(self) -> RankRecords:
        return self.ranks[0]

    @property
    def ranks_text(self) -> str:
        return f"{self.case.ranks} rank{'s' if self.case.ranks > 1 else ''}"

    @property
    def uses_runtime(self) -> bool:
        return bool(self.first.start.get("runtime"))

    @property
    def uses(self) -> set[str]:
        """What the model uses that may depend on the ranks: dropout, BatchNorm, random numbers."""
        return {use for rank in self.ranks for step in rank.steps.values() for use in step["uses"]}

    @property
    def dtype(self) -> str:
        return str(self.first.start.get("autocast") or self.first.start.get("dtype") or "float32")

    def together(self, step: int, key: str) -> list[Any] | None:
        """Return what all ranks have recorded in a step, in one list; None if one of them has nothing."""
        found: list[Any] = []
        for rank in self.ranks:
            values = rank.steps.get(step, {}).get(key)
            if values is None:
                return None
            found += values if isinstance(values, list) else [values]
        return found

    def backward_losses(self) -> dict[int, float]:
        """Return the loss of each step's backward passes, averaged over the ranks."""
        steps = set.intersection(*(set(rank.steps) for rank in self.ranks)) if self.ranks else set()
        found = {}
        for step in sorted(steps):
            losses = [rank.steps[step]["losses"] for rank in self.ranks]
            if all(losses):
                found[step] = math.fsum(math.fsum(each) for each in losses) / len(losses)
        return found


def read_ranks(folder: Path, count: int) -> list[RankRecords]:
    return [RankRecords.read(record_path(folder, rank)) for rank in range(count)]


def read_logged(path: Path) -> dict[str, dict[int, float]]:
    """Return the numbers of a file of JSON lines. Lines without a step count as one step each."""
    found: dict[str, dict[int, float]] = {}
    for number, line in enumerate(read_objects(path), start=1):
        step = line.get("step", line.get("iteration", number))
        for name, value in line.items():
            if (
                isinstance(value, (int, float))
                and not isinstance(value, bool)
                and isinstance(step, int)
            ):
                found.setdefault(name, {})[step] = float(value)
    return found


Progress = Callable[[Case], None]  # gets each case when it begins


@dataclass(frozen=True)
class Script:
    """The script, and how its arguments depend on the number of ranks."""

    program: Program
    # the option for the batch size per rank, whose value here is the global one
    batch_arg: str | None = None
    metrics: str | None = None  # the file of JSON lines that it writes

    def arguments(self, case: Case, folder: Path) -> tuple[str, ...]:
        values = {"ranks": str(case.ranks), "steps": str(case.steps), "folder": str(folder)}
        args = self._divided(case) if self.batch_arg else list(self.program.args)
        return tuple(_fill(each, values) for each in args)

    def metrics_file(self, case: Case, folder: Path, *, cwd: Path) -> Path | None:
        """Return the file of a run that works in `cwd`."""
        if self.metrics is None:
            return None
        return cwd / _fill(self.metrics, {"ranks": str(case.ranks), "folder": str(folder)})

    def _divided(self, case: Case) -> list[str]:
        found, flag = list(self.program.args), self.batch_arg or ""
        for number, each in enumerate(found):
            name, equals, value = each.partition("=")
            if name != flag:
                continue
            where = number if equals else number + 1
            text = value if equals else (found[where] if where < len(found) else "")
            if not text.isdigit():
                raise UsageError(
                    f"{flag} has no number in the script's arguments.",
                    hint=f"For example {flag} 64.",
                )
            each_rank = divide(int(text), case.ranks)
            found[where] = f"{name}={each_rank}" if equals else str(each_rank)
            return found
        raise UsageError(
            f"--batch-arg names {flag}, but the script's arguments do not contain it.",
            hint=f"Add the global batch size: paceline prove --batch-arg {flag} {self.program.name} {flag} 64",
        )


def divide(batch: int, ranks: int) -> int:
    if batch % ranks:
        raise UsageError(
            f"{ranks} ranks cannot share a batch of {batch} evenly.",
            hint=f"Use a multiple of {ranks}, or other --ranks.",
        )
    return batch // ranks


def _fill(text: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return text


class LocalRunner:
    """Starts each case as `paceline run` would, with a recorder in every rank."""

    def __init__(
        self,
        script: Script,
        *,
        load: Callable[[Program, Sequence[Flag]], Job],
        folder: Path,
        progress: Progress,
    ) -> None:
        self.script, self.folder, self.progress = script, folder, progress
        self._load = load
        self._pool = ParallelRuns(1)

    def run(self, case: Case, against: Sequence[Case]) -> CaseRecords:
        self.progress(case)
        own = self.folder / "cases" / case.slug
        own.mkdir(parents=True)
        spec = make_spec(case, against, own=own, weights=self.folder / "weights")
        run = self._create(case, own, _write(spec, own))
        folder = run.plan.run_path.folder
        verdict = self._launch(run.plan)
        note, stopped_after = "", 0
        if case.interrupted and verdict == STOPPED:
            note, stopped_after, verdict = self._resume(case, own, spec, folder)
        elif case.interrupted and verdict == DONE:
            note = "it ended before it could be interrupted; use more --steps"
        if self._pool.stopping:
            raise KeyboardInterrupt
        if verdict == FAILED:
            raise _failure(case, folder)
        # the final weights are in a file of their own
        shutil.rmtree(folder.checkpoints, ignore_errors=True)
        metrics = self.script.metrics_file(case, own, cwd=Path(run.plan.launch_spec.cwd))
        return replace(
            self._read(case, own, folder, metrics), note=note, stopped_after=stopped_after
        )

    def _create(self, case: Case, own: Path, spec: Path) -> LocalRun:
        job = self._job(case, own)
        variables = {env.PROOF: str(spec)}
        run = LocalRun(job, in_copy=job.project.snapshot, variables=variables)
        run.prepare(["paceline", "prove", job.program.name, *job.program.args])
        return run

    def _job(self, case: Case, own: Path) -> Job:
        program = self.script.program
        flags = [
            Flag("--ranks", "launch.nproc", case.ranks),
            Flag("--styles", "launch.style", case.style),
            Flag("--steps", "runtime.max_steps", case.steps),
            Flag("--tee", "launch.tee", "none"),
            Flag("--scratch", "project.scratch", str(self.folder / "runs")),
            Flag("--snapshot", "project.snapshot", True),
            Flag("--workdir", "project.workdir", "snapshot"),
            Flag("--wandb", "tracking.wandb", False),
        ]
        program = replace(program, args=self.script.arguments(case, own))
        job = self._load(program, flags)
        if not self.folder.is_relative_to(job.folder.absolute()):
            return job
        # The proof itself is not part of the project.
        exclude = (*job.project.exclude, str(self.folder.relative_to(job.folder.absolute())))
        return self._load(program, [*flags, Flag("--output", "project.exclude", exclude)])

    def _launch(self, plan: LocalPlan) -> str:
        verdicts: list[str] = []
        self._pool.run(
            [0],
            begin=lambda number, slot: plan,
            end=lambda number, verdict: verdicts.append(verdict),
            stop=lambda count: None,
            poll=lambda: None,
        )
        return verdicts[0] if verdicts else FAILED

    def _resume(
        self, case: Case, own: Path, spec: ProofSpec, folder: RunFolder
    ) -> tuple[str, int, str]:
        """Start a run again that has stopped. Returns what kept it from that, the step, and the verdict."""
        saved = find_checkpoints(folder.path)
        if not saved:
            return "nothing was saved: the script does not call run.resume", 0, STOPPED
        step = checkpoint_step(saved[0].name) or 0
        path = _write(replace(spec, stop_at=0), own)
        about = read_object(folder.run_json)
        earlier = EarlierRun(folder, about, read_launch_spec(folder), True)
        variables = {env.PROOF: str(path)}
        run = LocalRun(self._job(case, own), earlier=earlier, variables=variables)
        run.prepare([])
        return "", step, self._launch(run.plan)

    def remove_weights(self) -> None:
        shutil.rmtree(self.folder / "weights", ignore_errors=True)

    def _read(self, case: Case, own: Path, folder: RunFolder, metrics: Path | None) -> CaseRecords:
        logged = read_logged(folder.metrics if metrics is None else metrics)
        if metrics is not None and not logged:
            raise RunError(
                f"The script has written no numbers to {metrics}.", hint="Check --metrics."
            )
        return CaseRecords(case, read_ranks(own, case.ranks), logged)


def make_spec(case: Case, against: Sequence[Case], *, own: Path, weights: Path) -> ProofSpec:
    """Return what the ranks of a case record in the folder `own`, with their final weights in `weights`."""
    return ProofSpec(
        folder=str(own),
        steps=case.steps,
        changes=[*case.without, *case.changes],
        weights=str(weights / f"{case.slug}.pt"),
        references={each.name: str(weights / f"{each.slug}.pt") for each in against},
        stop_at=max(1, case.steps // 3) if case.interrupted else 0,
    )


def _write(spec: ProofSpec, own: Path) -> Path:
    path = own / "probe.json"
    path.write_text(spec.to_json(), encoding="utf-8")
    return path


def _failure(case: Case, folder: RunFolder) -> RunError:
    lines = describe_failure(folder)
    # a run's id does not lead there: it is not in the user's scratch folder
    where = quote(str(folder.path))
    what = "\n  ".join(
        line.replace(folder.path.name, where) if "paceline logs" in line else line for line in lines
    )
    return RunError(
        f"The script failed with {case.name}.", hint=what or f"See its logs in {folder.path}."
    )


def choose_folder(output: Path | None, project: Path, script: str) -> Path:
    """Create the folder of a proof: the one that was asked for, or the next one of the project.

    Two proofs that start at once must not share one, so it belongs to who creates it.
    """
    if output is not None:
        try:
            output.mkdir(parents=True)
        except FileExistsError:
            raise UsageError(
                f"{output} already exists.", hint="Choose a new folder with --output."
            ) from None
        return output.absolute()
    (project / "proofs").mkdir(parents=True, exist_ok=True)
    for number in count(1):
        folder = project / "proofs" / f"{Path(script).stem}-{number}"
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError
