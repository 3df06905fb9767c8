"""How many nodes, ranks, GPUs and threads: the one place that decides it for runs on this machine."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import SpecError
from paceline.spec import Job

USUAL_RANKS = 2  # where there are no GPUs: the least that shows what distributed code does


@dataclass(frozen=True)
class Machine:
    """What is here."""

    cores: int
    gpus: int
    system: str = "Linux"  # platform.system()
    devices: tuple[str, ...] = ()  # the GPUs as CUDA_VISIBLE_DEVICES names them; empty means 0, 1, ...

    def device_names(self) -> tuple[str, ...]:
        return self.devices or tuple(str(number) for number in range(self.gpus))


@dataclass(frozen=True)
class Shape:
    nodes: int
    nproc: int  # ranks per node
    gpus: int  # GPUs per node
    threads: int  # of a rank

    @property
    def world_size(self) -> int:
        return self.nodes * self.nproc

    def __str__(self) -> str:
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        where = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{ranks}{where}, {self.threads} thread{'s' if self.threads > 1 else ''} each"


def threads_per_rank(cores: int, ranks: int) -> int:
    """Cores shared out evenly, one at the least."""
    return max(1, cores // ranks)


def local_shape(job: Job, machine: Machine) -> Shape:
    """The shape of a run on this machine: several nodes here share its cores and its GPUs."""
    nodes = job.resources.nodes if job.is_typed("job.nodes") else 1
    seen = 0 if job.runtime.cpu else machine.gpus
    nproc = job.launch.nproc
    if nproc is None:
        nproc = max(1, seen // nodes) if seen else USUAL_RANKS
    if seen and nproc * nodes > seen:
        who = job.source("launch.nproc") if job.launch.nproc else job.source("job.nodes")
        raise SpecError(
            f"{who} asks for {nproc * nodes} ranks, and this machine shows {seen} GPU{'s' if seen > 1 else ''}",
            hint=f"ask for at most {seen} in all, or add --cpu",
        )
    gpus = nproc if seen else 0
    return Shape(nodes, nproc, gpus, threads_per_rank(machine.cores, nproc * nodes))
