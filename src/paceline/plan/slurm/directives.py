"""What is asked of Slurm: the relation of nodes, tasks, GPUs and cores, and the `#SBATCH` lines that say it.

The relation is ours to get right, not the user's: most styles start one task per node (a agent, which starts
the ranks), `srun` and `mpirun` over ranks one task per rank. Values that contradict each other are refused with
the names of both who said them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from paceline.contract.run_folder import RunFolder
from paceline.errors import SpecError
from paceline.spec import Job
from paceline.spec.quantities import slurm_size, slurm_time

TASK_PER_RANK = ("srun", "mpirun")  # mpirun over torchrun excepted


@dataclass(frozen=True)
class Layout:
    """How many of everything, once all that was asked has been held against itself."""

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


class Directive(NamedTuple):
    """One option of sbatch: `--option=value`; one that the user wrote stands in `option` with its dashes."""

    option: str
    value: str | None = None

    def __str__(self) -> str:
        if self.option.startswith("-"):
            return self.option
        return f"--{self.option}" if self.value is None else f"--{self.option}={self.value}"


def starts_each_rank(job: Job) -> bool:
    """Whether the scheduler (or mpirun) starts one agent per rank."""
    style = job.launch.style
    return style in TASK_PER_RANK and not (style == "mpirun" and job.launch.mpirun_over == "torchrun")


def lay_out(job: Job, *, fair_cpus: int = 1) -> Layout:
    """The job's layout. `fair_cpus` are the cores per GPU (per rank without GPUs) where nobody asked for a number."""
    resources = job.resources
    gpus = 0 if resources.gpus_per_node is None else resources.gpus_per_node
    nproc = job.launch.nproc or max(gpus, 1)
    _check_gpus(job, gpus=gpus, nproc=nproc)
    tasks = nproc if starts_each_rank(job) else 1
    cores = (resources.cpus_per_gpu or fair_cpus) * (gpus or nproc)
    return Layout(resources.nodes, nproc, gpus, tasks, max(1, cores // tasks))


def _check_gpus(job: Job, *, gpus: int, nproc: int) -> None:
    said = job.source
    if job.resources.gpu_type is not None and not gpus:
        raise SpecError(
            f"{said('job.gpu_type')} asks for {job.resources.gpu_type} GPUs, but {said('job.gpus_per_node')} is 0",
            hint="say how many each node is to have: --gpus 4",
        )
    if gpus and nproc > gpus and not job.runtime.cpu:
        raise SpecError(
            f"{said('launch.nproc')} asks for {nproc} ranks per node, but {said('job.gpus_per_node')} is {gpus}: "
            "two ranks would share a GPU",
            hint=f"ask for --gpus {nproc}, or leave --nproc out: one rank runs per GPU",
        )
    if job.launch.gpu_binding == "one":
        if job.launch.style != "srun":
            raise SpecError(
                f'{said("launch.gpu_binding")} is "one", but {said("launch.style")} is "{job.launch.style}": '
                "only tasks that Slurm starts can be bound to one GPU each",
                hint='use --style srun, or gpu_binding = "all" (each rank then picks the GPU of its local rank)',
            )
        if gpus != nproc:
            raise SpecError(
                f'{said("launch.gpu_binding")} is "one", but there are {nproc} ranks and {gpus} GPUs per node',
                hint="ask for as many GPUs as ranks per node",
            )


def directives(job: Job, layout: Layout, folder: RunFolder) -> list[Directive]:
    """Every option that the job is submitted with, in the order in which the script shows them."""
    resources = job.resources
    found = [
        Directive("job-name", resources.name or _name_of(job)),
        Directive("nodes", str(layout.nodes)),
        Directive("ntasks-per-node", str(layout.tasks_per_node)),
        Directive("cpus-per-task", str(layout.cpus_per_task)),
        *_gpu_directives(job, layout),
        *_memory_directives(job, layout),
    ]
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
        Directive("signal", f"B:USR1@{job.grace}"),
        # Any other value makes the node load a login environment first, which takes a minute where that is slow.
        Directive("export", "ALL"),
    ]
    return found + _extra(job, found)


def _name_of(job: Job) -> str:
    return re.split(r"[/.]", job.program.name.removesuffix(".py"))[-1] or "paceline"


def _gpu_directives(job: Job, layout: Layout) -> list[Directive]:
    if not layout.gpus:
        return []
    kind = f"{job.resources.gpu_type}:" if job.resources.gpu_type else ""
    if job.launch.gpu_binding == "one":
        return [Directive("gpus-per-task", f"{kind}1")]
    # --gres is what every Slurm understands, also those without cons_tres; all GPUs of a node are seen by all.
    return [Directive("gres", f"gpu:{kind}{layout.gpus}")]


def _memory_directives(job: Job, layout: Layout) -> list[Directive]:
    resources = job.resources
    if resources.mem_per_node is not None:
        return [Directive("mem", slurm_size(resources.mem_per_node))]
    if resources.mem_per_gpu is not None:
        return [Directive("mem", slurm_size(resources.mem_per_gpu * (layout.gpus or layout.nproc)))]
    return []


# Options that belong to the layout or to the way a run is kept going: the flag that asks for each, or why not.
_OWNED = {
    "nodes": "--nodes", "ntasks": "--nproc", "ntasks-per-node": "--nproc", "cpus-per-task": "--cpus-per-gpu",
    "tasks-per-node": "--nproc", "ntasks-per-gpu": "--nproc", "cpus-per-gpu": "--cpus-per-gpu",
    "gpus": "--gpus", "gpus-per-node": "--gpus", "gpus-per-task": '--style srun and gpu_binding = "one"',
    "mem": "--mem-per-node", "mem-per-gpu": "--mem-per-gpu", "mem-per-cpu": "--mem-per-gpu", "time": "--time",
    "partition": "--partition", "account": "--account", "qos": "--qos", "constraint": "--constraint",
    "reservation": "--reservation", "nodelist": "--nodelist", "exclude": "--exclude", "comment": "--comment",
    "job-name": "--name", "exclusive": "--exclusive", "mail-user": "--mail", "dependency": "--after",
    "requeue": "requeue in [resume]", "no-requeue": "requeue in [resume]", "signal": "grace in [resume]",
    "export": "--env", "output": "slurm.log in the run folder", "error": "slurm.log in the run folder",
    "open-mode": "slurm.log in the run folder", "chdir": "the run folder", "wait": "--wait",
    "array": "`paceline sweep`", "wrap": "the script itself", "test-only": "--dry-run", "parsable": "nothing",
}  # fmt: skip
_SHORT = {
    "N": "nodes", "n": "ntasks", "c": "cpus-per-task", "G": "gpus", "t": "time", "p": "partition", "A": "account",
    "q": "qos", "C": "constraint", "w": "nodelist", "x": "exclude", "J": "job-name", "d": "dependency",
    "o": "output", "e": "error", "D": "chdir", "W": "wait", "a": "array",
}  # fmt: skip


def _extra(job: Job, ours: Iterable[Directive]) -> list[Directive]:
    """`--sbatch-arg`: passed on as it is, unless it says what a flag of ours says."""
    words: list[str] = []
    for word in job.resources.extra:
        if not word.startswith("-") and words:
            words[-1] += f"={word}" if words[-1].startswith("--") else word
        else:
            words.append(word)
    found = []
    for word in words:
        match = re.fullmatch(r"--([a-z][a-z0-9-]*)(?:=(.*))?|-([A-Za-z])(.*)", word, re.DOTALL)
        if match is None or "\n" in word:
            raise SpecError(
                f"{job.source('job.extra')}: found {word!r}, expected an option of sbatch",
                hint="such as --sbatch-arg=--switches=1",
            )
        option = match[1] or _SHORT.get(match[3], match[3])
        value = match[2] if match[1] else match[4]
        gpu_gres = option == "gres" and "gpu" in (value or "") and any(each.option == "gres" for each in ours)
        if option in _OWNED or gpu_gres:
            raise SpecError(
                f"{job.source('job.extra')} says {word}, which the layout of this job already decides",
                hint=f"ask for it by {_OWNED.get(option, '--gpus')}",
            )
        found.append(Directive(word))
    return found


def render(found: Iterable[Directive]) -> list[str]:
    return [f"#SBATCH {_quoted(str(each))}" for each in found]


def _quoted(argument: str) -> str:
    """As sbatch reads its comment lines: it knows double quotes and backslashes, and ends a line at `#`."""
    if re.fullmatch(r"[\w@%+=:,./\[\]*&|!-]+", argument, re.ASCII):
        return argument
    return '"' + argument.replace("\\", "\\\\").replace('"', '\\"') + '"'


def file_pattern(path: str) -> str:
    """A path that sbatch takes as it is: `%` begins a pattern there."""
    return path.replace("%", "%%")
