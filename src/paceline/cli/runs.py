"""How verbs find the runs that they are about."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from paceline.cluster.runs import folder as folders
from paceline.contract.run_folder import RunFolder
from paceline.spec import Program, load_job

Run = Annotated[str, typer.Argument(metavar="RUN", help="A run's id, the end of it, its folder, or `last`.")]


def scratch_here() -> Path:
    """The scratch folder that a run started from here would use."""
    return folders.resolve_scratch(load_job(Program("")), os.environ)


def named(name: str) -> RunFolder:
    return folders.find_run(name, scratch_here())
