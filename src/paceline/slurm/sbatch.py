"""sbatch: its environment, the submission of a job, and whether Slurm would accept one."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.contract.run_folder import SUBMITTING, RunFolder, write_atomically
from paceline.errors import ClusterError, JobRejected, NoAnswer
from paceline.slurm.answer_cache import forget_answer
from paceline.slurm.batch_script import Script
from paceline.slurm.commands import SEPARATOR, Completed, call, error_text
from paceline.slurm.sbatch_directives import Directive, TaskCounts

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
