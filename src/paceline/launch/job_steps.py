"""Steps beside what a job runs: a shell with its environment, and questions to its nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import paceline
from paceline.contract import env
from paceline.contract.fitness import LINE, Measurement
from paceline.contract.foreign_records import make, parse_object
from paceline.contract.gpus import visible_devices
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import RunFolder
from paceline.contract.stacks import PROBE_MARK, STACKS, NodeAnswer
from paceline.errors import UsageError
from paceline.launch.environment.activation import FUNCTION
from paceline.slurm import commands as slurm
from paceline.slurm import squeue_and_sacct
from paceline.slurm.batch_script import python_path
from paceline.slurm.sbatch import submission_environment
from paceline.spec.shell_text import command_line, quote

if TYPE_CHECKING:
    from paceline.launch.slurm_job import SlurmPlan

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


CODE = "from paceline.agent.health.node_probe import main; main()"
MEASURE = "from paceline.runtime.distributed.fitness import main; main()"
ANSWER_TIMEOUT = 20.0  # seconds for a node to answer
MEASURE_TIMEOUT = 90.0  # seconds for all nodes, the import of torch included
MAX_NODES = 32  # asked; more would take long, and one of them is enough to find a hang
AT_ONCE = 8


def ask_run(
    folder: RunFolder, spec: LaunchSpec, job: str | None, nodes: Sequence[str], *, stacks: bool
) -> list[NodeAnswer]:
    """Ask each node of a run; with `stacks`, for the stacks of all ranks.

    Each node gets a step of its own: one that is cut off must not hold up the others. A run without
    a job is on this machine.
    """
    words = ["-c", CODE, str(folder.path), *([STACKS] if stacks else [])]
    if job is None:
        return [_as_node("here", _call([sys.executable, *words], dict(os.environ), PROBE_MARK))]
    variables = submission_environment(os.environ, ()).variables
    environ = {**variables, env.SHELL_SETUP: setup_from_run(folder, spec)}
    number = squeue_and_sacct.numeric_job_id(job)
    text = f"exec {command_line(['python', *words])}\n"
    each_node = ("--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--gpus-per-node=0")

    def ask(node: str) -> NodeAnswer:
        step = [*_step(number), *each_node, f"--nodelist={node}", "bash", "-c", PIPED]
        return _as_node(node, _call(step, environ, PROBE_MARK, text=text))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(ask, nodes[:MAX_NODES]))


def ask_allocation(environ: Mapping[str, str]) -> tuple[list[dict[str, Any]], str]:
    """Return what each node of this allocation says about itself, and what went wrong."""
    argv = [*_in_allocation(environ, 1), sys.executable, "-c", CODE]
    return _call(argv, _with_path(environ), PROBE_MARK, timeout=MEASURE_TIMEOUT)


def measure_allocation(environ: Mapping[str, str]) -> tuple[list[Measurement], str]:
    """Measure the devices and links of this allocation: one task per GPU, or one per node.

    Return what went wrong, too.
    """
    granted = environ.get("SLURM_GPUS_ON_NODE", "")
    gpus = int(granted) if granted.isdigit() else len(visible_devices(environ) or [])
    argv = [*_in_allocation(environ, max(1, gpus)), sys.executable, "-c", MEASURE]
    variables = {**_with_path(environ), **({} if gpus else {env.FITNESS_CPU: "1"})}
    answers, problem = _call(argv, variables, LINE, timeout=MEASURE_TIMEOUT)
    found = [make(Measurement, each) for each in answers]
    return sorted(found, key=lambda each: each.rank), problem


def _step(job: str) -> list[str]:
    return ["srun", f"--jobid={job}", "--overlap", "--export=ALL", "--quiet", "--mem=0"]


def _in_allocation(environ: Mapping[str, str], tasks: int) -> list[str]:
    nodes = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or "1"
    spread = [f"--nodes={nodes}", f"--ntasks-per-node={tasks}"]
    return [*_step(environ["SLURM_JOB_ID"]), *spread]


def _with_path(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the tasks of this one, and with the Paceline that asks."""
    tasks = ("SLURM_NTASKS", "SLURM_CPUS_PER_TASK")
    kept = {name: text for name, text in environ.items() if not name.startswith(tasks)}
    root = str(Path(paceline.__file__).parent.parent)
    path = os.pathsep.join(filter(None, [environ.get("PYTHONPATH", ""), root]))
    return {**kept, "PYTHONPATH": path}


def _call(
    argv: Sequence[str],
    environ: Mapping[str, str],
    mark: str,
    *,
    text: str = "",
    timeout: float = ANSWER_TIMEOUT,
) -> tuple[list[dict[str, Any]], str]:
    """Return the objects in the lines that begin with the mark, and what went wrong."""
    try:
        done = subprocess.run(
            list(argv),
            env=dict(environ),
            input=text,
            text=True,
            capture_output=True,
            timeout=timeout,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return [], f"no answer within {timeout:.0f} s"
    lines = [line for line in done.stdout.splitlines() if line.startswith(mark)]
    answers = [parse_object(line.removeprefix(mark)) for line in lines]
    return answers, slurm.error_text(done) if done.returncode or not answers else ""


def _as_node(host: str, answered: tuple[list[dict[str, Any]], str]) -> NodeAnswer:
    answers, problem = answered
    if not answers:
        return NodeAnswer(host, problem=problem)
    return NodeAnswer(str(answers[-1].get("host", host)), answers[-1])
