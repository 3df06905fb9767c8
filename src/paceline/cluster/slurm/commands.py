"""Slurm's commands: query, stop and cancel jobs.

Output is parsed by explicit field lists, not by column position. Queries say `--all`: without it, Slurm leaves out
hidden partitions and the jobs in them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence

from paceline.cluster.slurm.answer_file import forget_answer, remember_name
from paceline.cluster.slurm.state_meanings import JobState, normalize_state
from paceline.contract.files.foreign_records import read_bounded
from paceline.contract.launcher_variables import slurm_query_environment
from paceline.contract.run_folder import SAVES_FIRST, RunFolder, write_atomically
from paceline.errors import ClusterError, NoAnswer, NoSlurm, NotConfigured

COMMAND_TIMEOUT = 60.0  # seconds; a busy controller responds slowly
JOBS_PER_CALL = 2000  # Linux limits one argument to 128 KiB
SEPARATOR = "\x1f"  # never part of a name, a reason or a node list

Completed = subprocess.CompletedProcess[str]
_CHECK_CONTROLLER = "Check the controller with `scontrol ping`; if it is a sandbox, with `paceline sandbox status`."

CONFIGURATION_FILES = ("/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/run/slurm/conf/slurm.conf")


def available() -> bool:
    return shutil.which("sbatch") is not None


def configured() -> bool:
    """Return whether this machine belongs to a Slurm: its programs alone may be installed anywhere."""
    if not available():
        return False
    if _has_configuration_file():
        return True
    try:  # its configuration may lie elsewhere, or come from the controller
        return "slurmctld" in call(["scontrol", "ping"], check=False).stdout.lower()
    except ClusterError:
        return False


def require_configured() -> None:
    """Raise an error if this machine belongs to no Slurm: a command on the user's terminal says that in many lines."""
    if available() and not _has_configuration_file():
        call(["scontrol", "ping"], check=False)


def _has_configuration_file() -> bool:
    return any(path and os.path.isfile(path) for path in (os.environ.get("SLURM_CONF"), *CONFIGURATION_FILES))


def cluster_name() -> str | None:
    """Return the name of the cluster that jobs go to; None if there is no Slurm that responds."""
    chosen = os.environ.get("SLURM_CLUSTERS", "")
    if name := os.environ.get("SLURM_CLUSTER_NAME", "") if not chosen or "," in chosen else chosen:
        return name
    return (remember_name(_ask_cluster_name) or None) if available() else None


def _ask_cluster_name() -> str:
    try:
        done = call(["scontrol", "show", "config"], check=False)
    except ClusterError:
        return ""
    found = re.search(r"^ClusterName\s*=\s*(\S+)", done.stdout, re.MULTILINE)
    return found[1] if found else ""


def call(
    argv: Sequence[str], *, environ: Mapping[str, str] | None = None, check: bool = True, text: str = ""
) -> Completed:
    """Run a Slurm command and return its result. The user's `SQUEUE_*` variables and the like do not change it."""
    variables = slurm_query_environment(environ if environ is not None else os.environ)
    try:
        done = subprocess.run(
            list(argv), env=variables, input=text, text=True, capture_output=True, timeout=COMMAND_TIMEOUT,
            errors="replace",
        )  # fmt: skip
    except FileNotFoundError:
        raise NoSlurm(
            f"{argv[0]} is not installed here.",
            hint="Run this on a login node of your cluster, or start a local Slurm with `paceline sandbox up`.",
        ) from None
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{argv[0]} did not respond within {COMMAND_TIMEOUT:.0f} s.", hint=_CHECK_CONTROLLER) from None
    if done.returncode and "configuration source" in done.stderr:
        raise NotConfigured(
            "Slurm is installed here, but not configured.",
            hint='If you have started a sandbox, type `eval "$(paceline sandbox env)"` in this terminal; if not, set'
            " SLURM_CONF, or run this on a login node of your cluster.",
        )
    if check and done.returncode:
        raise ClusterError(f"{argv[0]} failed: {error_text(done)}.", hint=_CHECK_CONTROLLER)
    return done


def error_text(done: Completed) -> str:
    """Return a command's error messages as one line, without the command name that prefixes them."""
    lines = [re.sub(r"^\w+: (error: |fatal: )?", "", line) for line in done.stderr.strip().splitlines()]
    return "; ".join(line for line in lines if line) or f"exit code {done.returncode}"


def version() -> tuple[int, int] | None:
    """Return Slurm's version, or None if `sinfo` is missing or does not report one."""
    try:
        match = re.search(r"(\d+)\.(\d+)", call(["sinfo", "--version"], check=False).stdout)
    except ClusterError:
        return None
    return (int(match[1]), int(match[2])) if match else None


def read_job_id(folder: RunFolder) -> str | None:
    """Return the id of the run's newest job, or None if the run was never submitted."""
    try:
        text = read_bounded(f"{folder.path}/job", 100).decode().strip()
    except (OSError, ValueError):
        return None
    return text if re.fullmatch(r"\d+(_\d+)?", text) else None


