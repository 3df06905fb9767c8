"""A shell inside an allocation, with exactly the environment of a job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from paceline.contract import env
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import RunFolder
from paceline.errors import UsageError
from paceline.launch.environment.container import FUNCTION
from paceline.launch.slurm_plan import SlurmPlan
from paceline.slurm.batch_script import python_path
from paceline.spec.shell_text import quote

# A shell that has run the lines: one for a person, or one that reads its commands from a pipe. It
# skips the user's start-up files, which no job reads: they might undo what the lines did (`conda
# activate`).
_EVALUATE = f'eval "${env.SHELL_SETUP}"; unset {env.SHELL_SETUP}'
_PROMPT = r"PS1='(paceline) \h:\w\$ '"
INTERACTIVE = f"exec bash --rcfile <(printf '%s\\n' {quote(_EVALUATE)} {quote(_PROMPT)}) -i"
PIPED = f"{_EVALUATE}; exec bash"
_ANY_SHELL = "sh -c 'if command -v bash >/dev/null; then exec bash; else exec sh; fi'"

# Options of a batch job that mean nothing to an interactive one, or would harm it.
_BATCH_ONLY = {
    "output",
    "open-mode",
    "requeue",
    "no-requeue",
    "signal",
    "chdir",
    "export",
    "mail-user",
    "mail-type",
}


def setup_from_run(run: RunFolder, launch_spec: LaunchSpec) -> str:
    """Return what a shell in a run's environment evaluates first: the environment section of the
    run's own script.
    """
    # A trial's is in the folder of its submission, where the link to its run half leads.
    submission = RunFolder(run.run_half.resolve().parent)
    path = run.shell_setup if run.shell_setup.exists() else submission.shell_setup
    try:
        section = path.read_text(encoding="utf-8")
    except OSError as problem:
        raise UsageError(
            f"Cannot read {path}: {problem.strerror}.",
            hint="Omit the run to open a shell in a new allocation.",
        ) from None
    folder = quote(str(path.parent))
    return _setup([f"paceline_run={folder}; paceline_submission={folder}", section], launch_spec)


def setup_from_plan(plan: SlurmPlan, run_half: str) -> str:
    """Return the same for a job without a run folder: the lines of its script, and the variables
    themselves.
    """
    section = plan.environment.after_variables()
    return _setup(
        [plan.environment_file, *section, python_path(f'{quote(run_half)}"')], plan.launch_spec
    )


def _setup(environment: Sequence[str], launch_spec: LaunchSpec) -> str:
    """A failure in the environment's lines is shown, and leaves the shell usable."""
    folder = quote(str(PurePath(launch_spec.python).parent))
    return "\n".join(
        [
            'paceline_fail() { echo "paceline: error: $*" >&2; }',
            *environment,
            # lines of the user may have set them; one failed command would end the shell
            "set +eu +o pipefail",
            f"cd {quote(launch_spec.cwd)} 2>/dev/null",
            "unset paceline_run paceline_submission; unset -f paceline_fail",
            # An agent's variables win over what modules and the venv have made of them, so they do
            # here.
            *(f"export {name}={quote(text)}" for name, text in launch_spec.variables.items()),
            # The job calls its Python by its path; a person types `python`.
            f'if [ -x {quote(launch_spec.python)} ] && [ "$(command -v python)" != '
            f"{folder}/python ]; then",
            f"    PATH={folder}:$PATH",
            "fi",
            # If the job's Python is in a container, so is the shell.
            f"if declare -F {FUNCTION} >/dev/null; then",
            f"    unset {env.SHELL_SETUP}",
            f"    {FUNCTION} {_ANY_SHELL}",
            "fi",
        ]
    )


def join_argv(job: str, *, node: str | None = None, terminal: bool = True) -> list[str]:
    """Return the command that enters a running job, beside what it does."""
    where = [f"--nodelist={node}"] if node else []
    return [
        "srun",
        f"--jobid={job}",
        "--overlap",
        "--export=ALL",
        "--nodes=1",
        "--ntasks=1",
        *where,
        *_shell(terminal),
    ]


def allocate_argv(plan: SlurmPlan, *, terminal: bool = True) -> list[str]:
    """Return the command that opens a new allocation of the job's size and enters its first
    node.
    """
    options = [str(each) for each in plan.directives if each.option not in _BATCH_ONLY]
    step = [
        "srun",
        "--export=ALL",
        "--nodes=1",
        "--ntasks=1",
        f"--cpus-per-task={plan.task_counts.cpus_per_task}",
    ]
    return ["salloc", *options, *step, *_shell(terminal)]


def _shell(terminal: bool) -> list[str]:
    return ["--pty", "bash", "-c", INTERACTIVE] if terminal else ["bash", "-c", PIPED]
