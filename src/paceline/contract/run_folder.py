"""The run folder: every file of a run, and who writes it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunFolder:
    """`<scratch>/<project>/<experiment>/<run-id>`: plain files, one writer each, renamed into place."""

    path: Path

    @property
    def run_json(self) -> Path:
        """The resolved spec, the code's identity and the command line: for people and for `paceline ps`."""
        return self.path / "run.json"

    @property
    def launch_spec(self) -> Path:
        """What the agents carry out (`LaunchSpec`)."""
        return self.path / "launch.json"

    @property
    def script(self) -> Path:
        """Exactly what was submitted."""
        return self.path / "job.sbatch"

    @property
    def shell_library(self) -> Path:
        """What `job.sbatch` sources: stopping in time, requeueing, one job per run folder."""
        return self.path / "job.sh"

    @property
    def job(self) -> Path:
        """The scheduler's id of the run's newest job; absent where there was none."""
        return self.path / "job"

    @property
    def environment(self) -> Path:
        """The job's variables, 0600, sourced by the script: they stand nowhere else."""
        return self.path / "environment.sh"

    @property
    def code(self) -> Path:
        """A link to the snapshot of the project's code."""
        return self.path / "code"

    @property
    def run_half(self) -> Path:
        """The run half of this package, as one zip: a queued job keeps the version it was submitted with."""
        return self.path / "paceline.zip"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """One file per writer."""
        return self.path / "events"

    @property
    def system(self) -> Path:
        """What the nodes did meanwhile: one file per node."""
        return self.path / "system"

    def node_metrics(self, node: int) -> Path:
        return self.system / f"node-{node}.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def trackers(self) -> Path:
        """What W&B and TensorBoard keep: `trackers/wandb`, `trackers/tensorboard`."""
        return self.path / "trackers"

    @property
    def collected(self) -> Path:
        """What `[data] collect` brought back from the nodes."""
        return self.path / "collected"

    @property
    def cancelled(self) -> Path:
        """Present once somebody has cancelled the run: nothing resurrects it."""
        return self.path / "cancelled"

    @property
    def slurm_log(self) -> Path:
        """What the batch shell itself prints."""
        return self.path / "slurm.log"

    def attempt(self, number: int) -> AttemptFolder:
        return AttemptFolder(self.path / f"attempt-{number}", number)

    def attempts(self) -> list[AttemptFolder]:
        """All attempts so far, oldest first."""
        found = []
        for entry in self.path.glob("attempt-*"):
            match = re.fullmatch(r"attempt-(\d+)", entry.name)
            if match:
                found.append(AttemptFolder(entry, int(match[1])))
        return sorted(found, key=lambda attempt: attempt.number)

    def job_start(self, name: str) -> JobStartFolder:
        return JobStartFolder(self.path / "job-starts" / name)

    def job_starts(self) -> list[JobStartFolder]:
        """All job starts so far."""
        return [JobStartFolder(path) for path in sorted(self.path.glob("job-starts/*"))]


@dataclass(frozen=True)
class AttemptFolder:
    """One try at running the ranks, from their start to a verdict. A relaunch is a new attempt."""

    path: Path
    number: int

    @property
    def verdict(self) -> Path:
        """`done`, `stopped` or `failed`, renamed into place by the head agent. None means failed."""
        return self.path / "verdict"

    @property
    def failure(self) -> Path:
        """The first failure, as JSON (`Failure` of the node room)."""
        return self.path / "failure.json"

    def log(self, rank: int) -> Path:
        return self.path / f"rank-{rank}.log"

    def node_log(self, node: int) -> Path:
        """Past 128 ranks there is one log per node, lines prefixed by rank."""
        return self.path / f"node-{node}.log"

    def error(self, rank: int) -> Path:
        """A rank's uncaught exception, as JSON: type, message, traceback, step."""
        return self.path / f"error-{rank}.json"

    def stacks(self, rank: int) -> Path:
        """Python stacks of a rank that hung."""
        return self.path / f"stacks-{rank}.txt"


@dataclass(frozen=True)
class JobStartFolder:
    """The files through which the batch shell and the head agent of one job start talk to each other."""

    path: Path

    @property
    def stop(self) -> Path:
        """Made by the batch shell's trap; the head agent polls it."""
        return self.path / "stop"

    @property
    def verdict(self) -> Path:
        """The last attempt's verdict: what the batch script goes by."""
        return self.path / "verdict"

    @property
    def requeue(self) -> Path:
        """Present if the run may go back into the queue. Holds the nodes to exclude then, separated by commas.

        The head agent writes it before the verdict, so the batch shell reads both or neither. The list may be empty;
        it comes on top of the nodes that the user excluded. The shell adds only what the agent cannot know: after a
        TERM to the shell itself, or once the run is cancelled, it does not requeue.
        """
        return self.path / "requeue"

    @property
    def excluded_nodes(self) -> Path:
        """Nodes that agents found unfit during this job start, one name per line."""
        return self.path / "excluded-nodes"

    @property
    def head(self) -> Path:
        """`host:port` and nothing else, where agents meet, when the head chose it itself."""
        return self.path / "head"


def write_atomically(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Whole or absent: written beside its place, then renamed into it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
