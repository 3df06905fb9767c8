"""`launch.json`: what the agents and ranks of a run do."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.contract.foreign_records import make, parse_object
from paceline.contract.run_folder import STOPPED_EXIT


@dataclass(frozen=True)
class LaunchSpec:
    """What the agents and ranks of a run do. The launch half writes it once; every agent and rank
    reads it.
    """

    run_id: str
    program: str  # path of the script, absolute, or a module's name
    args: list[str]  # the script's arguments, unchanged
    is_module: bool = False
    import_path: list[str] = field(default_factory=list)  # prepended to sys.path
    cwd: str = "."  # the working directory of the ranks
    python: str = "python3"  # the interpreter of the ranks
    style: str = "fork"  # fork | srun | torchrun | spawn | mpirun | lightning | accelerate
    nodes: int = 1
    nproc: int = 1  # ranks per node
    gpus: int = 0  # GPUs per node; 0 means CPU only
    one_gpu_per_rank: bool = False  # the scheduler shows each rank its own GPU only
    preload: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)  # --env and [environment] variables
    setup: list[str] = field(default_factory=list)  # lines of [environment] for when it resumes
    threads: int = 1  # OMP_NUM_THREADS of a rank
    tee: str = "0"  # which ranks print to the console: "0", "all" or "none"
    project: str = ""
    experiment: str = ""
    scratch: str = ""
    # the project's code as the ranks run it: the working directory's root, or the live folder
    source: str = ""
    # how to fill it (`WorkingDirectory`); empty for the live folder
    work: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)  # run.params
    runtime: dict[str, Any] = field(default_factory=dict)  # settings that paceline.session reads
    # seconds after which an agent that has not joined the others is missing; 0 means that it grows
    # with their number
    join_timeout: float = 0.0
    max_restarts: int = 0  # restarts within one job start
    # seconds without a heartbeat until ranks count as hung; 0 means never
    hang_timeout: float = 0.0
    # the run may go back into the queue, if there is one; otherwise a stop ends it
    requeue: bool = True
    # the script resumes by itself: end it on a stop request, and requeue the job
    requeue_always: bool = False
    requeues_per_day: int = 50  # after that, the run is no longer requeued
    # seconds without progress until ranks that outlive others are ended; 0 means never
    exit_timeout: float = 30.0
    # asks scripts without the runtime to save and stop; empty for the preset of their framework
    stop_signal: str = ""
    saved_exit_code: int = STOPPED_EXIT  # with which they say that they have saved, besides 75
    stop_timeout: float = 120.0  # seconds from SIGTERM until ranks that have not stopped are ended
    fixed_nodes: bool = False  # the user chose the nodes, so none can be excluded
    kill_after: float = 5.0  # seconds between SIGTERM and SIGKILL
    check: bool = True  # run the preflight inside the job
    fitness: bool = False  # measure the nodes before training, and go on without slow ones
    data: dict[str, Any] = field(default_factory=dict)  # what to stage and to collect
    system_metrics: float = 0.0  # seconds between samples of a node; 0 means never
    tracking: dict[str, Any] = field(default_factory=dict)  # settings of the trackers
    notify: dict[str, Any] = field(default_factory=dict)  # whom to tell about what (`Notifier`)
    # for trials of a sweep: which one, and how it is pruned
    trial: dict[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return self.nodes * self.nproc

    @property
    def saved_exit_codes(self) -> set[int]:
        """The exit codes that always mean: saved, resume me. 0 means it only after a stop
        request.
        """
        return {STOPPED_EXIT, self.saved_exit_code} - {0}

    def in_snapshot(self, path: str) -> str:
        """Return where the snapshot has a path of the working directory, which does not exist at
        first.
        """
        inside = self.work and f"{path}/".startswith(f"{self.source}/")
        return f"{self.work['code']}{path[len(self.source) :]}" if inside else path

    @property
    def run_number(self) -> int:
        """The run as a number, the same on all nodes, in all attempts and in all job starts.

        Scripts call `int()` on TORCHELASTIC_RUN_ID, and use it as a seed: 31 bits fit everywhere.
        """
        path = f"{self.scratch}/{self.project}/{self.experiment}/{self.run_id}"
        return zlib.crc32(path.encode("utf-8", "surrogateescape")) >> 1

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"  # escapes keep arguments outside UTF-8

    @classmethod
    def from_json(cls, text: str) -> LaunchSpec:
        return make(cls, parse_object(text))
