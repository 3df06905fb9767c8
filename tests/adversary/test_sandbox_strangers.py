"""Another user of this machine: they cannot run jobs in your sandbox as you, nor reach its accounting database."""

from __future__ import annotations

import os
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from paceline.errors import EnvironmentProblem
from paceline.tools.sandbox import PLAIN, Sandbox, Settings, missing_packages
from paceline.tools.sandbox.settings import SandboxPaths
from tests.adversary.second_user import (
    OWNER,
    STRANGER,
    call_as,
    needs_two_users,
    run_as,
    shared_folder,
)

pytestmark = [needs_two_users, pytest.mark.slurm]


def need(settings: Settings) -> None:
    if missing := missing_packages(settings):
        pytest.skip(f"no Slurm to test on: install {' '.join(missing)}")


@pytest.fixture(scope="module")
def box() -> Iterator[Path]:
    """The folder of a running sandbox of an ordinary user."""
    need(Settings(network=PLAIN))
    with shared_folder() as shared:
        folder = shared / "box"
        call_as(OWNER, lambda: up(folder))
        try:
            yield folder
        finally:
            call_as(OWNER, lambda: Sandbox(folder).down())


def up(folder: Path, *, accounting: bool = False) -> None:
    os.environ["HOME"] = "/"
    tempfile.tempdir = str(folder.parent)  # for locks, which would stay in /tmp
    Sandbox.up(folder, nodes=1, gpus=0, network=PLAIN, accounting=accounting)


def srun(user: int, box: Path) -> subprocess.CompletedProcess[str]:
    """Ask for a job as a user: it prints who it runs as. Without its settings, srun looks for them for a minute."""
    environment = {"PATH": os.environ["PATH"], "SLURM_CONF": str(box / "etc" / "slurm.conf")}
    return run_as(
        user,
        ["timeout", "5", "srun", "--immediate=20", "-n1", "id", "-u"],
        env=environment,
        cwd="/",
    )


def test_a_stranger_cannot_run_jobs_as_the_owner(box: Path) -> None:
    assert srun(OWNER, box).stdout.strip() == str(OWNER)
    refused = srun(STRANGER, box)
    assert refused.returncode != 0
    assert refused.stdout == ""


def test_the_folders_and_the_key_are_the_owners_alone(box: Path) -> None:
    for folder in (box, *SandboxPaths(box).created, box / "log"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder
    for path in ("etc/munge.key", "etc/slurm.conf", "run/munge.socket", "sandbox.json"):
        assert run_as(STRANGER, ["cat", str(box / path)]).returncode != 0, path
    key = (box / "etc" / "munge.key").stat()
    assert (key.st_uid, stat.S_IMODE(key.st_mode)) == (OWNER, 0o600)


def test_slurm_itself_refuses_a_stranger(box: Path) -> None:
    """A second wall, if somebody opens the folders."""
    folders = [box, box / "etc", box / "run"]
    for folder in folders:
        folder.chmod(0o755)
    try:
        refused = srun(STRANGER, box)
        assert refused.returncode != 0
        assert refused.stdout == ""
        assert "not permitted to use this partition" in refused.stderr
        assert srun(OWNER, box).stdout.strip() == str(OWNER)
    finally:
        for folder in folders:
            folder.chmod(0o700)


def test_a_folder_that_a_stranger_made_is_not_used() -> None:
    need(Settings(network=PLAIN))
    with shared_folder() as shared:
        folder = shared / "box"
        call_as(STRANGER, lambda: folder.mkdir(mode=0o777))

        def refuse() -> None:
            with pytest.raises(EnvironmentProblem, match="not your own folder"):
                up(folder)

        call_as(OWNER, refuse)
        assert not list(folder.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("owner", [0, OWNER], ids=["root", "user"])
def test_the_accounting_database_is_neither_open_nor_run_by_root(owner: int) -> None:
    need(Settings(network=PLAIN, accounting=True))
    with shared_folder() as shared:
        folder = shared / "box"
        call_as(owner, lambda: up(folder, accounting=True))
        try:
            sandbox = Sandbox(folder)
            server = psutil.Process(sandbox.record.processes["mariadbd"].pid)
            assert server.uids().effective != 0
            database = Path(sandbox.record.database)
            assert stat.S_IMODE(database.stat().st_mode) == 0o700
            connect = [
                "mariadb",
                "--no-defaults",
                f"--socket={sandbox.record.database_socket}",
                "--execute=select 1",
            ]
            assert run_as(STRANGER, [*connect, "--user=root"]).returncode != 0
            # and without the wall of the folder: the accounts ask who is there
            database.chmod(0o755)
            for name in ("root", "slurm", "daemon", "mysql", ""):
                attempt = run_as(STRANGER, [*connect, f"--user={name}"])
                assert "Access denied" in attempt.stderr, (
                    f"{name}: {attempt.stdout}{attempt.stderr}"
                )
            assert "StoragePass=slurm\n" not in (folder / "etc" / "slurmdbd.conf").read_text()
        finally:
            call_as(owner, lambda: Sandbox(folder).down())
        assert not database.exists()
