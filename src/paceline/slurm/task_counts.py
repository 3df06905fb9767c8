"""How many nodes, ranks, GPUs, tasks and cores a job on Slurm has.

Paceline makes the numbers consistent: most styles start one task per node (an agent, which starts
the ranks), `srun` and `mpirun` over ranks start one task per rank. Conflicting values are rejected;
the error names both sources.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import SpecError
from paceline.spec import Job

MAX_CPUS_PER_TASK = 65_533  # Slurm stores this in 16 bits
TASK_PER_RANK = ("srun", "mpirun")  # mpirun over torchrun excepted


@dataclass(frozen=True)
class TaskCounts:
    """How many nodes, ranks, GPUs, tasks and cores a job has."""

    nodes: int
    nproc: int  # ranks per node
    gpus: int  # per node
    tasks_per_node: int
    cpus_per_task: int

    @property
    def tasks(self) -> int:
        return self.nodes * self.tasks_per_node

    @property
    def cpus_per_rank(self) -> int:
        return max(1, self.cpus_per_task * self.tasks_per_node // self.nproc)


def starts_each_rank(job: Job) -> bool:
    """Return whether the scheduler (or mpirun) starts one agent per rank."""
    style = job.launch.style
    return style in TASK_PER_RANK and not (
        style == "mpirun" and job.launch.mpirun_over == "torchrun"
    )


def count_tasks(job: Job, *, fair_cpus: int = 1) -> TaskCounts:
    """Return the job's numbers. `fair_cpus` is the default number of cores per GPU (per rank
    without GPUs).
    """
    resources = job.resources
    gpus = 0 if resources.gpus_per_node is None else resources.gpus_per_node
    nproc = job.launch.nproc or max(gpus, 1)
    _check_gpus(job, gpus=gpus, nproc=nproc)
    tasks = nproc if starts_each_rank(job) else 1
    cores = (resources.cpus_per_gpu or fair_cpus) * (gpus or nproc)
    if cores // tasks > MAX_CPUS_PER_TASK:
        raise SpecError(
            f"{job.source('job.cpus_per_gpu')} is {resources.cpus_per_gpu}, which requests "
            f"{cores:,} cores on each"
            " node.",
            hint="Request at most as many as a node has.",
        )
    return TaskCounts(resources.nodes, nproc, gpus, tasks, max(1, cores // tasks))


def _check_gpus(job: Job, *, gpus: int, nproc: int) -> None:
    source = job.source
    if job.resources.gpu_type is not None and not gpus:
        raise SpecError(
            f"{source('job.gpu_type')} asks for {job.resources.gpu_type} GPUs, but "
            f"{source('job.gpus_per_node')} is 0.",
            hint="Set the number of GPUs on each node, for example --gpus 4.",
        )
    if gpus and nproc > gpus and not job.runtime.cpu:
        raise SpecError(
            f"{source('launch.nproc')} asks for {nproc} ranks per node, but "
            f"{source('job.gpus_per_node')} is {gpus}: "
            "two ranks would share a GPU.",
            hint=f"Ask for --gpus {nproc}, or leave --nproc out: one rank runs per GPU.",
        )
    if job.launch.gpu_binding == "one":
        if job.launch.style != "srun":
            raise SpecError(
                f'{source("launch.gpu_binding")} is "one", but {source("launch.style")} is '
                f'"{job.launch.style}": '
                "only tasks that Slurm starts can be bound to one GPU each.",
                hint='Use --style srun, or gpu_binding = "all": each rank then picks the GPU of '
                "its local rank.",
            )
        if gpus != nproc:
            raise SpecError(
                f'{source("launch.gpu_binding")} is "one", but there are {nproc} ranks and {gpus} '
                "GPUs per node.",
                hint="Ask for as many GPUs as ranks per node.",
            )
