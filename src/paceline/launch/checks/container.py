"""Check a container's image before queueing: it is there, and its Python runs."""

from __future__ import annotations

import re
from pathlib import Path

from paceline.contract.findings import GOOD, PROBLEM, WARNING, Finding
from paceline.launch.checks.access import describe_closed, find_closed, hint_for
from paceline.launch.environment.container import NO_ENGINE, image_path, is_fetched
from paceline.launch.environment.probe import ProbeResult
from paceline.spec import Job


def check_image(job: Job) -> Finding:
    image = image_path(job)
    if is_fetched(job):
        if job.environment.engine == "pyxis":
            return Finding("image", GOOD, f"{image} (fetched by pyxis)")
        return Finding(
            "image",
            WARNING,
            f"Every node fetches {image} when the job starts: can they reach it?",
            "Fetch it once: paceline env build",
        )
    if (closed := find_closed(Path(image))) is not None:
        text = describe_closed(closed, image, job.source("environment.image"))
        return Finding("image", PROBLEM, text, hint_for("image", "environment"))
    if not Path(image).exists():
        return Finding(
            "image",
            PROBLEM,
            f"There is no image {image}.",
            f"Check {job.source('environment.image')}.",
        )
    return Finding("image", GOOD, image)


def can_probe(job: Job) -> bool:
    """Return whether the image can be entered here: it is a file, and its engine is not part of
    srun.
    """
    return job.environment.engine != "pyxis" and not is_fetched(job)


def explain_container(job: Job, python: str, result: ProbeResult) -> Finding:
    """Return why the container's Python could not be run, or printed nothing."""
    image = image_path(job)
    reason = "it took too long" if result.code is None else result.last_line
    if result.code == NO_ENGINE:
        return Finding(
            "container",
            WARNING,
            "There is neither apptainer nor singularity here, so the image is not checked.",
            "If a module provides it, add that to modules in [environment].",
        )
    if re.search(
        rf'"{re.escape(python)}".*not found|stat {re.escape(python)}: no such file', reason
    ):
        return Finding(
            "python",
            PROBLEM,
            f"{image} has no {python}.",
            "Name its Python: python in [environment]",
        )
    if "image format not recognized" in reason:
        return Finding(
            "image",
            PROBLEM,
            f"{image} is not an image.",
            f"Check {job.source('environment.image')}.",
        )
    return Finding("container", WARNING, f"{python} in {image} gave no answer: {reason}")
