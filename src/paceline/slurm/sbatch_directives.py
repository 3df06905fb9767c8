"""What a job asks Slurm for: its nodes, tasks, GPUs and cores, and its `#SBATCH` lines.

Paceline makes the numbers consistent: most styles start one task per node (an agent, which starts
the ranks), `srun` and `mpirun` over ranks start one task per rank. Conflicting values are rejected;
the error names both sources.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from paceline.contract.redaction import redact_text
from paceline.contract.run_folder import RunFolder
from paceline.errors import SpecError
from paceline.spec.job import DEFAULT_GRACE, Job
from paceline.spec.option import RESOURCES
from paceline.spec.quantities import show_seconds, slurm_size, slurm_time
from paceline.spec.settings import TABLE

MIN_GRACE = 60  # Slurm acts on time limits every 30 s, and ranks need time to save


class Directive(NamedTuple):
    """One option of sbatch: `--option=value`. For one that the user wrote, `option` is all of it,
    with its dashes.
    """

    option: str
    value: str | None = None

    def __str__(self) -> str:
        if self.option.startswith("-"):
            return self.option
        return f"--{self.option}" if self.value is None else f"--{self.option}={self.value}"


def directives(job: Job, counts: TaskCounts, folder: RunFolder) -> list[Directive]:
    """Return the options that the job is submitted with, in the order in which the script shows
    them.
    """
    resources = job.resources
    name = re.split(r"[/.]", job.program.name.removesuffix(".py"))[-1]
    name = "".join(each if each.isprintable() else "_" for each in name) or "paceline"
    found = [
        Directive("job-name", resources.name or name),
        Directive("nodes", str(counts.nodes)),
        Directive("ntasks-per-node", str(counts.tasks_per_node)),
        Directive("cpus-per-task", str(counts.cpus_per_task)),
    ]
    if counts.gpus:
        kind = f"{resources.gpu_type}:" if resources.gpu_type else ""
        if job.launch.gpu_binding == "one":
            found.append(Directive("gpus-per-task", f"{kind}1"))
        else:  # Every Slurm understands --gres, also without cons_tres. Ranks see all GPUs.
            found.append(Directive("gres", f"gpu:{kind}{counts.gpus}"))
    if resources.mem_per_gpu is not None and resources.mem_per_node is not None:
        raise SpecError(
            f"{job.source('job.mem_per_gpu')} and {job.source('job.mem_per_node')} both set the "
            "memory.",
            hint="Use only one of them.",
        )
    if resources.mem_per_node is not None:
        found.append(Directive("mem", slurm_size(resources.mem_per_node)))
    elif resources.mem_per_gpu is not None:
        memory = resources.mem_per_gpu * (counts.gpus or counts.nproc)
        found.append(Directive("mem", slurm_size(memory)))
    if resources.time is not None:
        found.append(Directive("time", slurm_time(resources.time)))
    for option in (
        "partition",
        "account",
        "qos",
        "constraint",
        "reservation",
        "nodelist",
        "exclude",
        "comment",
    ):
        if (value := getattr(resources, option)) is not None:
            found.append(Directive(option, value))
    if resources.exclusive:
        found.append(Directive("exclusive"))
    if resources.mail is not None:
        found += [Directive("mail-user", resources.mail), Directive("mail-type", "END,FAIL")]
    log = file_pattern(str(folder.slurm_log))
    found += [
        Directive("chdir", str(folder.path)),
        Directive("output", log),
        Directive("open-mode", "append"),
        Directive("requeue" if job.resume.requeue else "no-requeue"),
        _signal_directive(job),
        # Any other value makes the node load a login environment first, which can take a minute.
        Directive("export", "ALL"),
    ]
    return found + _extra(job, found)


def _signal_directive(job: Job) -> Directive:
    grace, limit = job.resume.grace, job.resources.time
    if grace is None or limit is None or not job.resume.requeue:
        return Directive("signal", f"B:USR1@{job.grace}")
    if grace < MIN_GRACE or grace * 2 >= limit:
        raise SpecError(
            f"{job.source('resume.grace')} is {show_seconds(grace)} and {job.source('job.time')} is"
            f" {show_seconds(limit)}: the grace must be at least {MIN_GRACE} s and less than half"
            " of the time limit.",
            hint="Slurm acts on time limits every 30 s, and the ranks must finish a step and save:"
            f" use {show_seconds(DEFAULT_GRACE)} and a longer limit, or add --no-requeue.",
        )
    return Directive("signal", f"B:USR1@{grace}")


# Options that Paceline sets itself, and what sets each of them.
_OWNED = {
    "ntasks": "--nproc",
    "ntasks-per-node": "--nproc",
    "tasks-per-node": "--nproc",
    "ntasks-per-gpu": "--nproc",
    "cpus-per-task": "--cpus-per-gpu",
    "gpus": "--gpus",
    "gpus-per-task": "--style srun --gpu-binding one",
    "mem": "--mem-per-node",
    "mem-per-cpu": "--mem-per-gpu",
    "job-name": "--name",
    "mail-user": "--mail",
    "requeue": "--requeue",
    "no-requeue": "--no-requeue",
    "signal": "--grace",
    "export": "--env",
    "export-file": "--env",
    "wait": "--wait",
    "array": "`paceline sweep`",
    "test-only": "--dry-run",
    **dict.fromkeys(
        ("output", "error", "open-mode"), "The output is in slurm.log of the run folder."
    ),
    "chdir": "Jobs start in their run folder.",
    "wrap": "Give the script itself.",
    "parsable": "Leave it out.",
    # Keys of [job] that sbatch calls the same.
    **{
        option.key.removeprefix("job.").replace("_", "-"): option.name
        for option in TABLE[RESOURCES]
        if "submit" in option.commands and option.key != "job.extra"
    },
}


def _extra(job: Job, ours: Iterable[Directive]) -> list[Directive]:
    """Pass `--sbatch-arg` on as it is, unless it sets what a flag of ours sets."""
    args: list[str] = []
    for arg in job.resources.extra:
        if not arg.startswith("-") and args:
            args[-1] += f"={arg}" if args[-1].startswith("--") else arg
        else:
            args.append(arg)
    found = []
    for arg in args:
        match = re.fullmatch(r"--([a-z][a-z0-9-]*)(?:=(.*))?", arg, re.DOTALL)
        if match is None or "\n" in arg:
            raise SpecError(
                f"{job.source('job.extra')} has {arg!r}, which is not a long option of sbatch.",
                hint="Write an option such as --sbatch-arg=--switches=1.",
            )
        gpu_gres = (
            match[1] == "gres"
            and "gpu" in (match[2] or "")
            and any(each.option == "gres" for each in ours)
        )
        # sbatch takes any unique beginning of an option.
        owned = next((name for name in _OWNED if name.startswith(match[1])), "")
        if owned or gpu_gres:
            hint = _OWNED.get(owned, "--gpus")
            raise SpecError(
                f"{job.source('job.extra')} has {redact_text(arg)}, which Paceline sets itself.",
                hint=hint if hint.endswith(".") else f"Use {hint} instead.",
            )
        found.append(Directive(arg))
    return found


def render(directives: Iterable[Directive]) -> list[str]:
    return [f"#SBATCH {_quoted(str(each))}" for each in directives]


def _quoted(argument: str) -> str:
    """Quote an argument as sbatch reads its comment lines: with double quotes and backslashes; `#`
    ends a line.
    """
    if re.fullmatch(r"[\w@%+=:,./\[\]*&|!-]+", argument, re.ASCII):
        return argument
    return '"' + argument.replace("\\", "\\\\").replace('"', '\\"') + '"'


def require_plain_path(path: str, what: str) -> None:
    """Reject a folder in the scratch folder that neither sbatch nor PATH or PYTHONPATH could
    hold.
    """
    # sbatch drops backslashes from the path of the log.
    for bad, name in (
        (":", "a colon"),
        ("\n", "a line break"),
        (",", "a comma"),
        ("\\", "a backslash"),
    ):
        if bad in path:
            raise SpecError(
                f"The {what} {path!r} has {name} in its path, which Slurm or Python does not read "
                "literally.",
                hint="Choose another scratch folder with [project] scratch or PACELINE_SCRATCH.",
            )


def file_pattern(path: str) -> str:
    """Return a path that sbatch takes literally: `%` starts a pattern there."""
    return path.replace("%", "%%")


# -- tasks

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


def count_tasks(job: Job, *, fair_cpus: int = 1) -> TaskCounts:
    """Return the job's numbers. `fair_cpus` is the default number of cores per GPU (per rank
    without GPUs).
    """
    resources = job.resources
    gpus = 0 if resources.gpus_per_node is None else resources.gpus_per_node
    nproc = job.launch.nproc or max(gpus, 1)
    _check_gpus(job, gpus=gpus, nproc=nproc)
    style = job.launch.style
    over_torchrun = style == "mpirun" and job.launch.mpirun_over == "torchrun"
    tasks = nproc if style in TASK_PER_RANK and not over_torchrun else 1
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
