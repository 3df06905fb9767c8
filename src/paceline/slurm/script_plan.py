"""What the text of a batch script depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.contract.quote import quote
from paceline.contract.run_folder import RunFolder
from paceline.launch.environment.activation import EnvironmentSection
from paceline.launch.environment.container import ContainerEntry
from paceline.slurm.sbatch_directives import Directive
from paceline.slurm.task_counts import TaskCounts


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
