"""What was asked against what the partitions have, and Slurm's own word on it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from paceline.cluster.checks.finding import GOOD, PROBLEM, Finding
from paceline.cluster.slurm.commands import error_text, test_only
from paceline.cluster.slurm.partitions import Partition, select_partitions
from paceline.errors import ClusterError, PacelineError
from paceline.plan.slurm.plan import SlurmPlan
from paceline.spec import Job
from paceline.spec.quantities import show_seconds, slurm_size
from paceline.spec.validation_errors import nearest


def check_limits(job: Job, plan: SlurmPlan, partitions: Sequence[Partition]) -> list[Finding]:
    """What was asked against what the partitions have. Several partitions: one that fits is enough."""
    if not partitions:
        return []
    names = job.resources.partition or plan.submitter.get("SBATCH_PARTITION")
    known = [each.name for each in partitions]
    for name in names.split(",") if names else ():
        if name not in known:
            return [_no_partition(job, name, known)]
    candidates = select_partitions(partitions, names)
    if not candidates:
        hint = f"choose one by --partition: {', '.join(known)}"
        return [Finding("partition", PROBLEM, "the cluster has no default partition", hint)]
    problems = [_misfit(job, plan, partition) for partition in candidates]
    if None in problems:
        fits = candidates[problems.index(None)]
        return [Finding("limits", GOOD, f"partition {fits.name} has {fits.nodes} nodes")]
    return [problem for problem in problems if problem is not None]


def _no_partition(job: Job, name: str, known: Sequence[str]) -> Finding:
    close = nearest(name, list(known))
    hint = f"did you mean {close!r}? " if close else ""
    said = job.source("job.partition") if job.resources.partition else "SBATCH_PARTITION"
    return Finding(
        "partition",
        PROBLEM,
        f"{said}: there is no partition {name!r}",
        f"{hint}the partitions are: {', '.join(known)}",
    )


def _misfit(job: Job, plan: SlurmPlan, partition: Partition) -> Finding | None:
    resources, layout, name = job.resources, plan.layout, partition.name
    if not partition.is_up:
        return Finding("partition", PROBLEM, f"partition {name} is not up", "choose another by --partition")
    if resources.time and partition.max_time and resources.time > partition.max_time:
        return Finding(
            "time", PROBLEM,
            f"{job.source('job.time')} is {show_seconds(resources.time)}, and partition {name} allows"
            f" {show_seconds(partition.max_time)}",
            "ask for less: a run that reaches its limit saves and goes back into the queue by itself",
        )  # fmt: skip
    most = min(partition.nodes, partition.max_nodes or partition.nodes)
    if layout.nodes > most:
        return Finding(
            "nodes",
            PROBLEM,
            f"{job.source('job.nodes')} is {layout.nodes}, and partition {name} gives {most}",
        )
    return _lacking(job, plan, partition)


def _lacking(job: Job, plan: SlurmPlan, partition: Partition) -> Finding | None:
    """Name the first thing of which too few nodes have enough."""
    layout, kind, name = plan.layout, job.resources.gpu_type, partition.name
    types = {each or "gpu": count for each, count in partition.gpu_types.items()}
    listed = ", ".join(f"{each} (up to {count} a node)" for each, count in types.items()) or "no GPUs"
    if kind and kind not in types:
        close = nearest(kind, list(types))
        said = job.source("job.gpu_type")
        return Finding(
            "gpu type", PROBLEM, f"{said}: partition {name} has no {kind!r} GPUs",
            (f"did you mean {close!r}? " if close else "") + f"it has: {listed}",
        )  # fmt: skip
    if partition.count_nodes(gpus=layout.gpus, gpu_type=kind) < layout.nodes:
        said = job.source("job.gpus_per_node")
        return Finding(
            "gpus", PROBLEM, f"{said} is {layout.gpus}, and too few nodes of partition {name} have so many",
            f"it has: {listed}",
        )  # fmt: skip
    cores = layout.cpus_per_task * layout.tasks_per_node
    if partition.count_nodes(gpus=layout.gpus, gpu_type=kind, cpus=cores) < layout.nodes:
        most = max((each.cpus for each in partition.kinds), default=0)
        said = job.source("job.cpus_per_gpu")
        return Finding(
            "cores", PROBLEM, f"{cores} cores per node ({said}), and too few nodes of partition {name} have so many",
            f"its nodes have up to {most}",
        )  # fmt: skip
    memory = _mebibytes(plan.value("mem"))
    if partition.count_nodes(gpus=layout.gpus, gpu_type=kind, cpus=cores, memory=memory) < layout.nodes:
        most = max((each.memory for each in partition.kinds), default=0)
        said = job.source("job.mem_per_node" if job.resources.mem_per_node else "job.mem_per_gpu")
        return Finding(
            "memory", PROBLEM, f"{slurm_size(memory)} per node ({said}), and too few nodes of partition {name} have it",
            f"its nodes have up to {slurm_size(most)}",
        )  # fmt: skip
    return None


def _mebibytes(size: str | None) -> int:
    if size is None:
        return 0
    return int(size[:-1]) * (1024 if size.endswith("G") else 1)


def check_with_slurm(job: Job, plan: SlurmPlan, partitions: Sequence[Partition]) -> Finding:
    """`sbatch --test-only`: would it be taken, and when would it start?"""
    done = test_only(plan)
    if done.returncode:
        error = explain_refusal(job, plan, partitions, error_text(done))
        return Finding("slurm", PROBLEM, error.message, error.hint)
    match = re.search(r"to start at (\S+)", done.stderr)
    return Finding(
        "slurm", GOOD, f"would start at {match[1].replace('T', ' ')}" if match else "takes the job"
    )


Explanation = Callable[[Job, Sequence[Partition]], str]


def _ask_sacctmgr(job: Job, partitions: Sequence[Partition]) -> str:
    return "your accounts: sacctmgr show associations user=$USER format=account,partition,qos"


def _features(job: Job, partitions: Sequence[Partition]) -> str:
    known = sorted({word for each in partitions for kind in each.kinds for word in kind.features})
    return f"features that nodes have: {', '.join(known) or 'none'}"


def _partition_names(job: Job, partitions: Sequence[Partition]) -> str:
    return f"the partitions are: {', '.join(each.name for each in partitions)}"


def _gpus(job: Job, partitions: Sequence[Partition]) -> str:
    listed = {
        f"{name or 'gpu'} x {count} in {each.name}"
        for each in partitions
        for name, count in each.gpu_types.items()
    }
    return f"GPUs that nodes have: {', '.join(sorted(listed)) or 'none'}"


# What sbatch says -> which key decided it, and what to tell.
_REFUSALS: tuple[tuple[str, str, Explanation], ...] = (
    ("partition", "job.partition", _partition_names),
    ("account", "job.account", _ask_sacctmgr),
    ("qos", "job.qos", _ask_sacctmgr),
    ("feature", "job.constraint", _features),
    ("generic resource|gres", "job.gpus_per_node", _gpus),
    ("reservation", "job.reservation", lambda job, partitions: "reservations: scontrol show reservation"),
    ("node name", "job.nodelist", lambda job, partitions: "nodes: sinfo -N"),
    ("time limit", "job.time", lambda job, partitions: "limits: sinfo -o '%P %l'"),
    ("[Mm]emory", "job.mem_per_node", lambda job, partitions: "memory of nodes, in MB: sinfo -e -o '%P %D %m'"),
    ("node configuration", "job.gpus_per_node", _gpus),
    ("unrecognized option|invalid option|ambiguous", "job.extra", lambda job, partitions: "options: sbatch --help"),
    ("dependency", "job.dependency", lambda job, partitions: "such as afterok:1234"),
)  # fmt: skip


def explain_refusal(job: Job, plan: SlurmPlan, partitions: Sequence[Partition], words: str) -> PacelineError:
    """Slurm's words, with who asked for what it refused, and what there is."""
    for pattern, key, explanation in _REFUSALS:
        if re.search(pattern, words, re.IGNORECASE):
            who = f" ({job.source(key)})" if job.is_set(key) else ""
            return ClusterError(f"Slurm refuses the job: {words}{who}", hint=explanation(job, partitions))
    return ClusterError(f"Slurm refuses the job: {words}", hint="see the script: add --dry-run")
