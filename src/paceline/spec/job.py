"""A job: what the user asked for, and which file or flag set each key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import SpecError
from paceline.spec.job_tables import Environment, Launch, Project, Resources
from paceline.spec.settings import Site, Tables
from paceline.spec.training_tables import Resume, Runtime

DEFAULT_GRACE = 120
COLLECT_GRACE = 60  # extra time to copy results back from the nodes


@dataclass(frozen=True)
class Program:
    """The user's script or module, and its arguments exactly as typed."""

    name: str
    args: tuple[str, ...] = ()
    is_module: bool = False


@dataclass(frozen=True)
class Job:
    """What the user asked for. `sources` maps each key that was set ("job.time") to the flag or
    file that set it.
    """

    program: Program
    tables: Tables
    folder: Path  # of the project: where its file is, else its repository, else the current folder
    cwd: Path
    file: Path | None = None
    profile: str | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    site: Site = field(default_factory=Site)

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
    def resume(self) -> Resume:
        return self.tables.resume

    @property
    def project_name(self) -> str:
        return self.project.name or self.folder.name or "project"

    @property
    def grace(self) -> int:
        """How many seconds before the time limit the ranks save and stop."""
        if self.resume.grace is not None:
            return self.resume.grace
        limit = self.resources.time
        default = DEFAULT_GRACE + (COLLECT_GRACE if self.tables.data.collect else 0)
        # Slurm rounds a limit up to whole minutes.
        return default if limit is None else min(default, -(-limit // 60) * 20)

    def is_set(self, key: str) -> bool:
        """Whether a file or a flag set this key ("job.time")."""
        return key in self.sources

    def is_typed(self, key: str) -> bool:
        """Whether a flag set this key."""
        return self.sources.get(key, "").startswith("--")

    def source(self, key: str) -> str:
        """Return what set a key, for messages: "--time", "job.time in /p/paceline.toml" or
        "job.time (default)".
        """
        return self.sources.get(key, f"{key} (default)")


def check_consistency(job: Job) -> None:
    """Reject values that are valid alone but not together."""
    environment = job.environment
    if environment.kind == "container" and environment.image is None and environment.base is None:
        raise SpecError(
            f'{job.source("environment.kind")} is "container", but there is no image.',
            hint="Set --image (or image in [environment]), or --base-image to build one.",
        )
    buildable = environment.kind == "venv" and environment.requirements
    if environment.kind in ("venv", "conda") and environment.path is None and not buildable:
        or_build = ", or requirements to build it from" if environment.kind == "venv" else ""
        raise SpecError(
            f'{job.source("environment.kind")} is "{environment.kind}", but there is no path.',
            hint=f"Set --{environment.kind} (or path in [environment]) to the environment's "
            f"folder{or_build}.",
        )
