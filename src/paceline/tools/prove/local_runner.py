"""Runs the cases of a proof on this machine, one after the other, each as a run with its own folder.

Each run also has its own working directory, a copy of the project like that of submitted jobs, so that a script that
loads any checkpoint it finds does not continue from an earlier case.
"""

from __future__ import annotations

import logging
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.contract import env
from paceline.contract.checkpoint import checkpoint_step, find_checkpoints
from paceline.contract.foreign_records import read_object
from paceline.contract.rank_records import ProofSpec, weights_path
from paceline.contract.run_folder import DONE, FAILED, STOPPED, RunFolder
from paceline.errors import RunError, UsageError
from paceline.launch.agents import ParallelRuns
from paceline.launch.local_run import LocalPlan, LocalRun
from paceline.launch.resume import EarlierRun, read_launch_spec
from paceline.spec.job import Job, Program
from paceline.spec.option import Flag
from paceline.spec.shell_text import quote
from paceline.tools.prove.records import Case, CaseRecords, read_ranks
from paceline.watch.failure import describe_failure

_log = logging.getLogger("paceline")


@dataclass(frozen=True)
class Script:
    """The script, and how its arguments depend on the number of ranks."""

    program: Program
    # the option for the batch size per rank, whose value here is the global one
    batch_arg: str | None = None

    def arguments(self, case: Case, folder: Path) -> tuple[str, ...]:
        args = list(self.program.args)
        if self.batch_arg is not None:
            args = self._divided(args, self.batch_arg, case.ranks)
        values = {"ranks": case.ranks, "steps": case.steps, "folder": folder}
        for name, value in values.items():
            args = [each.replace(f"{{{name}}}", str(value)) for each in args]
        return tuple(args)

    def _divided(self, args: list[str], flag: str, ranks: int) -> list[str]:
        """Divide the batch size, as in `--batch-size 64` or `--batch-size=64`."""
        text = "\0".join(args)
        found = re.search(rf"(?:^|\0){re.escape(flag)}[=\0](\d+)(?=\0|$)", text)
        if found is None:
            hint = f"paceline prove --batch-arg {flag} {self.program.name} {flag} 64"
            raise UsageError(
                f"--batch-arg names {flag}, but the script's arguments do not contain it, with a "
                "number.",
                hint=f"Add the global batch size: {hint}",
            )
        batch = int(found[1])
        if batch % ranks:
            raise UsageError(
                f"{ranks} ranks cannot share a batch of {batch} evenly.",
                hint=f"Use a multiple of {ranks}, or other --ranks.",
            )
        return f"{text[: found.start(1)]}{batch // ranks}{text[found.end(1) :]}".split("\0")


class LocalRunner:
    """Starts each case as `paceline run` would, with a recorder in every rank."""

    def __init__(
        self, script: Script, *, load: Callable[[Program, Sequence[Flag]], Job], folder: Path
    ) -> None:
        self.script, self.folder = script, folder
        self._load = load
        self._started = 0  # cases
        self._pool = ParallelRuns(1)

    def run(self, case: Case, against: Case | None) -> CaseRecords:
        self._started += 1
        _log.info(f"run {self._started}: {case.name}")
        own = self._own_folder(case)
        own.mkdir(parents=True)
        spec = make_spec(case, own, None if against is None else self._own_folder(against))
        run = LocalRun(self._job(case, own), in_copy=True, variables=_write(spec, own))
        program = self.script.program
        run.prepare(["paceline", "prove", program.name, *program.args])
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
        return CaseRecords(case, read_ranks(own, case.ranks), note, stopped_after)

    def _own_folder(self, case: Case) -> Path:
        return self.folder / "cases" / case.slug

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
        about = read_object(folder.run_json)
        earlier = EarlierRun(folder, about, read_launch_spec(folder), True)
        variables = _write(replace(spec, stop_at=0), own)
        run = LocalRun(self._job(case, own), earlier=earlier, variables=variables)
        run.prepare([])
        return "", step, self._launch(run.plan)

    def remove_weights(self) -> None:
        for own in self.folder.glob("cases/*"):
            weights_path(own).unlink(missing_ok=True)


def make_spec(case: Case, own: Path, against: Path | None) -> ProofSpec:
    """Return what the ranks of a case record in the folder `own`."""
    return ProofSpec(
        folder=str(own),
        steps=case.steps,
        changes=[*case.without, *case.changes],
        reference=str(against or ""),
        stop_at=max(1, case.steps // 3) if case.interrupted else 0,
    )


def _write(spec: ProofSpec, own: Path) -> dict[str, str]:
    """Write the spec, and return the variables for the ranks. Compiled code would hide calls."""
    path = own / "probe.json"
    path.write_text(spec.to_json(), encoding="utf-8")
    return {env.PROOF: str(path), "TORCH_COMPILE_DISABLE": "1"}


def _failure(case: Case, folder: RunFolder) -> RunError:
    # a run's id does not lead there: it is not in the user's scratch folder
    name, where = folder.path.name, quote(str(folder.path))
    lines = [
        line.replace(name, where) if "paceline logs" in line else line
        for line in describe_failure(folder)
    ]
    return RunError(
        f"The script failed with {case.name}.",
        hint="\n  ".join(lines) or f"See its logs in {folder.path}.",
    )


def choose_folder(output: Path | None, project: Path, script: str) -> Path:
    """Create the folder of a proof: the one that was asked for, or a new one of the project."""
    if output is None:
        (project / "proofs").mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"{Path(script).stem}-", dir=project / "proofs"))
    try:
        output.mkdir(parents=True)
    except FileExistsError:
        raise UsageError(
            f"{output} already exists.", hint="Choose a new folder with --output."
        ) from None
    return output.absolute()
