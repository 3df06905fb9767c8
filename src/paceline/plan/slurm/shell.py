"""A shell inside an allocation, with exactly the environment that a job's script makes."""

from __future__ import annotations

import re
from pathlib import PurePath

from paceline.contract.launch_spec import LaunchSpec
from paceline.plan.environment.container import FUNCTION
from paceline.plan.quote import quote
from paceline.plan.slurm.plan import SlurmPlan

SETUP = "PACELINE_SHELL_SETUP"  # the lines travel in a variable: there may be no file that all nodes see

# A shell that has run the lines: one that talks to a person, or one that reads its commands from a pipe. The user's
# start-up files, which no job reads, might change what the lines have made (`conda activate`): they are left out.
_LINES = f'eval "${SETUP}"; unset {SETUP}'
_PROMPT = r"PS1='(paceline) \h:\w\$ '"
FOR_A_PERSON = f"exec bash --rcfile <(printf '%s\\n' {quote(_LINES)} {quote(_PROMPT)}) -i"
FOR_A_PIPE = f"{_LINES}; exec bash"
_ANY_SHELL = "sh -c 'if command -v bash >/dev/null; then exec bash; else exec sh; fi'"

# Options of a batch job that mean nothing to, or would harm, an interactive one.
_BATCH_ONLY = {
    "output", "open-mode", "requeue", "no-requeue", "signal", "chdir", "export", "mail-user", "mail-type",
}  # fmt: skip


def environment_section(script: str) -> str:
    """The lines of a batch script that set up its environment, from its variables to its PYTHONPATH."""
    # The variables' file, where it stands in for its name, may export a PYTHONPATH too.
    end = r'^export PYTHONPATH="[^\n]*/paceline\.zip\$\{[^\n]*$'
    match = re.search(rf"^# The environment\..*?{end}", script, re.DOTALL | re.MULTILINE)
    assert match is not None, "every batch script has this section"
    return match[0]


def setup_lines(script: str, launch_spec: LaunchSpec, *, run: str, run_half: str, kit: str = "") -> str:
    """What a shell in a job's environment evaluates first. A failure there is said, and leaves the shell usable.

    `kit` is where a trial's script has what came along with its sweep.
    """
    section = re.sub(
        r'"\$(run|kit)/paceline\.zip', lambda found: f'{quote(run_half)}"', environment_section(script)
    )
    here = quote(str(PurePath(launch_spec.python).parent))
    return "\n".join(
        [
            f"run={quote(run)} kit={quote(kit)}",
            'fail() { echo "paceline: $*" >&2; }',
            section,
            f"cd {quote(launch_spec.cwd)} 2>/dev/null",
            "unset run kit; unset -f fail",
            # Ranks have the last word of their agent, whatever modules and the venv have made of a variable.
            *(f"export {name}={quote(text)}" for name, text in launch_spec.variables.items()),
            # The job calls its Python by its path; a person types `python`.
            f'if [ -x {quote(launch_spec.python)} ] && [ "$(command -v python)" != {here}/python ]; then',
            f"    PATH={here}:$PATH",
            "fi",
            # In a job whose Python is in a container, so is the shell.
            *([f"unset {SETUP}", f"{FUNCTION} {_ANY_SHELL}"] if f"\n{FUNCTION}() {{\n" in section else []),
        ]
    )


def join_argv(job: str, *, node: str | None = None, terminal: bool = True) -> list[str]:
    """Into a job that runs, beside what it does."""
    where = [f"--nodelist={node}"] if node else []
    return [
        "srun", f"--jobid={job}", "--overlap", "--export=ALL", "--nodes=1", "--ntasks=1", *where, *_shell(terminal)
    ]  # fmt: skip


def allocate_argv(plan: SlurmPlan, *, terminal: bool = True) -> list[str]:
    """Into an allocation of its own, of the size that the job would have; the shell is on its first node."""
    asked = [str(each) for each in plan.directives if each.option not in _BATCH_ONLY]
    step = ["srun", "--export=ALL", "--nodes=1", "--ntasks=1", f"--cpus-per-task={plan.layout.cpus_per_task}"]
    return ["salloc", *asked, *step, *_shell(terminal)]


def _shell(terminal: bool) -> list[str]:
    return ["--pty", "bash", "-c", FOR_A_PERSON] if terminal else ["bash", "-c", FOR_A_PIPE]
