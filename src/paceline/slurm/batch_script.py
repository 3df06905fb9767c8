"""`job.sbatch`: short, commented bash that you can read, keep and submit by hand.

It holds the directives, the environment and one line that launches the agents;
`stop_and_requeue.sh`, which it sources, does the rest. Both need only bash and Slurm, since a host
may have Python only in containers, and neither grows with the number of nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from paceline.contract.quote import quote
from paceline.slurm.launch_command import launch_lines
from paceline.slurm.sbatch_directives import render
from paceline.slurm.script_plan import ScriptPlan


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
