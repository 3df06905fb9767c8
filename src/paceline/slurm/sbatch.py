"""sbatch: its environment, the submission of a job or an array, and whether Slurm accepts one."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.contract.run_folder import SUBMITTING, RunFolder, write_atomically
from paceline.errors import ClusterError, JobRejected, NoAnswer, SpecError
from paceline.slurm import commands as slurm
from paceline.slurm.answer_cache import forget_answer
from paceline.slurm.batch_script import Script, ScriptPlan, launch_lines, source_library
from paceline.slurm.commands import SEPARATOR, Completed, call, error_text
from paceline.slurm.sbatch_directives import Directive, TaskCounts, file_pattern, render
from paceline.spec.job import Job
from paceline.spec.quantities import slurm_size
from paceline.spec.shell_text import quote

# What a job inherits from the shell that submits it. Everything else that it needs is in
# environment.sh.
_EXPORTED = ("HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "PATH", "TZ", "KRB5CCNAME")
SLURM_VARIABLES = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT")

# sbatch reads these before the lines of a script: the option that each one sets.
SBATCH_DEFAULTS = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_ARRAY_INX": "array",
    "SBATCH_CLUSTERS": "clusters",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_CPUS_PER_GPU": "cpus-per-gpu",
    "SBATCH_ERROR": "error",
    "SBATCH_EXCLUSIVE": "exclusive",
    "SBATCH_EXPORT": "export",
    "SBATCH_GET_USER_ENV": "get-user-env",
    "SBATCH_GPUS": "gpus",
    "SBATCH_GPUS_PER_NODE": "gpus-per-node",
    "SBATCH_GPUS_PER_TASK": "gpus-per-task",
    "SBATCH_GRES": "gres",
    "SBATCH_INPUT": "input",
    "SBATCH_JOB_NAME": "job-name",
    "SBATCH_MEM_PER_CPU": "mem-per-cpu",
    "SBATCH_MEM_PER_GPU": "mem-per-gpu",
    "SBATCH_MEM_PER_NODE": "mem",
    "SBATCH_NO_REQUEUE": "no-requeue",
    "SBATCH_OPEN_MODE": "open-mode",
    "SBATCH_OUTPUT": "output",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_REQUEUE": "requeue",
    "SBATCH_RESERVATION": "reservation",
    "SBATCH_SIGNAL": "signal",
    "SBATCH_TIMELIMIT": "time",
    "SBATCH_WAIT": "wait",
    "SBATCH_WCKEY": "wckey",
}

# Options that a default in the environment must never set: counts of tasks and GPUs, and how a run
# is requeued.
_NEVER_BY_DEFAULT = {
    "array",
    "wait",
    "error",
    "input",
    "get-user-env",
    "gpus",
    "gpus-per-node",
    "gpus-per-task",
    "gres",
    "cpus-per-gpu",
    "mem-per-gpu",
    "requeue",
    "no-requeue",
}
# Options that exclude each other: where ours sets one, a default must not set the other.
_SAME = {"mem-per-cpu": "mem", "mem-per-gpu": "mem"}


@dataclass(frozen=True)
class SubmissionEnvironment:
    """The environment that sbatch is called in, and the defaults in it that set an option."""

    variables: dict[str, str]
    defaults: dict[str, str]  # SBATCH_PARTITION -> "partition"


def submission_environment(
    environ: Mapping[str, str], directives: Iterable[Directive]
) -> SubmissionEnvironment:
    """Return what sbatch, and through it the job, sees of the submitter's environment.

    Nothing that an outer job, MPI or an agent has left in it; no default that the job overrides; no
    secret, since a cluster's accounting may store what is submitted.
    """
    ours = {each.option for each in directives}
    variables = {name: environ[name] for name in (*_EXPORTED, *SLURM_VARIABLES) if name in environ}
    defaults: dict[str, str] = {}
    for name in (name for name in environ if name.startswith("SBATCH_")):
        option = SBATCH_DEFAULTS.get(name, name.removeprefix("SBATCH_").lower().replace("_", "-"))
        if option in _NEVER_BY_DEFAULT or option in ours or _SAME.get(option) in ours:
            continue
        defaults[name] = option
        variables[name] = environ[name]
    return SubmissionEnvironment(variables, defaults)


# seconds before each question whether a job is there
QUERY_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
INTERRUPTED_PAUSES = (0.0, 1.0)  # the same, after Ctrl-C
# How sbatch fails if the controller may have the job nevertheless.
_NO_ANSWER = re.compile(
    r"timed out|zero bytes|send failure|receive failure|connection reset|communication|unexpected "
    r"message",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class BatchJob:
    """A batch job to submit: its script, and how sbatch is called."""

    folder: RunFolder  # where the job works, and its script is
    task_counts: TaskCounts
    directives: tuple[Directive, ...]
    sections: Script  # of job.sbatch
    arguments: tuple[str, ...]  # of sbatch, before the script's path
    submitter: dict[str, str]  # the environment that sbatch is called in

    @property
    def script(self) -> str:
        """The text of job.sbatch."""
        return str(self.sections)

    @property
    def sbatch(self) -> list[str]:
        return ["sbatch", "--parsable", *self.arguments, str(self.folder.script)]

    def value(self, option: str) -> str | None:
        """Return the value of an option of sbatch, if it is set."""
        return next((each.value for each in self.directives if each.option == option), None)


def run_sbatch(
    argv: Sequence[str], environ: Mapping[str, str], *, folder: Path, known: Sequence[str] = ()
) -> str:
    """Call sbatch and return the job id. Raise JobRejected with sbatch's message.

    A slow controller may take the job although sbatch gives up, so ask for it then. A job is
    recognized by its working directory, `folder`, which is one submission's alone; `known` are
    earlier jobs of the same one. While nobody knows whether there is a job, the folder has the mark
    SUBMITTING, and must not be removed.
    """
    mark = folder / SUBMITTING
    mark.touch()
    try:
        done = call(argv, environ=environ, check=False)
        reason = error_text(done) if done.returncode else ""
    except NoAnswer as problem:
        done, reason = None, problem.message.rstrip(".")
    except ClusterError:  # sbatch was not even started
        mark.unlink()
        raise
    if done is not None and done.returncode and not _NO_ANSWER.search(reason):
        mark.unlink()
        raise JobRejected(reason=reason)
    # Take the last line that is an id: a site's wrapper around sbatch may print more.
    ids = (
        re.findall(r"^(\d+)(?:;.*)?$", done.stdout, re.MULTILINE)
        if done is not None and not reason
        else []
    )
    job = ids[-1] if ids else None
    if job is None:
        with suppress(NoAnswer):
            job = find_job(folder, environ, known=known)
    if job is None:
        printed = done.stdout.strip() if done is not None else ""
        raise NoAnswer(
            "Slurm did not confirm the job: "
            f"{reason or f'sbatch printed no job id, but {printed!r}'}.",
            hint=f"Its folder is kept in case the job exists: {folder}. Look for the job with "
            "`squeue --me --all`.",
        )
    mark.unlink()
    forget_answer()
    return job


def find_job(
    folder: Path,
    environ: Mapping[str, str],
    *,
    known: Sequence[str] = (),
    pauses: Sequence[float] | None = None,
) -> str | None:
    """Ask Slurm, more than once, for a job of yours that works in a folder.

    Raises NoAnswer if it finds none and Slurm did not answer at last: there may be a job all the
    same.
    """
    problem: ClusterError | None = None
    form = f"--format=%F{SEPARATOR}%Z"
    argv = ["squeue", "--all", "--noheader", "--states=all", f"--user={os.getuid()}", form]
    for pause in QUERY_PAUSES if pauses is None else pauses:
        time.sleep(pause)
        problem = None
        try:
            done = call(argv, environ=environ)
        except ClusterError as error:
            problem = error
            continue
        rows = [line.split(SEPARATOR) for line in done.stdout.splitlines()]
        found = {
            row[0].strip() for row in rows if len(row) == 2 and row[1].strip() == str(folder)
        } - set(known)
        if found:
            return max(found, key=int)
    if problem is not None:
        raise NoAnswer(
            f"Cannot find out whether Slurm has the job: {problem.message}",
            hint="Nothing was submitted or cancelled. Repeat your command once Slurm responds. "
            f"{problem.hint}".strip(),
        )
    return None


@contextmanager
def withdrawn_on_failure(
    plan: BatchJob, cancelled: Path, *, known: Sequence[str] = ()
) -> Iterator[None]:
    """If a submission is not confirmed, or is interrupted, cancel its job, whether it is there or
    yet to come.

    A job that finds the file `cancelled` ends at once.
    """
    try:
        yield
    except JobRejected:
        raise
    except BaseException as problem:
        if not (plan.folder.path / SUBMITTING).exists():
            raise
        write_atomically(cancelled, f"{time.time():.0f}\n")
        if not isinstance(problem, NoAnswer):
            folder, environ = plan.folder.path, plan.submitter
            with suppress(ClusterError):  # the file alone will do
                if job := find_job(folder, environ, known=known, pauses=INTERRUPTED_PAUSES):
                    call(["scancel", job], environ=environ, check=False)
        raise


def test_only(plan: BatchJob) -> Completed:
    """Ask Slurm whether it would accept the job and when it would start, without submitting it."""
    return call(
        ["sbatch", "--test-only", *plan.arguments],
        environ=plan.submitter,
        check=False,
        text=plan.script,
    )


@dataclass(frozen=True)
class Trials:
    """What the tasks of an array run."""

    sweep: Path  # the sweep's folder
    pack: int = 1  # trials side by side in one job

    def task_counts(self, job: Job, counts: TaskCounts) -> TaskCounts:
        """Return what a task asks for, so that each of its trials has `counts`."""
        if self.pack == 1:
            return counts
        if counts.nodes > 1:
            raise SpecError(
                f"{job.source('job.nodes')} is {counts.nodes}, but --pack puts {self.pack} trials "
                "on one node.",
                hint="Leave --pack out, or ask for one node per trial.",
            )
        if job.launch.style == "mpirun":
            raise SpecError(
                f'{job.source("launch.style")} is "mpirun", which takes the whole job, but --pack '
                f"is {self.pack}.",
                hint="Leave --pack out, or use another style.",
            )
        return replace(
            counts,
            nproc=counts.nproc * self.pack,
            gpus=counts.gpus * self.pack,
            tasks_per_node=counts.tasks_per_node * self.pack,
        )

    def directives(
        self, job: Job, directives: Sequence[Directive], folder: Path
    ) -> list[Directive]:
        """Turn the directives of a single run into those of an array's tasks."""
        log = file_pattern(str(folder / "logs")) + "/%A_%a.log"
        changed = {"output": log}
        memory = job.resources.mem_per_node
        if memory is not None and self.pack > 1:
            changed["mem"] = slurm_size(memory * self.pack)
        return [
            Directive(each.option, changed[each.option]) if each.option in changed else each
            for each in directives
        ]


