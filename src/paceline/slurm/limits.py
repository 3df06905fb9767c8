"""Check a job against the limits of its partitions, and explain why Slurm rejects one."""

from __future__ import annotations

import re
from collections.abc import Sequence

from paceline.errors import ClusterError, PacelineError
from paceline.slurm.commands import error_text
from paceline.slurm.partitions import Partition, select_partitions
from paceline.slurm.sbatch import BatchJob, test_only
from paceline.spec.findings import GOOD, PROBLEM, WARNING, Finding
from paceline.spec.job import Job
from paceline.spec.quantities import show_seconds, slurm_size
from paceline.spec.settings import nearest


def check_limits(job: Job, plan: BatchJob, partitions: Sequence[Partition]) -> list[Finding]:
    """Check the requested resources against the partitions; if there are several, one that fits is
    enough.
    """
    if not partitions:
        return []
    names = job.resources.partition or plan.submitter.get("SBATCH_PARTITION")
    known = [partition.name for partition in partitions]
    for name in names.split(",") if names else ():
        if name not in known:
            return [_unknown_partition(job, name, known)]
    candidates = select_partitions(partitions, names)
    if not candidates:
        hint = f"Choose one with --partition: {', '.join(known)}."
        return [Finding("partition", PROBLEM, "The cluster has no default partition.", hint)]
    problems = [_check_partition(job, plan, partition) for partition in candidates]
    if None in problems:
        fits = candidates[problems.index(None)]
        found = [
            Finding(
                "limits",
                GOOD,
                f"partition {fits.name} has {fits.nodes} node{'s' * (fits.nodes != 1)}",
            )
        ]
        return [*found, *_check_forgotten(job, plan, fits, partitions)]
    return [problem for problem in problems if problem is not None]


def _check_forgotten(
    job: Job, plan: BatchJob, partition: Partition, partitions: Sequence[Partition]
) -> list[Finding]:
    """Warn of a job that has no time limit, or no GPUs on a cluster that has some: few people want
    that.
    """
    found = []
    if (
        plan.value("time") is None
        and not plan.submitter.get("SBATCH_TIMELIMIT")
        and not _is_extra(job, "--time", "-t")
    ):
        text = f"The job has no time limit, so the default of partition {partition.name} applies"
        text += (
            f" (at most {show_seconds(partition.max_time)})."
            if partition.max_time
            else ", if it has one."
        )
        found.append(
            Finding(
                "time", WARNING, text, "Set one with --time: shorter jobs usually start earlier."
            )
        )
    with_gpus = [each.name for each in partitions if each.gpu_types]
    wants_none = (
        job.runtime.cpu
        or job.is_set("job.gpus_per_node")
        or _is_extra(job, "--gpu", "--gres", "-G")
    )
    chosen = bool(job.resources.partition or plan.submitter.get("SBATCH_PARTITION"))
    if (
        not plan.task_counts.gpus
        and not wants_none
        and (partition.gpu_types or (with_gpus and not chosen))
    ):
        where = partition.name if partition.gpu_types else with_gpus[0]
        text = f"The job asks for no GPUs, but the nodes of partition {where} have some."
        found.append(
            Finding(
                "gpus", WARNING, text, "Ask for them with --gpus N, or add --cpu if you want none."
            )
        )
    return found


def _is_extra(job: Job, *starts: str) -> bool:
    """Return whether the user's own arguments of sbatch have such an option."""
    return any(text.startswith(starts) for text in job.resources.extra)


def _unknown_partition(job: Job, name: str, known: Sequence[str]) -> Finding:
    source = job.source("job.partition") if job.resources.partition else "SBATCH_PARTITION"
    return Finding(
        "partition",
        PROBLEM,
        f"{source} names partition {name!r}, which does not exist.",
        f"{_suggest(name, known)}The partitions are: {', '.join(known)}.",
    )


def _suggest(name: str, known: Sequence[str]) -> str:
    close = nearest(name, list(known))
    return f"Did you mean {close!r}? " if close else ""


def _check_partition(job: Job, plan: BatchJob, partition: Partition) -> Finding | None:
    """Return the first reason why the job does not fit this partition."""
    resources, counts, name = job.resources, plan.task_counts, partition.name
    if not partition.is_up:
        return Finding(
            "partition", PROBLEM, f"Partition {name} is down.", "Choose another with --partition."
        )
    if resources.time and partition.max_time and resources.time > partition.max_time:
        return Finding(
            "time",
            PROBLEM,
            f"{job.source('job.time')} is {show_seconds(resources.time)}, but partition {name} "
            "allows at most"
            f" {show_seconds(partition.max_time)}.",
            "Ask for less: a run that reaches its time limit saves and requeues itself.",
        )
    max_nodes = min(partition.nodes, partition.max_nodes or partition.nodes)
    if counts.nodes > max_nodes:
        return Finding(
            "nodes",
            PROBLEM,
            f"{job.source('job.nodes')} is {counts.nodes}, but partition {name} allows at most "
            f"{max_nodes}.",
        )
    return _check_hardware(job, plan, partition)


