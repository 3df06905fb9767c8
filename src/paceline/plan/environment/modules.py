"""Environment modules in a batch shell, Lmod's or environment-modules': found, purged, loaded, each step in sight."""

from __future__ import annotations

import re
from collections.abc import Mapping

from paceline.plan.quote import quote
from paceline.spec.tables import Environment

# Where `module` and its files are. Sites differ, and a batch shell reads no profile.
_PLACES = ("MODULEPATH", "MODULESHOME", "LMOD_PKG", "LMOD_CMD", "LMOD_DIR", "LMOD_ROOT")

# What is loaded: without these the job could not unload what the submitter's PATH still holds.
_LOADED = re.compile(
    r"LOADEDMODULES|_LMFILES_|_ModuleTable\d+_|_ModuleTable_Sz_|__LMOD_REF_COUNT_\w+|LMOD_FAMILY_\w+|__MODULES_\w+"
)

_COMMAND = r"""# `module` is a function of the login shell; a batch shell has to fetch it.
if ! command -v module >/dev/null; then
    for init in "${LMOD_PKG:-}/init/bash" "${MODULESHOME:-}/init/bash" /etc/profile.d/{lmod,z00_lmod,modules}.sh \
        /usr/share/{lmod/lmod,modules,Modules}/init/bash; do
        # shellcheck disable=SC1090
        if [ -r "$init" ]; then source "$init"; break; fi
    done
fi
command -v module >/dev/null || fail "modules are asked for, but there is no 'module' command on $HOSTNAME"
"""


def purges(environment: Environment) -> bool:
    """A job that names its modules is to have those alone, unless it says otherwise."""
    return bool(environment.modules) if environment.purge is None else environment.purge


def uses_modules(environment: Environment) -> bool:
    return bool(environment.modules or environment.module_paths or environment.purge)


def module_lines(environment: Environment) -> list[str]:
    """`module purge`, `module use` and `module load`, where the job asks for them."""
    if not uses_modules(environment):
        return []
    lines = _COMMAND.splitlines()
    if purges(environment):
        lines.append("module purge")
    for path in environment.module_paths:
        lines.append(f"module use {quote(path)}")
    for name in environment.modules:
        lines.append(f"module load {quote(name)} || fail {quote(load_failure(name))}")
    return lines


def load_failure(name: str) -> str:
    """What the script says of a module that it cannot load; the check before queueing knows it by this."""
    return f"module load {name} failed"


def failed_module(refusal: str) -> str | None:
    """The module that such words are about."""
    match = re.fullmatch(re.escape(load_failure("\0")).replace(re.escape("\0"), "(.*)"), refusal)
    return match[1] if match else None


def module_variables(environment: Environment, environ: Mapping[str, str]) -> dict[str, str]:
    """What a job must know of the submitter's modules: where they are, and what there is to purge."""
    if not uses_modules(environment) and environment.kind != "current":
        return {}
    # Where nothing is purged, and the variables of loaded modules stay behind, they must not pass for loaded.
    loaded = environment.kind == "current" or purges(environment)
    return {
        name: text
        for name, text in environ.items()
        if text and (name in _PLACES or (loaded and _LOADED.fullmatch(name)))
    }