def array_script(plan: ScriptPlan, trials: Trials) -> Script:
    """Return the script of a sweep. `plan.task_counts` are those of one trial, `plan.directives`
    those of a task.
    """
    launch = launch_lines(
        _share(plan, trials), "$paceline_submission", rendezvous=' "$paceline_trial"'
    )
    return Script(
        title=plan.title,
        advice=[
            "Each task runs the trials on its line of a list. To submit it: sbatch --array=0-9 "
            "job.sbatch tasks-1"
        ],
        directives=render(plan.directives),
        start=[
            f"paceline_sweep={quote(str(trials.sweep))} # holds everything about this sweep",
            f"paceline_submission={quote(str(plan.folder.path))} # holds everything about this "
            "submission",
            f"paceline_python={quote(plan.python)}",
            *source_library("$paceline_submission"),
            'paceline_start_task "$paceline_sweep" "$paceline_submission" '
            f'"${{1:-tasks-1}}"{plan.start_options}',
        ],
        environment=plan.environment.lines("$paceline_submission"),
        launch=[
            "# Paceline opens and closes each trial on this host; in between, the trial runs on "
            "the nodes.",
            f'paceline_run_half() {{ {_run_half(plan)} "$@"; }}',
            "paceline_launch_trial() {",
            *(f"    {line}" for line in launch),
            "}",
            f"paceline_run_trials {trials.pack}"
            + (" # side by side" if trials.pack > 1 else " # at a time"),
            "paceline_finish_task",
        ],
    )


