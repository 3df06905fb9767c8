"""The environment section of a batch script: variables, modules, a venv or conda environment, the user's own lines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath

from paceline.contract.quote import quote
from paceline.errors import SpecError
from paceline.spec import Job


def environment_path(job: Job, environ: Mapping[str, str]) -> str:
    """Return the folder of the venv or conda environment. Relative ones are the project's; conda takes a name too."""
    path = job.environment.path
    assert path is not None
    if job.environment.kind == "conda" and "/" not in path:
        if "CONDA_EXE" in environ:
            return str(PurePath(environ["CONDA_EXE"]).parent.parent / "envs" / path)
        if "MAMBA_ROOT_PREFIX" in environ:
            return str(PurePath(environ["MAMBA_ROOT_PREFIX"]) / "envs" / path)
        raise SpecError(
            f"{job.source('environment.path')} is {path!r}, a conda environment's name, but conda is not set up here.",
            hint="Give the environment's folder instead; `conda env list` shows it.",
        )
    if path == "~" or path.startswith("~/"):
        path = environ.get("HOME", "~") + path[1:]
    return str(job.folder / path)


def activation_lines(job: Job, environ: Mapping[str, str]) -> list[str]:
    """Return the lines that activate the venv or conda environment; none for the current Python and containers."""
    if job.environment.kind == "venv":
        path = environment_path(job, environ)
        activate = quote(f"{path}/bin/activate")
        return [f"source {activate} || paceline_fail {quote(f'There is no venv in {path}.')}"]
    if job.environment.kind == "conda":
        return [
            "# What `conda activate` does, without conda on the node.",
            f"export CONDA_PREFIX={quote(environment_path(job, environ))}",
            'export CONDA_DEFAULT_ENV="$CONDA_PREFIX"',
            'export PATH="$CONDA_PREFIX/bin:$PATH"',
            'for hook in "$CONDA_PREFIX"/etc/conda/activate.d/*.sh; do',
            '    if [ -r "$hook" ]; then source "$hook"; fi',
            "done",
        ]
    return []


def interpreter(job: Job, environ: Mapping[str, str], current: str) -> str:
    """Return the Python that agents and ranks run on; `current` is the one that runs this."""
    environment = job.environment
    if environment.python is not None:
        return environment.python
    if environment.kind in ("venv", "conda"):
        return f"{environment_path(job, environ)}/bin/python"
    return "python3" if environment.kind == "container" else current
