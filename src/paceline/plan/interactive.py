"""A shell inside an allocation, with exactly the environment that a job's script makes."""

from __future__ import annotations

import re

from paceline.plan.quote import quote
from paceline.plan.slurm import SlurmPlan

SETUP = "PACELINE_SHELL_SETUP"  # the lines travel in a variable: there may be no file that all nodes see

# Run the lines, then become a shell that talks to a person.
STARTER = f'eval "${SETUP}"; unset {SETUP}; exec bash -i'

# Options of a batch job that mean nothing to, or would harm, an interactive one.
_BATCH_ONLY = {
    "output", "open-mode", "requeue", "no-requeue", "signal", "chdir", "export", "mail-user", "mail-type",
}  # fmt: skip


def environment_section(script: str) -> str:
    """The lines of a batch script that set up its environment, from its variables to its PYTHONPATH."""
    match = re.search(r"^# The environment\..*?^export PYTHONPATH=.*?$", script, re.DOTALL | re.MULTILINE)
    assert match is not None, "every batch script has this section"
    return match[0]


def setup_lines(script: str, *, run: str, cwd: str) -> str:
    """What a shell in a job's environment evaluates first. A failure there is said, and leaves the shell usable."""
    return "\n".join(
        [
            f"run={quote(run)}",
            'fail() { echo "paceline: $*" >&2; }',
            environment_section(script),
            f"cd {quote(cwd)} 2>/dev/null",
        ]
    )


def join_argv(job: str, *, node: str | None = None) -> list[str]:
    """Into a job that runs, beside what it does."""
    where = [f"--nodelist={node}"] if node else []
    return [
        "srun", f"--jobid={job}", "--overlap", "--export=ALL", "--nodes=1", "--ntasks=1", *where, "--pty",
        "bash", "-c", STARTER,
    ]  # fmt: skip


def allocate_argv(plan: SlurmPlan) -> list[str]:
    """Into an allocation of its own, of the size that the job would have; the shell is on its first node."""
    asked = [str(each) for each in plan.directives if each.option not in _BATCH_ONLY]
    step = ["srun", "--export=ALL", "--nodes=1", "--ntasks=1", f"--cpus-per-task={plan.layout.cpus_per_task}"]
    return ["salloc", *asked, *step, "--pty", "bash", "-c", STARTER]
