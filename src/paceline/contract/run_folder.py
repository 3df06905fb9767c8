"""The run folder: every file of a run, and what it holds; verdicts and exit codes."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.contract.files import replace_file
from paceline.contract.foreign_records import read_bounded

# in the folder of a submission while nobody knows whether Slurm has its job
SUBMITTING = "submitting"
ALONE = "of"  # in a line of metrics.jsonl that has rank 0's numbers, not the mean of all ranks
SAVES_FIRST = "save"  # in the mark of a cancelled run whose ranks were asked to save a checkpoint
# in a scratch folder once an agent of a job has written there: the nodes see it
USED_BY_JOBS = ".used-by-jobs"
# in an attempt's folder, with a rank: the collectives that NCCL last recorded
FLIGHT_RECORDER = "nccl-trace-"
TRIALS = "trials"  # in a sweep's folder
MARK_SIZE = 32  # bytes of a line in `rank-0.times`
_MARK = re.compile(rb"(\d{16}) (\d{10}\.\d{3})\n")
_ATTEMPT = re.compile(r"attempt-(\d+)")


class Entry:
    """An attribute of a folder class: the path of one of its files or sub-folders."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: Any, owner: type | None = None) -> Path:
        return Path(folder.path, self._name)


@dataclass(frozen=True)
class RunFolder:
    """`<scratch>/<project>/<experiment>/<run-id>`: plain files with one writer each, appended or
    renamed into place.
    """

    path: Path

    run_json = Entry("run.json")  # the resolved settings, the code's identity and the command line
    launch_spec = Entry("launch.json")  # what the agents and ranks of the run do
    script = Entry("job.sbatch")  # exactly what was submitted
    # what `job.sbatch` sources: stop, requeue, one job per run folder
    shell_library = Entry("stop_and_requeue.sh")
    # the environment section of `job.sbatch`, for `paceline shell`
    shell_setup = Entry("shell-setup.sh")
    job = Entry("job")  # the id of the run's newest Slurm job; absent for local runs
    # how often in a row a stop came before anything was saved
    stops_without_progress = Entry("stops-without-progress")
    claims = Entry("claims")  # links 1, 2, ... to job starts; the last one has the run folder now
    environment = Entry("environment.sh")  # the job's variables, 0600, sourced by the script
    code = Entry("code")  # a link to the snapshot of the project's code
    work = Entry("work")  # where the ranks of a submitted run work; the head agent fills it
    # the part of Paceline that runs in jobs: a queued job keeps its version
    run_half = Entry("paceline.zip")
    metrics = Entry("metrics.jsonl")  # what rank 0 logged (`run.log`), one line per step
    config = Entry("config.json")  # the script's own settings, written by rank 0 (`run.config`)
    # queued, started, saved, failed and others: one file of JSON lines per writer
    events = Entry("events")
    # what the fitness check of the newest job start measured, and what it found
    fitness = Entry("fitness.json")
    system = Entry("system")  # CPU, memory and GPU use, one file per node

    # `step-00001000` and so on; complete once it has `complete.json`
    checkpoints = Entry("checkpoints")
    trackers = Entry("trackers")  # files of W&B and TensorBoard
    collected = Entry("collected")  # files that `[data] collect` copied back from the nodes
    cancelled = Entry("cancelled")  # present once the run is cancelled: it never starts again
    # of a copy that `paceline fetch` made: from which cluster, when, and what was changed here
    fetched = Entry("fetched.json")
    # of such a copy that is not complete yet: what has not arrived whole
    arrivals = Entry(".fetch")
    slurm_log = Entry("slurm.log")  # output of the batch script itself

    @property
    def key(self) -> str:
        """What commands call the run: its id, or SWEEP-3 for a trial, which lies in its sweep's
        folder by number.
        """
        parent, name = self.path.parent, self.path.name
        return f"{parent.parent.name}-{name}" if parent.name == TRIALS and name.isdigit() else name

    @property
    def rank_events(self) -> Path:
        """The events of rank 0, which has the runtime: there are none before its first step
        boundary.
        """
        return self.events / "rank-0.jsonl"

    def node_metrics(self, node: int) -> Path:
        return self.system / f"node-{node}.jsonl"

    def attempt(self, number: int) -> AttemptFolder:
        return AttemptFolder(self.path / f"attempt-{number}", number)

    def attempts(self) -> list[AttemptFolder]:
        """Return all attempts so far, oldest first."""
        try:
            names = os.listdir(self.path)
        except OSError:
            return []
        numbers = sorted(int(match[1]) for name in names if (match := _ATTEMPT.fullmatch(name)))
        return [self.attempt(number) for number in numbers]

    def job_start(self, name: str) -> JobStartFolder:
        return JobStartFolder(self.path / "job-starts" / name)

    def job_starts(self) -> list[JobStartFolder]:
        """Return all job starts so far."""
        return [JobStartFolder(path) for path in sorted(self.path.glob("job-starts/*"))]


