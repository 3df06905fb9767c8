"""`job.sbatch`: short, commented bash that you can read, keep and submit by hand.

It holds the directives, the environment and one line that launches the agents;
`stop_and_requeue.sh`, which it sources, does the rest. Both need only bash and Slurm, since a host
may have Python only in containers, and neither grows with the number of nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources

from paceline.contract.run_folder import RunFolder
from paceline.slurm.sbatch_directives import Directive, TaskCounts, render
from paceline.spec.shell_text import quote


@dataclass(frozen=True)
class ModuleSection:
    """The lines that load a job's modules, and the module that each of the last ones loads."""

    command: Sequence[str] = ()  # finds `module`
    before: Sequence[str] = ()  # `module purge` and `module use`
    names: Sequence[str] = ()

    def lines(self) -> list[str]:
        load = "module load {} || paceline_fail {}"
        lines = [
            load.format(quote(name), quote(f"Cannot load the module {name}."))
            for name in self.names
        ]
        return [*self.command, *self.before, *lines]

    def until(self, name: str) -> ModuleSection:
        """Return the section without this module and those after it."""
        return ModuleSection(self.command, self.before, self.names[: self.names.index(name)])


@dataclass(frozen=True)
class EnvironmentSection:
    """The lines that set up a job's environment, part by part, in the order in which they run."""

    modules: ModuleSection = field(default_factory=ModuleSection)
    activation: Sequence[str] = ()
    setup: Sequence[str] = ()  # the user's own lines
    container: Sequence[str] = ()  # defines `paceline_inside`

    def lines(self, folder: str) -> list[str]:
        """Return the section as a script has it. `folder` is where the run's files are, as bash
        names it.
        """
        return [
            "# The variables' values are in a file that only you can read.",
            "{ set +x; } 2>/dev/null",
            f'source "{folder}/environment.sh" || '
            f'paceline_fail "Cannot read {folder}/environment.sh."',
            *self.after_variables(),
            "# Each run carries the part of Paceline that runs inside jobs, so the job's Python "
            "needs only torch.",
            python_path(f'"{folder}/paceline.zip'),
        ]

    def after_variables(self) -> list[str]:
        setup = ["# `setup` in paceline.toml:", *self.setup] if self.setup else []
        return [*self.modules.lines(), *self.activation, *setup, *self.container]


def python_path(run_half: str) -> str:
    """Return the line that makes Python find the run half. `run_half` begins a word in double
    quotes.
    """
    return f'export PYTHONPATH={run_half}${{PYTHONPATH:+:$PYTHONPATH}}"'


@dataclass(frozen=True)
class ContainerEntry:
    """How a command enters a container."""

    srun_options: Sequence[str] = ()
    prefix: Sequence[str] = ()  # arguments before the command, already quoted
    definition: Sequence[str] = ()  # the lines that define `paceline_inside`


@dataclass(frozen=True)
class ScriptPlan:
    """Everything that the text of a batch script depends on."""

    title: str  # one line: what runs, on how much
    folder: RunFolder
    python: str
    task_counts: TaskCounts
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
        """What `paceline_start_job` and `paceline_start_task` of stop_and_requeue.sh are given."""
        options = [] if self.requeue else ["--no-requeue"]
        if self.exclude and self.requeue:
            options.append(f"--exclude={self.exclude}")
        return "".join(f" {quote(option)}" for option in options)


@dataclass(frozen=True)
class Script:
    """A batch script, section by section."""

    title: str
    advice: Sequence[str]  # what the reader can do with the script
    directives: Sequence[str]
    start: Sequence[str]
    environment: Sequence[str]
    launch: Sequence[str]

    def __str__(self) -> str:
        header = [
            "#!/bin/bash",
            f"# {self.title}",
            "# Written by Paceline, in plain bash for Slurm.",
            *(f"# {line}" for line in self.advice),
            "#",
            *self.directives,
        ]
        sections = (
            header,
            self.start,
            ["# -- environment --", *self.environment],
            ["# -- launch --", *self.launch],
        )
        return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def shell_library() -> str:
    """Return the text of `stop_and_requeue.sh`, which every batch script sources from its run
    folder.
    """
    return resources.files(__package__).joinpath("stop_and_requeue.sh").read_text(encoding="utf-8")


def job_script(plan: ScriptPlan) -> Script:
    """Return the script of a single run."""
    return Script(
        title=plan.title,
        advice=["You can read it, keep it and resubmit it: sbatch job.sbatch"],
        directives=render(plan.directives),
        start=[
            f"paceline_run={quote(str(plan.folder.path))} # holds everything about this run",
            f"paceline_python={quote(plan.python)}",
            *source_library("$paceline_run"),
            f"paceline_start_job{plan.start_options}",
        ],
        environment=plan.environment.lines("$paceline_run"),
        launch=[*launch_lines(plan, "$paceline_run"), "paceline_finish_job"],
    )


def source_library(folder: str) -> list[str]:
    return [
        "# This library stops the ranks in time, requeues the job, and keeps a second job out of "
        "the run folder.",
        f'source "{folder}/stop_and_requeue.sh" || exit 1',
    ]


def launch_lines(plan: ScriptPlan, folder: str, rendezvous: str = "") -> list[str]:
    """Return what starts the agents. `folder` has the run half; `rendezvous` varies the port from
    trial to trial.
    """
    counts = plan.task_counts
    if plan.mpirun:
        command = [
            f"mpirun -np {counts.tasks} --map-by ppr:{counts.tasks_per_node}:node --oversubscribe "
            "--bind-to none",
            # mpirun passes only variables that it is given by name, and warns about those not set.
            *(
                " ".join(f"${{{name}+-x {name}}}" for name in plan.forwarded[row : row + 3])
                for row in range(0, len(plan.forwarded), 3)
            ),
        ]
    else:  # repeat every number: newer steps no longer inherit some of them, nor `--export`
        command = [
            "srun --export=ALL --kill-on-bad-exit=1 --mpi=none --unbuffered",
            f"--nodes={counts.nodes} --ntasks={counts.tasks} "
            f"--ntasks-per-node={counts.tasks_per_node} --cpus-per-task={counts.cpus_per_task}",
            *(quote(option) for option in plan.step_options),
            *plan.step_shell,
            *plan.container.srun_options,
        ]
    if plan.container.prefix:
        command.append(" ".join(plan.container.prefix))
    command.append(f'"$paceline_python" "{folder}/paceline.zip"')
    several = counts.tasks_per_node > 1
    lines = [f"paceline_launch {command[0]}", *(f"    {part}" for part in command[1:])]
    return [
        "# One agent per rank." if several else "# One agent per node starts the ranks.",
        *([f"paceline_open_rendezvous{rendezvous}"] if counts.tasks > 1 else []),
        *(f"{line} \\" for line in lines[:-1]),
        lines[-1],
    ]
