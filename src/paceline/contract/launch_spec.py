"""`launch.json`: what the agents of a run are to do."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class LaunchSpec:
    """What the agents of a run are to do. Written once by the launch half, read by every agent and rank."""

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
    max_restarts: int = 0  # relaunches inside this job start
    hang_timeout: float = 0.0  # seconds without a beat before ranks count as hung; 0 means never
    fixed_nodes: bool = False  # the user chose the nodes, so none can be excluded
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
    def from_json(cls, text: str) -> LaunchSpec:
        known = {each.name for each in fields(cls)}
        return cls(**{key: value for key, value in json.loads(text).items() if key in known})