def _run_half(plan: ScriptPlan) -> str:
    """Return how the run half is called on the batch host: in the container, where there is one."""
    entry = [*plan.container.prefix]
    if plan.container.srun_options:
        entry = ["srun --export=ALL --nodes=1 --ntasks=1 --mpi=none", *plan.container.srun_options]
    return " ".join([*entry, '"$paceline_python" "$paceline_submission/paceline.zip"'])


def _share(plan: ScriptPlan, trials: Trials) -> ScriptPlan:
    """Limit each trial to its share of a job that several trials share."""
    if trials.pack == 1:
        return plan
    options = [*plan.step_options, "--exact"]
    if not plan.step_options:
        gres = next((each.value or "" for each in plan.directives if each.option == "gres"), "")
        options.append(
            f"--gres={gres.rpartition(':')[0]}:{plan.task_counts.gpus}" if gres else "--gres=none"
        )
    # A step takes all memory of its job unless you limit it, and the others would wait for it.
    memory = f"${{SLURM_MEM_PER_NODE:+--mem=$((SLURM_MEM_PER_NODE / {trials.pack}))M}}"
    return replace(plan, step_options=options, step_shell=[memory])


DEFAULT_ARRAY_SIZE = 1001  # Slurm's default for MaxArraySize
# count the cluster's jobs only if the submission needs more than a tenth of MaxJobCount
FRACTION = 10
# How sbatch rejects a job because of a limit on the number of jobs.
JOB_LIMIT_REACHED = re.compile(
    r"submit limit|MaxSubmit|job count|MaxJobCount|limit on jobs|Resource temporarily unavailable",
    re.IGNORECASE,
)


