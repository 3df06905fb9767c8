"""Slurm's commands: query, stop and cancel jobs.

Output is parsed by explicit field lists, not by column position. Queries say `--all`: without it,
Slurm leaves out hidden partitions and the jobs in them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence

from paceline.contract.foreign_records import read_bounded, read_objects
from paceline.contract.launcher_variables import slurm_query_environment
from paceline.contract.run_folder import SAVES_FIRST, RunFolder, write_atomically
from paceline.errors import ClusterError, NoAnswer, NoSlurm, NotConfigured
from paceline.slurm.answer_cache import forget_answer, remember_name

COMMAND_TIMEOUT = 60.0  # seconds; a busy controller responds slowly
JOBS_PER_CALL = 2000  # Linux limits one argument to 128 KiB
SEPARATOR = "\x1f"  # never part of a name, a reason or a node list

Completed = subprocess.CompletedProcess[str]
_CHECK_CONTROLLER = (
    "Check the controller with `scontrol ping`; if it is a sandbox, with `paceline sandbox status`."
)

CONFIGURATION_FILES = (
    "/etc/slurm/slurm.conf",
    "/etc/slurm-llnl/slurm.conf",
    "/run/slurm/conf/slurm.conf",
)


def available() -> bool:
    return shutil.which("sbatch") is not None


def configured() -> bool:
    """Return whether this machine belongs to a Slurm: its programs alone may be installed
    anywhere.
    """
    if not available():
        return False
    if _has_configuration_file():
        return True
    try:  # its configuration may lie elsewhere, or come from the controller
        return "slurmctld" in call(["scontrol", "ping"], check=False).stdout.lower()
    except ClusterError:
        return False


def require_configured() -> None:
    """Raise an error if this machine belongs to no Slurm: a command on the user's terminal says
    that in many lines.
    """
    if available() and not _has_configuration_file():
        call(["scontrol", "ping"], check=False)


def _has_configuration_file() -> bool:
    return any(
        path and os.path.isfile(path)
        for path in (os.environ.get("SLURM_CONF"), *CONFIGURATION_FILES)
    )


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
    argv: Sequence[str],
    *,
    environ: Mapping[str, str] | None = None,
    check: bool = True,
    text: str = "",
) -> Completed:
    """Run a Slurm command and return its result. The user's `SQUEUE_*` variables and the like do
    not change it.
    """
    variables = slurm_query_environment(environ if environ is not None else os.environ)
    if (file := variables.get("SLURM_CONF")) and not os.path.exists(file) and shutil.which(argv[0]):
        raise NotConfigured(  # at once: Slurm's commands look for it for a minute
            f"SLURM_CONF names {file}, which does not exist.",
            hint="Type `unset SLURM_CONF`, or start the sandbox that it belongs to: paceline "
            "sandbox up",
        )
    try:
        done = subprocess.run(
            list(argv),
            env=variables,
            input=text,
            text=True,
            capture_output=True,
            timeout=COMMAND_TIMEOUT,
            errors="replace",
        )
    except FileNotFoundError:
        raise NoSlurm(
            f"{argv[0]} is not installed here.",
            hint="Run this on a login node of your cluster, or start a local Slurm with `paceline "
            "sandbox up`.",
        ) from None
    except subprocess.TimeoutExpired:
        raise NoAnswer(
            f"{argv[0]} did not respond within {COMMAND_TIMEOUT:.0f} s.", hint=_CHECK_CONTROLLER
        ) from None
    if done.returncode and "configuration source" in done.stderr:
        raise NotConfigured(
            "Slurm is installed here, but not configured.",
            hint='If you have started a sandbox, type `eval "$(paceline sandbox env)"` in this '
            "terminal; if not, set"
            " SLURM_CONF, or run this on a login node of your cluster.",
        )
    if check and done.returncode:
        raise ClusterError(f"{argv[0]} failed: {error_text(done)}.", hint=_CHECK_CONTROLLER)
    return done


def error_text(done: Completed) -> str:
    """Return a command's error messages as one line, without the command name that prefixes
    them.
    """
    lines = [
        re.sub(r"^\w+: (error: |fatal: )?", "", line) for line in done.stderr.strip().splitlines()
    ]
    return "; ".join(line for line in lines if line) or f"exit code {done.returncode}"


def version() -> str:
    """Return what `sinfo` says about its version, such as "slurm 24.11.5"."""
    return call(["sinfo", "--version"], check=False).stdout.strip()


def read_job_id(folder: RunFolder) -> str | None:
    """Return the id of the run's newest job, or None if the run was never submitted."""
    try:
        text = read_bounded(f"{folder.path}/job", 100).decode().strip()
    except (OSError, ValueError):
        return None
    return text if re.fullmatch(r"\d+(_\d+)?", text) else None


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


# -- cancelling
# ----------------------------------------------------------------------------------------


def cancel(folder: RunFolder, job: str) -> None:
    """Mark the run as cancelled, so that it is not requeued, then cancel its job."""
    write_atomically(folder.cancelled, f"{time.time():.0f}\n")
    cancel_jobs([job])


def cancel_jobs(jobs: Sequence[str]) -> None:
    """Cancel the jobs of runs that are already marked as cancelled. Jobs that have ended are
    fine.
    """
    for start in range(0, len(jobs), JOBS_PER_CALL):
        done = call(["scancel", *jobs[start : start + JOBS_PER_CALL]], check=False)
        if done.returncode and not re.search("Invalid job id|already complet", done.stderr):
            raise ClusterError(
                f"scancel failed: {error_text(done)}.",
                hint="Run it again. The run is marked as cancelled and will not be requeued.",
            )
    forget_answer()


def request_stop(folder: RunFolder, job: str) -> None:
    """Mark the run as cancelled, so that the batch script does not requeue it, then make its ranks
    save and stop.
    """
    write_atomically(folder.cancelled, f"{time.time():.0f} {SAVES_FIRST}\n")
    request_requeue(job)


def request_requeue(job: str) -> None:
    """Send the signal that Slurm sends before the time limit: ranks save and stop, and the script
    requeues the job.
    """
    call(["scancel", "--batch", "--signal=USR1", job])
    forget_answer()


def attach(argv: Sequence[str], *, environ: Mapping[str, str]) -> int:
    """Run a Slurm command on this terminal and return its exit code."""
    try:
        return subprocess.run(list(argv), env=dict(environ)).returncode
    except FileNotFoundError:
        raise NoSlurm(
            f"{argv[0]} is not installed here.", hint="Run this on a login node of your cluster."
        ) from None