@dataclass(frozen=True)
class AttemptFolder:
    """One try at running the ranks, from their start to a verdict. A restart is a new attempt."""

    path: Path
    number: int

    # its job start, and the step of the newest checkpoint at its start; -1 if there was none
    start = Entry("start")
    # `done`, `stopped` or `failed`, written by the head agent; absent means failed
    verdict = Entry("verdict")
    summary = Entry("summary.json")  # what the retry policy must know about a failed attempt
    # the first failure: rank, host, exit code or signal, and traceback
    failure = Entry("failure.json")

    def log(self, rank: int) -> Path:
        """A rank's output. Next to it, `rank-N.times` has the times of its lines."""
        return self.path / f"rank-{rank}.log"

    def node_log(self, node: int) -> Path:
        """Runs with more than 128 ranks have one log per node; each line begins with its rank."""
        return self.path / f"node-{node}.log"

    def last_output(self) -> float | None:
        """Return when a rank has last printed something; None if none has."""
        logs = [path.stat() for path in self.path.glob("[rn]*-*.log")]
        return max((log.st_mtime for log in logs if log.st_size), default=None)

    def error(self, rank: int) -> Path:
        """A rank's uncaught exception: type, message, traceback, step."""
        return self.path / f"error-{rank}.json"

    def stacks(self, rank: int) -> Path:
        """Python stacks of a rank that hung."""
        return self.path / f"stacks-{rank}.txt"


@dataclass(frozen=True)
class JobStartFolder:
    """The files through which the batch shell and the agents of one job start talk to each
    other.
    """

    path: Path

    stop = Entry("stop")  # made by the batch shell's trap; the head agent polls it
    # the last attempt's; written by the head agent, or by the batch shell if there is none
    verdict = Entry("verdict")
    unsaved = Entry("unsaved")  # present if the run's last state could not be saved; says which one
    process = Entry("process")  # of a local run: its host, its processes, and when each was started

    # Present if the run may be requeued. Holds the nodes to exclude then, separated by commas.
    # The head agent decides: it writes this file before the verdict, and the batch shell requeues
    # if it finds both, unless the shell itself got a TERM or the run is cancelled. The list may be
    # empty; it comes on top of the nodes that the user excluded. The batch shell writes both files
    # only if there is no agent that could: srun hung, or a trial never started
    # (`paceline_decide_without_agent` in stop_and_requeue.sh).
    requeue = Entry("requeue")
    # present once a head agent has begun: if it is killed, all agents start again
    agent = Entry("agent")
    # made by the batch shell: since when the job was queued, in seconds since 1970
    queued_at = Entry("queued-at")
    # why the run was not requeued, from the head agent or the batch shell
    requeue_failed = Entry("requeue-failed")
    notified = Entry("notified")  # what the head agent has told the user of this job start's end
    # nodes that agents found unfit during this job start, one name per line
    excluded_nodes = Entry("excluded-nodes")
    # made by a head agent that ends without another agent: srun may wait for its node
    node_lost = Entry("node-lost")
    # written by the batch shell: the way into the container, for every node
    inside = Entry("inside.sh")
    head = Entry("head")  # `host:port` at which the head agent listens for the others

    def join_error(self, agent: int) -> Path:
        """Why an agent could not join the others. The head agent reads it."""
        return self.path / f"join-error-{agent}"

    def join_errors(self) -> list[Path]:
        return sorted(self.path.glob("join-error-*"))


# -- when the output of a log came: `rank-0.times` beside `rank-0.log`
#
# Each line is a mark, `OFFSET TIME`: what follows in the log from this byte on came at this time or
# later, until the next mark. All lines have the same length, so that binary search finds a time or
# an offset. A mark is written before the output that it belongs to. Both numbers only grow.


def times_path(log: Path) -> Path:
    """Return the path of the file with the times of a log."""
    return log.with_suffix(".times")


def format_mark(offset: int, time: float) -> bytes:
    return f"{offset:016d} {time:014.3f}\n".encode()


def parse_mark(line: bytes) -> tuple[int, float] | None:
    """Return the offset and the time of a mark; None if it is not one."""
    match = _MARK.fullmatch(line)
    return (int(match[1]), float(match[2])) if match else None


def write_atomically(path: Path, text: str, *, mode: int = 0o644, sync: bool = False) -> None:
    """Write a text as `replace_file` does: readers see all of it or none."""
    with replace_file(path, mode=mode, sync=sync) as file:
        file.write(text.encode("utf-8"))


# EX_TEMPFAIL: a script without the runtime asks to be resumed; also of a run that stopped early
STOPPED_EXIT = 75
USAGE_EXIT = 2  # the command line or a configuration file is wrong
INTERRUPTED_EXIT = 130  # Ctrl-C
# Ctrl-C after a submission over SSH was answered: only watching the run has ended
UNWATCHED_EXIT = 97
UNSETTLED_EXIT = 98  # nobody knows whether an earlier submission has led to a job
RESTART_EXIT = 76  # of a head agent: an agent was killed, so start all of them again

DONE, STOPPED, FAILED = "done", "stopped", "failed"
VERDICTS = (DONE, STOPPED, FAILED)
# how people see a run that is done, but whose last state could not be saved
DONE_UNSAVED = "done, not saved"


def read_verdict(path: Path | str) -> str | None:
    """Return the verdict in a file; None if there is none, because the run still runs or ended
    without one.
    """
    try:
        word = read_bounded(path, 100).decode().strip()
    except (OSError, ValueError):
        return None
    return word if word in VERDICTS else None
