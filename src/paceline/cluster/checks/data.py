"""Data seen from where one types: does it exist, how much is it, and what was left behind on the nodes."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.agent.staging.request import StagingRequest, check_exists, make_request
from paceline.cluster.checks.finding import GOOD, PROBLEM, Finding
from paceline.errors import ClusterError, PacelineError
from paceline.plan.environment.variables import SLURM_VARIABLES
from paceline.plan.launch_spec import data_settings
from paceline.plan.run_path import RunPath
from paceline.spec import Job

# Not `-m`: that would put the current folder, and whatever lies in it, ahead of the standard library.
PACELINE = "import sys; sys.path[:1] = filter(None, sys.path[:1]); from paceline.cli import main; main()"
PATIENCE = 300.0  # seconds for a node to be free and to answer


def staging_request(job: Job, *, scratch: Path, environ: Mapping[str, str]) -> StagingRequest:
    """What a job's agents would read."""
    return make_request(data_settings(job), base=scratch / job.project_name, environ=environ)


def check_data(job: Job, run_path: RunPath, environ: Mapping[str, str]) -> list[Finding]:
    """Whether all that is to be staged is there. Nothing is said about jobs that stage nothing."""
    if not data_settings(job):
        return []
    try:
        wish = staging_request(job, scratch=run_path.scratch, environ=environ)
        check_exists(wish)
    except PacelineError as problem:
        return [Finding("data", PROBLEM, problem.message, problem.hint)]
    return [Finding("data", GOOD, f"{len(wish.items)} paths to stage, {len(wish.collect)} to collect")]


def refuse_missing(job: Job, run_path: RunPath, environ: Mapping[str, str]) -> None:
    """The same for a run here, as an error."""
    check_exists(staging_request(job, scratch=run_path.scratch, environ=environ))


def on_node(node: str, words: Sequence[str]) -> int:
    """Type a paceline command on a node, by a small job of its own that shares the node with whoever is there."""
    if shutil.which("srun") is None:
        raise ClusterError("there is no srun here", hint="type this on a login node, or leave --node out")
    command = [
        "srun", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--time=10", "--quiet", "--export=ALL",
        "--job-name=paceline-clean", sys.executable, "-c", PACELINE, *words,
    ]  # fmt: skip
    # What Slurm set for a job around this one does not concern the new one.
    environ = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith("SLURM_") or name in SLURM_VARIABLES
    }
    try:
        return subprocess.run(command, env=environ, timeout=PATIENCE, stdin=subprocess.DEVNULL).returncode
    except subprocess.TimeoutExpired:
        raise ClusterError(
            f"node {node} gave no answer within {PATIENCE:.0f} s",
            hint=f"is it free? or type it there yourself: {shlex.join(['paceline', *words])}",
        ) from None
