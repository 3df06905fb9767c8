"""What the launch half and the run half agree on, and all that they share.

The names of environment variables, the files of a run folder, the order that a launcher carries out, the
slots in which ranks beat, and the exit codes. Standard library only: this file runs on every Python that
a node may have.
"""

from __future__ import annotations

import json
import os
import re
import struct
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

# -- environment names ---------------------------------------------------------------------------------

RUN = "PACELINE_RUN"  # the run folder
ATTEMPT = "PACELINE_ATTEMPT"  # which attempt this is, from 1
LEG = "PACELINE_LEG"  # one start of a job: job id and restart count on Slurm, process id here
HEAD = "PACELINE_HEAD"  # host:port where the launchers of a run meet; absent when there is one launcher
TOKEN = "PACELINE_TOKEN"  # the secret that a launcher shows when it joins
LAUNCHER = "PACELINE_LAUNCHER"  # "index/count" where no scheduler numbers the launchers (several nodes here)
BEAT = "PACELINE_BEAT"  # the beat file of this node, made by its launcher
HEADSTART = "PACELINE_HEADSTART"  # the descriptor of a zygote that was started ahead of its launcher
DATA = "PACELINE_DATA"  # node-local data folder

# Where things are, for scripts that do not use the runtime.
SOURCE_DIR = "PACELINE_SOURCE_DIR"  # the project's code, as the ranks run it
PROJECT_NAME = "PACELINE_PROJECT_NAME"
SCRATCH_DIR = "PACELINE_SCRATCH_DIR"
EXP_NAME = "PACELINE_EXP_NAME"
CHECKPOINTS = "PACELINE_CHECKPOINTS"  # the run's folder for them
LOGS = "PACELINE_LOGS"  # the attempt's folder

# What torchrun gives a script, and so what every launch style gives it.
RANK = "RANK"
LOCAL_RANK = "LOCAL_RANK"
WORLD_SIZE = "WORLD_SIZE"
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
GROUP_RANK = "GROUP_RANK"
GROUP_WORLD_SIZE = "GROUP_WORLD_SIZE"
MASTER_ADDR = "MASTER_ADDR"
MASTER_PORT = "MASTER_PORT"
RUN_ID = "TORCHELASTIC_RUN_ID"

# -- exit codes ----------------------------------------------------------------------------------------

STOPPED_EXIT = 75  # EX_TEMPFAIL: a script that does not use the runtime says "stopped, resume me"
USAGE_EXIT = 2  # the command line or a configuration file is wrong
INTERRUPTED_EXIT = 130  # Ctrl-C

# -- verdicts ------------------------------------------------------------------------------------------

DONE, STOPPED, FAILED = "done", "stopped", "failed"
VERDICTS = (DONE, STOPPED, FAILED)


# -- the run folder ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunFolder:
    """`<scratch>/<project>/<experiment>/<run-id>`: plain files, one writer each, renamed into place."""

    path: Path

    @property
    def run_json(self) -> Path:
        """The resolved spec, the code's identity and the command line: for people and for `paceline ps`."""
        return self.path / "run.json"

    @property
    def order(self) -> Path:
        """What the launchers carry out (`Order`)."""
        return self.path / "launch.json"

    @property
    def script(self) -> Path:
        """Exactly what was submitted."""
        return self.path / "job.sbatch"

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
    def runhalf(self) -> Path:
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

    def leg(self, name: str) -> LegFolder:
        return LegFolder(self.path / "legs" / name)


@dataclass(frozen=True)
class AttemptFolder:
    """One try at running the ranks, from their start to a verdict. A relaunch is a new attempt."""

    path: Path
    number: int

    @property
    def verdict(self) -> Path:
        """`done`, `stopped` or `failed`, renamed into place by the head launcher. None means failed."""
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
class LegFolder:
    """One start of the job: what its batch shell and its head launcher say to each other."""

    path: Path

    @property
    def stop(self) -> Path:
        """Made by the batch shell's trap; the head launcher polls it."""
        return self.path / "stop"

    @property
    def verdict(self) -> Path:
        """The last attempt's verdict: what the batch script goes by."""
        return self.path / "verdict"

    @property
    def unfit(self) -> Path:
        """Nodes to leave out after a requeue, one name per line."""
        return self.path / "unfit"

    @property
    def head(self) -> Path:
        """`host:port` and nothing else, where launchers meet, when the head chose it itself."""
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


