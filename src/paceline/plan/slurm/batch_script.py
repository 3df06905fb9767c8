"""`job.sbatch`: short, commented bash that you can read, keep and submit by hand.

It holds the directives, the environment and one line that launches the agents; `job.sh`, which it sources, does the
rest. Both need only bash and Slurm, since a host may have Python only in containers, and neither grows with the
number of nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from paceline.contract.run_folder import RunFolder
from paceline.plan.environment.activation import EnvironmentSection
from paceline.plan.environment.container import ContainerEntry
from paceline.plan.quote import quote
from paceline.plan.slurm.directives import Directive, TaskCounts, render

# The headings of a script's sections. `paceline shell` evaluates the lines between them.
ENVIRONMENT = "# -- environment --"
LAUNCH = "# -- launch --"


@dataclass(frozen=True)
class ScriptPlan:
    """Everything that the text of a batch script depends on."""

    title: str  # one line: what runs, on how much
    folder: RunFolder
    python: str
    counts: TaskCounts
    directives: Sequence[Directive]
    environment: EnvironmentSection
    container: ContainerEntry
    mpirun: bool = False
    forwarded: Sequence[str] = ()  # names of variables that mpirun takes to the nodes
    requeue: bool = True
    exclude: str = ""  # nodes that the user excluded
    step_options: Sequence[str] = ()  # further options of srun
    step_shell: Sequence[str] = ()  # and those that bash expands: not quoted

    @property
    def start_options(self) -> str:
        """What `paceline_start_job` and `paceline_start_task` of job.sh are given."""
        options = [] if self.requeue else ["--no-requeue"]
        if self.exclude and self.requeue:
            options.append(f"--exclude={self.exclude}")
        return "".join(f" {quote(option)}" for option in options)


@dataclass(frozen=True)
class Script:
    """A batch script, section by section."""

    header: Sequence[str]
    start: Sequence[str]
    environment: Sequence[str]
    launch: Sequence[str]

    def __str__(self) -> str:
        sections = (self.header, self.start, [ENVIRONMENT, *self.environment], [LAUNCH, *self.launch])
        return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def shell_library() -> str:
    """Return the text of `job.sh`, which every batch script sources from its run folder."""
    return resources.files(__package__).joinpath("job.sh").read_text(encoding="utf-8")


def job_script(plan: ScriptPlan) -> Script:
    """Return the script of a single run."""
    return Script(
        header_lines(plan, "You can read it, keep it, and submit it again: sbatch job.sbatch"),
        [
            f"paceline_run={quote(str(plan.folder.path))} # everything about this run is in this folder",
            f"paceline_python={quote(plan.python)}",
            *source_library("$paceline_run"),
            f"paceline_start_job{plan.start_options}",
        ],
        plan.environment.lines("$paceline_run"),
        [*launch_lines(plan, "$paceline_run"), "paceline_finish_job"],
    )


def header_lines(plan: ScriptPlan, *advice: str) -> list[str]:
    return [
        "#!/bin/bash",
        f"# {plan.title}",
        "# Written by Paceline, in plain bash for Slurm.",
        *(f"# {line}" for line in advice),
        "#",
        *render(plan.directives),
    ]


def source_library(folder: str) -> list[str]:
    return [
        "# job.sh stops the ranks in time, requeues the job, and keeps a second job out of the run folder.",
        f'source "{folder}/job.sh" || exit 1',
    ]


def launch_lines(plan: ScriptPlan, folder: str, rendezvous: str = "") -> list[str]:
    """Return what starts the agents. `folder` has the run half; `rendezvous` varies the port from trial to trial."""
    command = _mpirun(plan) if plan.mpirun else _srun(plan)
    entry = [" ".join(plan.container.prefix)] if plan.container.prefix else []
    agents = "One agent per rank." if plan.counts.tasks_per_node > 1 else "One agent per node starts the ranks."
    return [
        f"# {agents}",
        *([f"paceline_open_rendezvous{rendezvous}"] if plan.counts.tasks > 1 else []),
        *([f"paceline_forward_variables {' '.join(plan.forwarded)}"] if plan.mpirun else []),
        *_folded(
            ["paceline_launch " + command[0], *command[1:], *entry, f'"$paceline_python" "{folder}/paceline.zip"']
        ),
    ]


def _srun(plan: ScriptPlan) -> list[str]:
    """Repeat every number: newer steps no longer inherit some of them, nor the job's `--export`."""
    counts = plan.counts
    return [
        "srun --export=ALL --kill-on-bad-exit=1 --mpi=none --unbuffered",
        f"--nodes={counts.nodes} --ntasks={counts.tasks} --ntasks-per-node={counts.tasks_per_node} "
        f"--cpus-per-task={counts.cpus_per_task}",
        *(quote(option) for option in plan.step_options),
        *plan.step_shell,
        *plan.container.srun_options,
    ]


def _mpirun(plan: ScriptPlan) -> list[str]:
    counts = plan.counts
    return [
        f"mpirun -np {counts.tasks} --map-by ppr:{counts.tasks_per_node}:node --oversubscribe --bind-to none",
        '"${paceline_forward[@]}"',
    ]


def _folded(parts: Sequence[str]) -> list[str]:
    """Spread one command over several lines."""
    lines = [parts[0], *(f"    {part}" for part in parts[1:])]
    return [f"{line} \\" for line in lines[:-1]] + [lines[-1]]
