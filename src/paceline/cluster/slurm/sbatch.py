"""sbatch: submit a job, or ask whether Slurm would accept it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence

from paceline.cluster.slurm.commands import Completed, call, error_text
from paceline.contract.run_folder import RunFolder, write_atomically
from paceline.errors import ClusterError, JobRejected
from paceline.plan.slurm.plan import SlurmPlan


def write_files(plan: SlurmPlan) -> None:
    """Write the batch script and its environment file into the run folder."""
    folder = plan.run_path.folder
    write_atomically(folder.environment, plan.environment_file, mode=0o600)
    write_atomically(folder.shell_library, plan.library)
    write_atomically(folder.script, plan.script)


def run_sbatch(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """Call sbatch and return the job id. Raise JobRejected with sbatch's message."""
    done = call(argv, environ=environ, check=False)
    if done.returncode:
        raise JobRejected(reason=error_text(done))
    # Take the last line that is an id: a site's wrapper around sbatch may print more.
    ids: list[str] = re.findall(r"^(\d+)(?:;.*)?$", done.stdout, re.MULTILINE)
    if not ids:
        raise ClusterError(
            f"sbatch did not print a job id; it printed: {done.stdout.strip() or 'nothing'}.",
            hint="Look for the job with `squeue --me --all`.",
        )
    return ids[-1]


def submit(plan: SlurmPlan) -> str:
    """Submit a run's script and record the job id in the run folder."""
    job = run_sbatch(plan.sbatch, plan.submitter)
    try:
        record_job(plan.run_path.folder, job)
    except BaseException:  # the run folder is removed on errors, and the job cannot run without it
        call(["scancel", job], environ=plan.submitter, check=False)
        raise
    return job


def record_job(folder: RunFolder, job: str) -> None:
    """Record the run's job id. The job does the same when it starts."""
    write_atomically(folder.job, f"{job}\n")
    line = json.dumps({"time": time.time(), "event": "queued", "job": job})
    with open(folder.events / "launch.jsonl", "a", encoding="utf-8") as events:
        events.write(line + "\n")


def test_only(plan: SlurmPlan) -> Completed:
    """Ask Slurm whether it would accept the job and when it would start, without submitting it."""
    return call(["sbatch", "--test-only", *plan.arguments], environ=plan.submitter, check=False, text=plan.script)
