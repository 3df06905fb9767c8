"""The image of a job in a container, looked at before queueing: it is there, and its Python answers."""

from __future__ import annotations

import re
from pathlib import Path

from paceline.cluster.checks.finding import GOOD, PROBLEM, WARNING, Finding
from paceline.cluster.environment.rehearsal import Tried
from paceline.plan.environment.container import image_path, is_fetched
from paceline.spec import Job

NO_ENGINE = 127  # the exit code of a shell that finds no program


def check_image(job: Job) -> Finding:
    image = image_path(job)
    if is_fetched(job):
        if job.environment.engine == "pyxis":
            return Finding("image", GOOD, f"{image} (fetched by pyxis)")
        return Finding(
            "image", WARNING, f"{image} is fetched by every node when the job starts: can they reach it?",
            "fetch it once: paceline env build",
        )  # fmt: skip
    if not Path(image).exists():
        return Finding(
            "image", PROBLEM, f"there is no image {image}", f"check {job.source('environment.image')}"
        )
    return Finding("image", GOOD, image)


def can_be_asked(job: Job) -> bool:
    """Whether the image can be entered here: it is a file, and its engine is no part of srun."""
    return job.environment.engine != "pyxis" and not is_fetched(job)


def why_no_answer(job: Job, python: str, tried: Tried) -> Finding:
    """The container's Python was not reached, or said nothing."""
    why = "it took too long" if tried.code is None else tried.last_words
    if tried.code == NO_ENGINE and "neither apptainer nor singularity" in why:
        return Finding(
            "container", WARNING, f"{why.removeprefix('paceline: ')}: nobody has looked into the image",
            "where a module brings it, name it: modules in [environment]",
        )  # fmt: skip
    if re.search(rf'"{re.escape(python)}".*not found|stat {re.escape(python)}: no such file', why):
        return Finding(
            "python", PROBLEM, f"{image_path(job)} has no {python}",
            "say which it has: python in [environment]",
        )  # fmt: skip
    if "image format not recognized" in why:
        return Finding(
            "image", PROBLEM, f"{image_path(job)} is no image", f"check {job.source('environment.image')}"
        )
    return Finding("container", WARNING, f"{python} in {image_path(job)} gave no answer: {why}")
