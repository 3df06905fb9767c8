"""The environment section of a batch script: variables, modules, a venv or conda environment, the user's own lines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath

from paceline.contract.quote import quote
from paceline.errors import SpecError
from paceline.slurm.batch_script import ModuleSection
from paceline.spec import Job
from paceline.spec.job_tables import Environment


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


# Where `module` and its files are. Sites differ, and a batch shell reads no profile.
_LOCATIONS = ("MODULEPATH", "MODULESHOME", "LMOD_PKG", "LMOD_CMD", "LMOD_DIR", "LMOD_ROOT")

# What is loaded: without these the job could not unload what is still in the submitter's PATH.
_LOADED = re.compile(
    r"LOADEDMODULES|_LMFILES_|_ModuleTable\d+_|_ModuleTable_Sz_|__LMOD_REF_COUNT_\w+|LMOD_FAMILY_\w+|__MODULES_\w+"
)

_COMMAND = r"""# `module` is a shell function of the login shell; a batch shell has to define it first.
if ! command -v module >/dev/null; then
    for init in "${LMOD_PKG:-}/init/bash" "${MODULESHOME:-}/init/bash" /etc/profile.d/{lmod,z00_lmod,modules}.sh \
        /usr/share/{lmod/lmod,modules,Modules}/init/bash; do
        if [ -r "$init" ]; then source "$init"; break; fi
    done
fi
command -v module >/dev/null || paceline_fail "The job uses modules, but there is no 'module' command on $HOSTNAME."
"""


def purges(environment: Environment) -> bool:
    """A job that names its modules gets only those, unless it asks for more."""
    return bool(environment.modules) if environment.purge is None else environment.purge


def uses_modules(environment: Environment) -> bool:
    return bool(environment.modules or environment.module_paths or environment.purge)


def module_section(environment: Environment) -> ModuleSection:
    """Return `module purge`, `module use` and `module load`, where the job asks for them."""
    if not uses_modules(environment):
        return ModuleSection()
    purge = ["module purge"] if purges(environment) else []
    use = [f"module use {quote(path)}" for path in environment.module_paths]
    return ModuleSection(_COMMAND.splitlines(), [*purge, *use], environment.modules)


def module_variables(environment: Environment, environ: Mapping[str, str]) -> dict[str, str]:
    """Return what a job must know about the submitter's modules: where they are, and what there is to purge."""
    if not uses_modules(environment) and environment.kind != "current":
        return {}
    # If nothing is purged, and the variables of loaded modules stay behind, the job must not take them for loaded.
    loaded = environment.kind == "current" or purges(environment)
    return {
        name: text
        for name, text in environ.items()
        if text and (name in _LOCATIONS or (loaded and _LOADED.fullmatch(name)))
    }