# -- states --------------------------------------------------------------------------------------------

_SQUEUE = ("%i", "%T", "%r", "%N", "%S", "%M")
_SACCT = ("JobID", "State", "Reason", "NodeList", "Start", "Elapsed", "ExitCode")


def states(jobs: Iterable[str]) -> dict[str, JobState]:
    """Ask for job states, in the queue or, failing that, in accounting. Unknown jobs are left out.

    Commands that only look use `paceline.watch.scheduler` instead, which asks less often.
    """
    wanted = dict.fromkeys(jobs)
    if not wanted:
        return {}
    found = {job: state for job, state in queue().items() if job in wanted}
    return found | accounting([job for job in wanted if job not in found])


def queue() -> dict[str, JobState]:
    """Return all of the user's jobs that the controller still remembers, in a single call."""
    form = f"--format={SEPARATOR.join(_SQUEUE)}"
    argv = ["squeue", "--all", "--noheader", "--states=all", "--array", f"--user={os.getuid()}", form]
    done = call(argv, environ={**os.environ, "SLURM_TIME_FORMAT": "standard"})
    found = {}
    for line in done.stdout.splitlines():
        values = line.split(SEPARATOR)
        if len(values) == len(_SQUEUE):
            job, state, reason, nodes, start, elapsed = (value.strip() for value in values)
            found[job] = JobState(job, normalize_state(state), _reason(reason), nodes, start, elapsed)
    return found


def accounting(jobs: Sequence[str]) -> dict[str, JobState]:
    """Return job states from accounting; empty if the cluster has none or does not allow queries."""
    found: dict[str, JobState] = {}
    for start in range(0, len(jobs), JOBS_PER_CALL):
        found |= _account(jobs[start : start + JOBS_PER_CALL])
    return found


def _account(jobs: Sequence[str]) -> dict[str, JobState]:
    try:
        done = call(
            ["sacct", "--noheader", "--parsable2", f"--delimiter={SEPARATOR}", "--allocations",
             f"--jobs={','.join(jobs)}", f"--format={','.join(_SACCT)}"],
            check=False,
        )  # fmt: skip
    except ClusterError:
        return {}
    found = {}
    for line in done.stdout.splitlines() if done.returncode == 0 else ():
        values = line.split(SEPARATOR)
        if len(values) == len(_SACCT):
            job, state, reason, nodes, start, elapsed, code = (value.strip() for value in values)
            found[job] = JobState(job, normalize_state(state), _reason(reason), nodes, start, elapsed, code)
    return found


def knows(job: str) -> bool:
    """Return whether the controller knows a job, anybody's, that is in the queue or has ended a moment ago."""
    done = call(["squeue", "--all", "--noheader", "--states=all", f"--jobs={job}", "--format=%i"], check=False)
    return bool(done.stdout.strip()) if done.returncode == 0 else "Invalid job id" not in done.stderr


def _reason(text: str) -> str:
    return "" if text in ("None", "none", "(null)") else text


def numeric_job_id(job: str) -> str:
    """Return the numeric id that srun needs: an array task (`ARRAY_TASK`) has one of its own."""
    if job.isdigit():
        return job
    done = call(["squeue", "--all", "--noheader", f"--jobs={job}", "--format=%A"])
    return (done.stdout.split() or [job])[0]


# -- cancelling ----------------------------------------------------------------------------------------


def cancel(folder: RunFolder, job: str) -> None:
    """Mark the run as cancelled, so that it is not requeued, then cancel its job."""
    write_atomically(folder.cancelled, f"{time.time():.0f}\n")
    cancel_jobs([job])


def cancel_jobs(jobs: Sequence[str]) -> None:
    """Cancel the jobs of runs that are already marked as cancelled. Jobs that have ended are fine."""
    for start in range(0, len(jobs), JOBS_PER_CALL):
        done = call(["scancel", *jobs[start : start + JOBS_PER_CALL]], check=False)
        if done.returncode and not re.search("Invalid job id|already complet", done.stderr):
            raise ClusterError(
                f"scancel failed: {error_text(done)}.",
                hint="Run it again. The run is marked as cancelled and will not be requeued.",
            )
    forget_answer()


def request_stop(folder: RunFolder, job: str) -> None:
    """Mark the run as cancelled, so that the batch script does not requeue it, then make its ranks save and stop."""
    write_atomically(folder.cancelled, f"{time.time():.0f} {SAVES_FIRST}\n")
    request_requeue(job)


def request_requeue(job: str) -> None:
    """Send the signal that Slurm sends before the time limit: ranks save and stop, and the script requeues the job."""
    call(["scancel", "--batch", "--signal=USR1", job])
    forget_answer()


def attach(argv: Sequence[str], *, environ: Mapping[str, str]) -> int:
    """Run a Slurm command on this terminal and return its exit code."""
    try:
        return subprocess.run(list(argv), env=dict(environ)).returncode
    except FileNotFoundError:
        raise NoSlurm(f"{argv[0]} is not installed here.", hint="Run this on a login node of your cluster.") from None
