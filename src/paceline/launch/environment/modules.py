"""Environment modules in a batch shell, Lmod's or environment-modules': found, purged, loaded, one line each."""

from __future__ import annotations

import re
from collections.abc import Mapping

from paceline.contract.quote import quote
from paceline.slurm.batch_script import ModuleSection
from paceline.spec.job_tables import Environment

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
