"""How many nodes, ranks, GPUs and threads a run on this machine has."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import SpecError
from paceline.spec import Job

DEFAULT_RANKS = 2  # without GPUs: the fewest that show what distributed code does


@dataclass(frozen=True)
class Machine:
    """The cores and GPUs of this machine."""

    cores: int
    gpus: int
    system: str = "Linux"  # platform.system()
    # the GPUs as CUDA_VISIBLE_DEVICES names them; empty means 0, 1, ...
    devices: tuple[str, ...] = ()

    def device_names(self) -> tuple[str, ...]:
        return self.devices or tuple(str(number) for number in range(self.gpus))


@dataclass(frozen=True)
class RankCounts:
    """The numbers of nodes and ranks, and what each rank gets."""

    nodes: int
    nproc: int  # ranks per node
    gpus: int  # GPUs per node
    threads: int  # per rank

    @property
    def world_size(self) -> int:
        return self.nodes * self.nproc

    def __str__(self) -> str:
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        where = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{ranks}{where}, {self.threads} thread{'s' if self.threads > 1 else ''} each"


def threads_per_rank(cores: int, ranks: int) -> int:
    """Return an even share of the cores, at least one."""
    return max(1, cores // ranks)


def local_rank_counts(job: Job, machine: Machine) -> RankCounts:
    """Return the numbers of a run on this machine: several nodes here share its cores and its
    GPUs.
    """
    nodes = job.resources.nodes if job.is_typed("job.nodes") else 1
    visible = 0 if job.runtime.cpu else machine.gpus
    nproc = job.launch.nproc
    if nproc is None:
        nproc = max(1, visible // nodes) if visible else DEFAULT_RANKS
    if visible and nproc * nodes > visible:
        source = job.source("launch.nproc") if job.launch.nproc else job.source("job.nodes")
        raise SpecError(
            f"{source} asks for {nproc * nodes} ranks, but this machine has {visible} "
            f"GPU{'s' if visible > 1 else ''}.",
            hint=f"Ask for at most {visible} in total, or add --cpu.",
        )
    gpus = nproc if visible else 0
    return RankCounts(nodes, nproc, gpus, threads_per_rank(machine.cores, nproc * nodes))