def read_verdict(path: Path) -> str | None:
    """The verdict in a file, or None when there is none (a run with no verdict has failed, or still runs)."""
    try:
        word = path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return word if word in VERDICTS else None


# -- checkpoints ---------------------------------------------------------------------------------------

CHECKPOINT_MARKER = "complete.json"  # a checkpoint folder without it is not a checkpoint


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def checkpoint_step(name: str) -> int | None:
    """The step in a checkpoint folder's name; None for a partial or removed one, and for anything else."""
    match = re.fullmatch(r"step-(\d{8,})", name)
    return int(match[1]) if match else None


# -- the order -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Order:
    """What the launchers of a run are to do. Written once by the launch half, read by every launcher and rank."""

    run_id: str
    program: str  # path of the script, absolute (inside the snapshot if there is one), or a module's name
    args: list[str]  # the script's own, untouched
    is_module: bool = False
    import_path: list[str] = field(default_factory=list)  # put ahead of sys.path (with -m: where the code is)
    cwd: str = "."  # where the command was typed
    python: str = "python3"  # the interpreter of the ranks
    style: str = "fork"  # fork | srun | torchrun | spawn | mpirun | lightning | accelerate
    nodes: int = 1
    nproc: int = 1  # ranks per node
    gpus: int = 0  # GPUs per node that were asked for; 0 means none were
    one_gpu_per_rank: bool = False  # each rank sees one GPU only, bound by the scheduler
    preload: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)  # --env and [environment] variables
    threads: int = 1  # OMP_NUM_THREADS of a rank
    tee: str = "0"  # whose lines reach the console: "0", "all" or "none"
    project: str = ""
    experiment: str = ""
    scratch: str = ""
    source: str = ""  # the project's folder as it was at submission (the snapshot, or the live one)
    params: dict[str, Any] = field(default_factory=dict)  # run.params
    runtime: dict[str, Any] = field(default_factory=dict)  # settings that paceline.session reads
    max_restarts: int = 0  # relaunches inside this leg
    hang_timeout: float = 0.0  # seconds without a beat before ranks count as hung; 0 means never
    kill_after: float = 5.0  # seconds from SIGTERM to SIGKILL when ranks are ended
    check: bool = True  # preflight inside the job
    data: dict[str, Any] = field(default_factory=dict)  # what to stage and to collect; empty: nothing
    system_metrics: float = 0.0  # seconds between looks at what a node does; 0 means none
    tracking: dict[str, Any] = field(default_factory=dict)  # where numbers go: what was said
    trial: dict[str, Any] = field(default_factory=dict)  # of a sweep: which one, and how it is pruned

    @property
    def world_size(self) -> int:
        return self.nodes * self.nproc

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Order:
        known = {each.name for each in fields(cls)}
        return cls(**{key: value for key, value in json.loads(text).items() if key in known})


# -- the beat file -------------------------------------------------------------------------------------

# One file per node, in node-local memory (/dev/shm or the temporary folder), mapped by launcher and ranks:
# a header that the launcher writes, then one slot per local rank that this rank alone writes.
# A beat costs no system call, and a rank that is stuck in C cannot pretend to be alive.

BEAT_HEADER = struct.Struct("=qqq")  # ending (1: a TERM now means "end"), attempt, stop asked (1)
BEAT_SLOT = struct.Struct("=qqqdd")  # state, step, pid, time of the beat (time.time()), seconds per step
BEAT_SIZE = 64

# States of a rank, in the order in which they happen.
ABSENT, READY, RUNNING, SAVED_AND_STOPPED, FINISHED = range(5)


def beat_offset(local_rank: int) -> int:
    """Where the slot of a local rank begins."""
    return BEAT_SIZE * (local_rank + 1)


def beat_file_size(ranks: int) -> int:
    return BEAT_SIZE * (ranks + 1)
