"""Run a script on this machine for two epochs, and record the samples of its ranks."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from paceline.contract import env
from paceline.contract.run_folder import DONE, INTERRUPTED_EXIT
from paceline.errors import LaunchError
from paceline.launch.agents import ParallelRuns
from paceline.launch.local_run import LocalRun
from paceline.spec.job import Job
from paceline.spec.option import Flag
from paceline.tools.inspect.samples import Samples, read_samples
from paceline.watch.failure import describe_failure

INTERRUPT_INTERVAL = 1.0  # seconds: two signals at once may arrive as one


def overrides(folder: Path) -> list[Flag]:
    """Return the settings of a run that nobody wants to keep: on the CPU, in a folder of its own,
    with no copy of the code and no trackers.
    """
    return [
        Flag("--cpu", "runtime.cpu", True),
        Flag("--scratch", "project.scratch", str(folder)),
        Flag("--no-snapshot", "project.snapshot", False),
        Flag("--no-wandb", "tracking.wandb", False),
        Flag("--no-tensorboard", "tracking.tensorboard", False),
        Flag("--max-attempts", "resume.max_attempts", 1),
    ]


def record(job: Job, folder: Path, limit: int) -> Samples:
    """Run the job, and return what its ranks recorded."""
    records = folder / "samples"
    run = LocalRun(job, variables={env.SAMPLES: f"{limit}:{records}"})
    run.prepare(["paceline", *sys.argv[1:]])
    verdicts: list[str] = []
    runs = ParallelRuns(1)

    def end_at_once(count: int) -> None:
        # There is nothing to save, and a rank that only reads its loader reaches no boundary.
        for _ in range(2):
            time.sleep(INTERRUPT_INTERVAL)
            runs.interrupt()

    runs.run(
        [0],
        begin=lambda *_: run.plan,
        end=lambda _, verdict: verdicts.append(verdict),
        stop=end_at_once,
    )
    if runs.stopping:
        raise SystemExit(INTERRUPTED_EXIT)
    failure: list[str] = []
    if verdicts != [DONE]:
        failure = describe_failure(run.plan.run_path.folder) or ["It failed before it began."]
    # the log is removed with the folder
    failure = [line for line in failure if "paceline logs" not in line]
    samples = read_samples(records, failure)
    if samples is not None:
        return samples
    if failure:
        hint = "\n  ".join(failure)
        raise LaunchError("The script failed before it read any data.", hint=hint)
    raise LaunchError(
        "The script used neither run.loader nor a DataLoader.",
        hint="Pass the arguments that you train with. Paceline does not see loaders in processes "
        "that the script starts itself.",
    )
