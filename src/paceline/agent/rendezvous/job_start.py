"""This agent's job start: its folder, and waiting there for the head agent's verdict."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from paceline.contract import env
from paceline.contract.run_folder import JobStartFolder, RunFolder

# seconds that an agent with an error waits for the head agent to end the run
VERDICT_TIMEOUT = 15.0


def job_start_folder(environ: Mapping[str, str]) -> JobStartFolder | None:
    """Return the folder that all agents of this job start share, or None if the environment names
    none.
    """
    if env.RUN in environ and env.JOB_START in environ:
        return RunFolder(Path(environ[env.RUN])).job_start(environ[env.JOB_START])
    return None


def await_verdict(
    job_start: JobStartFolder, interrupted: Callable[[], bool] = lambda: False
) -> None:
    """Wait for the verdict. If an agent exits before it, the scheduler may end the head agent
    too.
    """
    deadline = time.monotonic() + VERDICT_TIMEOUT
    while time.monotonic() < deadline and not job_start.verdict.exists() and not interrupted():
        time.sleep(0.2)
