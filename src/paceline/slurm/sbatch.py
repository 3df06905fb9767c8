"""sbatch: submit a job, or ask whether Slurm would accept it."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.contract.files.foreign_records import read_objects
from paceline.contract.redaction import redact_text
from paceline.contract.run_folder import SUBMITTING, RunFolder, write_atomically
from paceline.errors import ClusterError, JobRejected, NoAnswer
from paceline.launch.plan.slurm import SlurmPlan
from paceline.slurm.answer_cache import forget_answer
from paceline.slurm.commands import SEPARATOR, Completed, call, error_text, read_job_id

# seconds before each question whether a job is there
QUERY_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
INTERRUPTED_PAUSES = (0.0, 1.0)  # the same, after Ctrl-C
# How sbatch fails if the controller may have the job nevertheless.
_NO_ANSWER = re.compile(
    r"timed out|zero bytes|send failure|receive failure|connection reset|communication|unexpected "
    r"message",
    re.IGNORECASE,
)


def write_files(plan: SlurmPlan) -> None:
    """Write the batch script, and the files beside it, into the run folder."""
    folder = plan.run_path.folder
    write_atomically(folder.environment, plan.environment_file, mode=0o600)
    write_atomically(folder.shell_library, plan.library)
    _write_script(folder.shell_setup, "\n".join([*plan.sections.environment, ""]))
    write_script(plan, folder.script)


def write_script(plan: SlurmPlan, path: Path) -> None:
    """Write the batch script."""
    _write_script(path, plan.script)


def _write_script(path: Path, text: str) -> None:
    """Write lines of bash. If a line of `setup` has a secret, only its owner can read them."""
    write_atomically(path, text, mode=0o644 if redact_text(text) == text else 0o600)


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
    plan: SlurmPlan, cancelled: Path, *, known: Sequence[str] = ()
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
        if not (plan.run_path.folder.path / SUBMITTING).exists():
            raise
        write_atomically(cancelled, f"{time.time():.0f}\n")
        if not isinstance(problem, NoAnswer):
            folder, environ = plan.run_path.folder.path, plan.submitter
            with suppress(ClusterError):  # the file alone will do
                if job := find_job(folder, environ, known=known, pauses=INTERRUPTED_PAUSES):
                    call(["scancel", job], environ=environ, check=False)
        raise


def submit(plan: SlurmPlan, *, known: Sequence[str] = ()) -> str:
    """Submit a run's script and record the job id in the run folder. `known` are the run's earlier
    jobs.
    """
    folder = plan.run_path.folder
    with withdrawn_on_failure(plan, folder.cancelled, known=known):
        job = run_sbatch(plan.sbatch, plan.submitter, folder=folder.path, known=known)
    try:
        record_job(folder, job, after=plan.after)
    # the run folder is removed or restored on errors, and the job cannot run with that
    except BaseException:
        call(["scancel", job], environ=plan.submitter, check=False)
        raise
    return job


def record_job(folder: RunFolder, job: str, *, after: Sequence[str] = ()) -> None:
    """Record the run's job id, and the jobs that it waits for. The job does the same with its id
    when it starts.
    """
    write_atomically(folder.job, f"{job}\n")
    waits = {"after": list(after)} if after else {}
    line = json.dumps({"time": time.time(), "event": "queued", "job": job, **waits})
    with open(folder.events / "launch.jsonl", "a", encoding="utf-8") as events:
        events.write(line + "\n")


def awaited_jobs(folder: RunFolder, job: str) -> list[str]:
    """Return the jobs that a run's job waits for, or waited for."""
    for event in read_objects(folder.events / "launch.jsonl"):
        if event.get("job") == job and isinstance(event.get("after"), list):
            return [str(each) for each in event["after"]]
    return []


def known_jobs(folder: RunFolder) -> list[str]:
    """Return all jobs of a run so far, oldest first: those that were submitted, and those that
    have started.
    """
    queued = [event.get("job") for event in read_objects(folder.events / "launch.jsonl")]
    started = [path.path.name.rpartition("-")[0] for path in folder.job_starts()]
    found = {
        str(job)
        for job in (*queued, *started, read_job_id(folder))
        if re.fullmatch(r"\d+(_\d+)?", str(job))
    }
    return sorted(found, key=lambda job: int(job.partition("_")[0]))


def test_only(plan: SlurmPlan) -> Completed:
    """Ask Slurm whether it would accept the job and when it would start, without submitting it."""
    return call(
        ["sbatch", "--test-only", *plan.arguments],
        environ=plan.submitter,
        check=False,
        text=plan.script,
    )
