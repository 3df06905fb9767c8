"""The job: what was asked, from every layer, with the memory of who asked it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import SpecError
from paceline.spec.quantities import show_seconds
from paceline.spec.tables import (
    Checkpoint,
    Data,
    Environment,
    Launch,
    Project,
    Resources,
    Resume,
    Runtime,
    Tables,
    Tracking,
)

LEAST_GRACE = 60  # limits act on ticks of 30 s, and ranks need time to save
USUAL_GRACE = 120
COLLECT_GRACE = 60  # more where results are to come back from the nodes


@dataclass(frozen=True)
class Program:
    """The user's script (or module) and its arguments, untouched."""

    name: str
    args: tuple[str, ...] = ()
    is_module: bool = False


@dataclass(frozen=True)
class Job:
    """What was asked. `sources` tells where each key that was set comes from, by dotted name."""

    program: Program
    tables: Tables
    folder: Path  # the project's: that of its file, else of its repository, else the current one
    cwd: Path
    file: Path | None = None
    profile: str | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def project(self) -> Project:
        return self.tables.project

    @property
    def resources(self) -> Resources:
        return self.tables.job

    @property
    def environment(self) -> Environment:
        return self.tables.environment

    @property
    def launch(self) -> Launch:
        return self.tables.launch

    @property
    def runtime(self) -> Runtime:
        return self.tables.runtime

    @property
    def checkpoint(self) -> Checkpoint:
        return self.tables.checkpoint

    @property
    def resume(self) -> Resume:
        return self.tables.resume

    @property
    def data(self) -> Data:
        return self.tables.data

    @property
    def tracking(self) -> Tracking:
        return self.tables.tracking

    @property
    def params(self) -> dict[str, Any]:
        return self.tables.params

    @property
    def project_name(self) -> str:
        return self.project.name or self.folder.name or "project"

    @property
    def grace(self) -> int:
        """Seconds before the time limit at which the ranks are asked to save and stop."""
        if self.resume.grace is not None:
            return self.resume.grace
        limit = self.resources.time
        usual = USUAL_GRACE + (COLLECT_GRACE if self.data.collect else 0)
        return usual if limit is None else min(usual, limit // 3)

    def is_set(self, key: str) -> bool:
        """Whether a layer set this key ("job.time"), or it is the default."""
        return key in self.sources

    def is_typed(self, key: str) -> bool:
        """Whether a flag set this key."""
        return self.sources.get(key, "").startswith("--")

    def source(self, key: str) -> str:
        """Return what set a key, for messages: "--time", "job.time in /p/paceline.toml" or "job.time (default)"."""
        return self.sources.get(key, f"{key} (default)")


def check_agreement(job: Job) -> None:
    """Refuse values that are fine alone and impossible together."""
    _check_grace(job)
    environment, resources = job.environment, job.resources
    if environment.kind == "container" and environment.image is None and environment.base is None:
        raise SpecError(
            f'{job.source("environment.kind")} is "container", and there is no image',
            hint='set image in [environment], such as image = "/shared/images/torch.sif", or base to build one from',
        )
    buildable = environment.kind == "venv" and environment.requirements
    if environment.kind in ("venv", "conda") and environment.path is None and not buildable:
        raise SpecError(
            f'{job.source("environment.kind")} is "{environment.kind}", and there is no path',
            hint="set path in [environment] to the environment's folder"
            + (", or requirements to what it is built from" if environment.kind == "venv" else ""),
        )
    if resources.mem_per_gpu is not None and resources.mem_per_node is not None:
        raise SpecError(
            f"{job.source('job.mem_per_gpu')} and {job.source('job.mem_per_node')} both set the memory",
            hint="leave one of them out",
        )


def _check_grace(job: Job) -> None:
    grace, limit = job.resume.grace, job.resources.time
    if grace is None or limit is None or not job.resume.requeue:
        return
    if grace < LEAST_GRACE:
        raise SpecError(
            f"{job.source('resume.grace')} is {show_seconds(grace)}, expected at least {LEAST_GRACE} s",
            hint="time limits act on ticks of 30 s, and the ranks must finish a step and save: give them 2m",
        )
    if grace * 2 >= limit:
        raise SpecError(
            f"{job.source('resume.grace')} is {show_seconds(grace)}, and {job.source('job.time')} is"
            f" {show_seconds(limit)}: the grace must be less than half of the time",
            hint=f"ask for more than {show_seconds(grace * 2)}, shorten the grace, or set requeue = false in [resume]",
        )