def array_size_limit() -> int:
    """Return the largest number of tasks that one array may have."""
    config = _read_config()
    size = int(config.get("MaxArraySize") or DEFAULT_ARRAY_SIZE)
    if size < 2:
        raise ClusterError(
            "This cluster does not allow job arrays (MaxArraySize is 0).",
            hint="Run the sweep on this machine with --local.",
        )
    match = re.search(r"max_array_tasks=(\d+)", config.get("SchedulerParameters", ""))
    return min(size, int(match[1])) if match else size


def max_new_jobs(wanted: int) -> int | None:
    """Return how many more jobs the controller can hold, or None if that is more than enough.

    sbatch would wait for room for minutes. It refuses at once what an association may not submit.
    """
    limit = int(_read_config().get("MaxJobCount") or 0)
    # It covers every user's jobs, and listing them all is slow: do it only when it may matter.
    if not limit or wanted * FRACTION <= limit:
        return None
    done = slurm.call(
        ["squeue", "--all", "--noheader", "--array", "--states=all", "--format=%i"], check=False
    )
    return max(1, limit - 1 - len(done.stdout.split()))


def _read_config() -> dict[str, str]:
    done = slurm.call(["scontrol", "show", "config"], check=False)
    return dict(re.findall(r"^(\w+)\s*=\s*(.*?)\s*$", done.stdout, re.MULTILINE))


def submit_array(
    plan: BatchJob,
    *,
    array: str,
    listing: str,
    after: Sequence[str] = (),
    known: Sequence[str] = (),
) -> str:
    """Submit the tasks in `listing` as one array and return its job id.

    `after` are jobs that must end first; `known` are the arrays that are submitted already.
    """
    extra = [f"--array={array}"]
    if after:
        extra.append(f"--dependency=afterany:{':'.join(after)}")
    *command, script = plan.sbatch
    folder = plan.folder.path
    with withdrawn_on_failure(plan, folder / f"cancelled-{listing}", known=known):
        return run_sbatch(
            [*command, *extra, script, listing], plan.submitter, folder=folder, known=known
        )
