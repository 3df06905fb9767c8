"""Check that the data a job stages exists."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from paceline.errors import PacelineError
from paceline.launch.launch_spec import data_settings
from paceline.spec.findings import GOOD, PROBLEM, Finding
from paceline.spec.job import Job
from paceline.spec.run_path import RunPath
from paceline.staging.request import StagingRequest, check_sources, make_request


def staging_request(job: Job, *, scratch: Path, environ: Mapping[str, str]) -> StagingRequest:
    """Return the request as the agents of a job would read it."""
    return make_request(data_settings(job), base=scratch / job.project_name, environ=environ)


def check_data(job: Job, run_path: RunPath, environ: Mapping[str, str]) -> list[Finding]:
    """Check that every path to stage exists. Jobs that stage nothing get no finding."""
    if not data_settings(job):
        return []
    try:
        request = staging_request(job, scratch=run_path.scratch, environ=environ)
        check_sources(request)
    except PacelineError as error:
        return [Finding("data", PROBLEM, error.message, error.hint)]
    return [
        Finding(
            "data", GOOD, f"{len(request.items)} paths to stage, {len(request.collect)} to collect"
        )
    ]


def require_data(job: Job, run_path: RunPath, environ: Mapping[str, str]) -> None:
    """Raise an error if a path to stage does not exist."""
    check_sources(staging_request(job, scratch=run_path.scratch, environ=environ))
