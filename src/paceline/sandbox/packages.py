"""The programs that a sandbox is made of, and the Debian packages that bring them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from glob import glob

from paceline.errors import EnvironmentProblem
from paceline.sandbox.settings import NAMESPACES, Settings

# Daemons live where an ordinary user's PATH does not look.
SEARCH = "/usr/local/sbin:/usr/sbin:/sbin:/opt/slurm/sbin:/opt/slurm/bin"

ALWAYS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sinfo": "slurm-client",
    "munged": "munge",
}
WITH_NAMESPACES = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "mount": "mount"}
WITH_ACCOUNTING = {
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
    "mariadb": "mariadb-client",
}

# Plugins that Debian and Ubuntu cut off into packages of their own.
PLUGINS = "/usr/lib/*/slurm-wlm"
BASIC_PLUGIN = ("select_cons_tres.so", "slurm-wlm-basic-plugins")
DATABASE_PLUGIN = ("accounting_storage_mysql.so", "slurm-wlm-mysql-plugin")


def search_path() -> str:
    return f"{os.environ.get('PATH', os.defpath)}:{SEARCH}"


def find(program: str) -> str | None:
    return shutil.which(program, path=search_path())


def program(name: str) -> str:
    """Where a program is; `require` has seen to it that it is there."""
    found = find(name)
    if not found:
        raise EnvironmentProblem(f"{name} is not installed", hint="paceline sandbox up --install")
    return found


def missing_packages(settings: Settings, *, find: Callable[[str], str | None] = find) -> list[str]:
    """The packages to install before such a sandbox can be made, sorted."""
    wanted = dict(ALWAYS)
    plugins = [BASIC_PLUGIN]
    if settings.network == NAMESPACES:
        wanted |= WITH_NAMESPACES
    if settings.accounting:
        wanted |= WITH_ACCOUNTING
        plugins.append(DATABASE_PLUGIN)
    lacking = {package for name, package in wanted.items() if not find(name)}
    if find("dpkg"):
        lacking |= {package for plugin, package in plugins if not glob(f"{PLUGINS}/{plugin}")}
    return sorted(lacking)


def require(settings: Settings) -> None:
    """Raise unless everything is installed; the error names what is not."""
    lacking = missing_packages(settings)
    if lacking:
        names = " ".join(lacking)
        how = f"apt-get install --no-install-recommends {names}"
        if not find("apt-get"):
            how = "your distribution may call them otherwise"
        elif os.geteuid() == 0:
            how = f"paceline sandbox up --install (or: {how})"
        else:
            how = f"sudo {how}"
        raise EnvironmentProblem(f"these packages are missing for a sandbox: {names}", hint=how)


def install(settings: Settings) -> list[str]:
    """Install what is missing; what it was. Only as root, only on Debian and its kin."""
    lacking = missing_packages(settings)
    if not lacking:
        return []
    apt = find("apt-get")
    if os.geteuid() != 0 or not apt:
        raise EnvironmentProblem(
            f"these packages are missing for a sandbox: {' '.join(lacking)}",
            hint="--install works as root on Debian and Ubuntu; otherwise install them yourself",
        )
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (["update", "-q"], ["install", "-y", "-q", "--no-install-recommends", *lacking]):
        done = subprocess.run([apt, *words], env=quiet, text=True, capture_output=True)
        if done.returncode:
            told = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
            raise EnvironmentProblem(
                f"apt-get {words[0]} failed:\n{told}", hint=f"wanted: {' '.join(lacking)}"
            )
    return lacking
