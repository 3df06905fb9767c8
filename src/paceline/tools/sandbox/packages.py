"""The programs that a sandbox needs, and the Debian packages that provide them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from glob import glob

from paceline.errors import EnvironmentProblem
from paceline.tools.sandbox.settings import NAMESPACES, Settings

# Daemons are installed in folders that a user's PATH does not include.
SEARCH = "/usr/local/sbin:/usr/sbin:/sbin:/opt/slurm/sbin:/opt/slurm/bin"

ALWAYS = {"slurmctld": "slurmctld", "slurmd": "slurmd", "sinfo": "slurm-client", "munged": "munge"}
WITH_NAMESPACES = {
    "ip": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "mount",
}
WITH_ACCOUNTING = {
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
    "mariadb": "mariadb-client",
}

# Plugins that Debian and Ubuntu ship in separate packages.
PLUGINS = "/usr/lib/*/slurm-wlm"
BASIC_PLUGIN = ("select_cons_tres.so", "slurm-wlm-basic-plugins")
DATABASE_PLUGIN = ("accounting_storage_mysql.so", "slurm-wlm-mysql-plugin")


def search_path() -> str:
    return f"{os.environ.get('PATH', os.defpath)}:{SEARCH}"


def find(program: str) -> str | None:
    return shutil.which(program, path=search_path())


def program(name: str) -> str:
    """Return the path of a program that `require` has checked for."""
    found = find(name)
    if not found:
        raise EnvironmentProblem(
            f"{name} is not installed.", hint="Install it with `paceline sandbox up --install`."
        )
    return found


def missing_packages(settings: Settings, *, find: Callable[[str], str | None] = find) -> list[str]:
    """Return the packages that a sandbox with these settings still needs, sorted."""
    wanted = dict(ALWAYS)
    plugins = [BASIC_PLUGIN]
    if settings.network == NAMESPACES:
        wanted |= WITH_NAMESPACES
    if settings.accounting:
        wanted |= WITH_ACCOUNTING
        plugins.append(DATABASE_PLUGIN)
    missing = {package for name, package in wanted.items() if not find(name)}
    if find("dpkg"):
        missing |= {package for plugin, package in plugins if not glob(f"{PLUGINS}/{plugin}")}
    return sorted(missing)


def require(settings: Settings) -> None:
    """Raise an error that names the missing packages, if any."""
    if missing := missing_packages(settings):
        names = " ".join(missing)
        raise EnvironmentProblem(
            f"The sandbox needs these packages: {names}.",
            hint="As root on Debian or Ubuntu, run `paceline sandbox up --install`. Otherwise "
            f"install them, e.g. sudo apt-get install --no-install-recommends {names}",
        )


def install(settings: Settings) -> list[str]:
    """Install the missing packages and return their names. Works only as root, on Debian and its
    relatives.
    """
    missing = missing_packages(settings)
    apt = find("apt-get")
    if not missing or os.geteuid() != 0 or not apt:
        require(settings)
        return []
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for args in (["update", "-q"], ["install", "-y", "-q", "--no-install-recommends", *missing]):
        done = subprocess.run([apt, *args], env=quiet, text=True, capture_output=True)
        if done.returncode:
            output = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
            raise EnvironmentProblem(
                f"apt-get {args[0]} failed:\n{output}",
                hint=f"Install {' '.join(missing)} yourself.",
            )
    return missing
