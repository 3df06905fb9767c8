"""A job's surroundings, put on for one command where the job is submitted: what is missing is known before queueing."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.plan.environment.container import FUNCTION
from paceline.plan.environment.modules import load_failure
from paceline.plan.quote import quote
from paceline.plan.slurm.plan import SlurmPlan
from paceline.plan.slurm.shell import environment_section

LINES = "PACELINE_REHEARSAL"  # the lines travel in a variable: they may hold secrets, which an argument would show
CHECKING = (
    "PACELINE_CHECK"  # set while lines of `setup` are only tried: one that must not run here can ask for it
)
REFUSED = 97  # the exit code of the script's own `fail`

STARTER = f'eval "${LINES}"'


def rehearsal(plan: SlurmPlan, command: str) -> str:
    """The lines of a batch script that make its environment, then a command, which may say "$python" and "$@"."""
    source = next(line for line in plan.script.splitlines() if line.startswith("source "))
    lines = environment_section(plan.script).replace(source, plan.environment)
    run = [f"run={quote(str(plan.run_path.folder.path))}", f"python={quote(plan.launch_spec.python)}"]
    return rehearsal_of([*run, lines], command)


def python_command(plan: SlurmPlan) -> str:
    """The job's Python with arguments: in its container, where it has one that bash can enter."""
    how = FUNCTION if f"\n{FUNCTION}() {{\n" in plan.script else "exec"
    return f'{how} "$python" "$@"'


def rehearsal_of(lines: Sequence[str], command: str) -> str:
    """The same of lines that are not a script's yet."""
    head = [
        f"unset {LINES}",
        f"export {CHECKING}=1",
        f'fail() {{ echo "paceline: $*" >&2; exit {REFUSED}; }}',
    ]
    return "\n".join([*head, *lines, command])


def lines_until(lines: Sequence[str], module: str) -> list[str]:
    """The lines ahead of the one that loads a module: what is available there depends on what was loaded before."""
    kept = []
    for line in lines:
        if line.startswith("module load ") and line.endswith(quote(load_failure(module))):
            break
        kept.append(line)
    return kept