def _check_hardware(job: Job, plan: BatchJob, partition: Partition) -> Finding | None:
    """Return why too few nodes of the partition have what the job asks for on each."""
    counts, gpu_type, name = plan.task_counts, job.resources.gpu_type, partition.name
    types = {each or "gpu": count for each, count in partition.gpu_types.items()}
    gpus = ", ".join(f"{each} (up to {count} per node)" for each, count in types.items())
    most_cores = max((kind.cpus for kind in partition.kinds), default=0)
    most_memory = slurm_size(max((kind.memory for kind in partition.kinds), default=0))
    listed = (
        f"Its nodes have {gpus or 'no GPUs'}, up to {most_cores} cores and up to {most_memory}."
    )
    if gpu_type and gpu_type not in types:
        return Finding(
            "gpu type",
            PROBLEM,
            f"{job.source('job.gpu_type')} asks for {gpu_type!r} GPUs, which partition {name} "
            "does not have.",
            f"{_suggest(gpu_type, list(types))}{listed}",
        )
    cores = counts.cpus_per_task * counts.tasks_per_node
    memory = _mebibytes(plan.value("mem"))
    fitting = partition.count_nodes(gpus=counts.gpus, gpu_type=gpu_type, cpus=cores, memory=memory)
    if fitting >= counts.nodes:
        return None
    wanted = [f"{cores} cores per node ({job.source('job.cpus_per_gpu')})"]
    if counts.gpus:
        wanted.insert(0, f"{job.source('job.gpus_per_node')} is {counts.gpus}")
    if memory:
        source = job.source("job.mem_per_node" if job.resources.mem_per_node else "job.mem_per_gpu")
        wanted.append(f"{slurm_size(memory)} per node ({source})")
    return Finding(
        "nodes",
        PROBLEM,
        f"Too few nodes of partition {name} have what the job asks for: {', '.join(wanted)}.",
        f"{listed} Ask for less, or choose another --partition.",
    )


def _mebibytes(size: str | None) -> int:
    if size is None:
        return 0
    return int(size[:-1]) * (1024 if size.endswith("G") else 1)


def check_with_slurm(job: Job, plan: BatchJob, partitions: Sequence[Partition]) -> Finding:
    """Ask `sbatch --test-only` whether Slurm would accept the job, and when it would start."""
    done = test_only(plan)
    if done.returncode:
        reason = error_text(done)
        if re.search(_NO_NODES, reason, re.IGNORECASE) and (
            gone := _unusable_nodes(job, plan, partitions)
        ):
            # Slurm refuses to plan such a job, but takes it into the queue, unless
            # EnforcePartLimits forbids that.
            text = (
                f"The job cannot start yet: too few nodes that fit it are up ({gone}). It "
                "waits until they are back."
            )
            return Finding(
                "slurm",
                WARNING,
                text,
                f"{_WHY_UNUSABLE} Or ask for fewer nodes, or another partition.",
            )
        error = explain_rejection(job, plan, partitions, reason)
        return Finding("slurm", PROBLEM, error.message, error.hint)
    match = re.search(r"to start at (\S+)", done.stderr)
    return Finding(
        "slurm",
        GOOD,
        f"would start at {match[1].replace('T', ' ')}" if match else "accepts the job",
    )


_NO_NODES = "node configuration|node not avail"
_WHY_UNUSABLE = "See why with `sinfo -a -R`."


def _unusable_nodes(job: Job, plan: BatchJob, partitions: Sequence[Partition]) -> str:
    """Return how many nodes of the job's partitions are down or drained; empty if all can be
    used.
    """
    names = job.resources.partition or plan.submitter.get("SBATCH_PARTITION")
    counts = {
        each.name: each.nodes - each.usable_nodes for each in select_partitions(partitions, names)
    }
    return ", ".join(
        f"{count} of partition {name} down or drained" for name, count in counts.items() if count
    )


_ASSOCIATIONS = (
    "List your accounts with `sacctmgr show associations user=$USER format=account,partition,qos`."
)
# Pattern in sbatch's message -> the key that caused the rejection, and a hint.
_REJECTIONS = (
    ("partition", "job.partition", "List the partitions with `sinfo -a -s`."),
    ("account", "job.account", _ASSOCIATIONS),
    ("qos", "job.qos", _ASSOCIATIONS),
    ("feature", "job.constraint", "List the nodes' features with `sinfo -a -o '%P %f'`."),
    ("generic resource|gres", "job.gpus_per_node", "List the GPUs with `sinfo -a -o '%P %G'`."),
    ("reservation", "job.reservation", "List reservations with `scontrol show reservation`."),
    ("node name", "job.nodelist", "List nodes with `sinfo -a -N`."),
    ("time limit", "job.time", "List the limits with `sinfo -a -o '%P %l'`."),
    (
        "[Mm]emory",
        "job.mem_per_node",
        "List the nodes' memory, in MB, with `sinfo -a -e -o '%P %D %m'`.",
    ),
    ("node configuration", "job.gpus_per_node", "List the GPUs with `sinfo -a -o '%P %G'`."),
    (
        "unrecognized option|invalid option|ambiguous",
        "job.extra",
        "List the options with `sbatch --help`.",
    ),
    ("dependency", "job.dependency", "Write it like afterok:1234."),
)


def explain_rejection(
    job: Job, plan: BatchJob, partitions: Sequence[Partition], reason: str
) -> PacelineError:
    """Return Slurm's message as an error that names the option at fault, and how to list what
    exists.
    """
    if re.search(_NO_NODES, reason, re.IGNORECASE) and (
        gone := _unusable_nodes(job, plan, partitions)
    ):
        return ClusterError(
            f"Slurm rejected the job: {reason}. Too few nodes that fit it are up: {gone}.",
            hint=f"Submit it again once they are back, or ask for less. {_WHY_UNUSABLE}",
        )
    for pattern, key, hint in _REJECTIONS:
        if re.search(pattern, reason, re.IGNORECASE):
            source = f" ({job.source(key)})" if job.is_set(key) else ""
            return ClusterError(f"Slurm rejected the job: {reason}{source}.", hint=hint)
    return ClusterError(
        f"Slurm rejected the job: {reason}.", hint="Inspect the script with --dry-run."
    )
