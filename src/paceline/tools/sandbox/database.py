"""The database server of a sandbox's accounting: not run by root, in a folder that only its user
can enter.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import EnvironmentProblem
from paceline.tools.sandbox import configuration
from paceline.tools.sandbox.packages import program
from paceline.tools.sandbox.settings import SandboxRecord

SERVER_USERS = ("mysql", "mariadb", "nobody")  # for root: the first of them that exists


def make_folder() -> str:
    """Make the folder of a new database. It may not lie in the sandbox's: root's is closed to the
    server's user.
    """
    folder = tempfile.mkdtemp(prefix="paceline-database-")
    server = _server_user()
    os.chown(folder, server.pw_uid, server.pw_gid)
    return folder


def remove_folder(record: SandboxRecord) -> None:
    if record.database:
        shutil.rmtree(record.database, ignore_errors=True)


def install(record: SandboxRecord, *, owner: str, environment: dict[str, str]) -> None:
    """Write the server's settings and its own tables. Its administrator is `owner`, known by their
    Unix account.
    """
    server = _server_user()
    settings = _settings(record)
    settings.write_text(configuration.database_conf(record, user=server.pw_name))
    os.chown(settings, server.pw_uid, server.pw_gid)
    made = subprocess.run(
        [
            program("mariadb-install-db"),
            f"--defaults-file={settings}",
            "--skip-test-db",
            "--auth-root-authentication-method=socket",
            f"--auth-root-socket-user={owner}",
        ],
        env=environment,
        text=True,
        capture_output=True,
    )
    if made.returncode:
        output = "\n".join((made.stdout + made.stderr).strip().splitlines()[-8:])
        raise EnvironmentProblem(f"mariadb-install-db failed:\n{output}")


def command(record: SandboxRecord) -> list[str]:
    return [program("mariadbd"), f"--defaults-file={_settings(record)}"]


def statements(password: str) -> str:
    """Return what creates the account of slurmdbd."""
    return (
        "create database slurm_acct_db;"
        f"create user slurm@localhost identified by '{password}';"
        "grant all on slurm_acct_db.* to slurm@localhost;"
    )


@dataclass(frozen=True)
class Administrator:
    record: SandboxRecord
    user: str
    environment: dict[str, str]

    def run(self, statements: str) -> bool:
        """Run statements, and return whether they succeeded. They may hold a password, so they are
        not arguments.
        """
        options = [
            "--no-defaults",
            f"--socket={self.record.database_socket}",
            f"--user={self.user}",
        ]
        done = subprocess.run(
            [program("mariadb"), *options],
            input=statements.encode(),
            env=self.environment,
            capture_output=True,
        )
        return done.returncode == 0


def _settings(record: SandboxRecord) -> Path:
    return Path(record.database) / "mariadb.cnf"


def _server_user() -> pwd.struct_passwd:
    """Return the account that the server runs as: your own, or one without privileges if you are
    root.
    """
    if os.geteuid() != 0:
        return pwd.getpwuid(os.geteuid())
    for name in SERVER_USERS:
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise EnvironmentProblem(
        "The accounting database must not run as root, and no other account is available.",
        hint="Create an account called mysql.",
    )
