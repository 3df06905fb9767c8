"""Run a script on this machine, with its loaders recorded."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.contract.foreign_records import read_tail
from paceline.contract.verdict import DONE, INTERRUPTED_EXIT
from paceline.errors import LaunchError
from paceline.launch.agents import ParallelRuns
from paceline.launch.local_run import LocalRun
from paceline.spec.job import Job, Program
from paceline.spec.typed_flags import Flag
from paceline.tools.inspect.samples import Samples, read_samples
from paceline.watch.failure import describe_failure

MODULE = "paceline.runtime.data.inspection"  # of the other half: it runs in the ranks
RECORDS = "samples"
TAIL = 4096  # bytes of the log that may say why the run failed
INTERRUPT_INTERVAL = 1.0  # seconds: two signals at once may arrive as one


@dataclass(frozen=True)
class Request:
    """What to record."""

    program: Program
    epochs: int = 2
    limit: int | None = None  # steps of each epoch; None: all of them

    def recorder(self, folder: Path, cwd: Path) -> Program:
        """Return the program that runs the script and records its loaders."""
        script = (
            ("-m", self.program.name) if self.program.is_module else (str(cwd / self.program.name),)
        )
        args = (
            str(folder / RECORDS),
            str(self.epochs),
            str(self.limit or 0),
            *script,
            *self.program.args,
        )
        return Program(MODULE, args, is_module=True)


def overrides(folder: Path) -> list[Flag]:
    """Return the settings of a run that nobody wants to keep: its own folder, no copy of the code,
    no trackers.
    """
    return [
        Flag("--scratch", "project.scratch", str(folder)),
        Flag("--no-snapshot", "project.snapshot", False),
        Flag("--no-wandb", "tracking.wandb", False),
        Flag("--no-tensorboard", "tracking.tensorboard", False),
        Flag("--max-attempts", "resume.max_attempts", 1),
    ]


def record(job: Job, folder: Path, command: Sequence[str]) -> Samples:
    """Run the job, and return what its ranks recorded in `folder`."""
    (folder / RECORDS).mkdir()
    run = LocalRun(job)
    run.prepare(command)
    verdicts: list[str] = []
    runs = ParallelRuns(1)
    again = 0.0

    def end_at_once() -> None:
        """There is nothing to save, and a rank that only reads its loader reaches no boundary
        between steps.
        """
        nonlocal again
        if runs.stopping and time.monotonic() >= again:
            again = time.monotonic() + INTERRUPT_INTERVAL
            runs.interrupt()

    runs.run(
        [0],
        begin=lambda *_: run.plan,
        end=lambda _, verdict: verdicts.append(verdict),
        stop=lambda _: None,
        poll=end_at_once,
    )
    if runs.interrupted:
        raise SystemExit(INTERRUPTED_EXIT)
    failure: list[str] = []
    if verdicts != [DONE]:
        run_folder = run.plan.run_path.folder
        log = read_tail(run_folder.slurm_log, TAIL).decode(errors="replace").splitlines()
        failure = [
            line for line in describe_failure(run_folder) if "paceline logs" not in line
        ] or log[-5:]
    samples = read_samples(folder / RECORDS, failure)
    if samples is None:
        if failure:
            raise LaunchError(
                "The script failed before it read any data.", hint="\n  ".join(failure)
            )
        raise LaunchError(
            "The script used neither run.loader nor a DataLoader.",
            hint="Pass the arguments that you train with. Paceline does not see loaders in "
            "processes that the script "
            "starts itself.",
        )
    return samples
