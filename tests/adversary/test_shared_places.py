"""Another user prepares pipes, links, files and folders under the names that we use in shared places."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.agent.health import heartbeat
from paceline.agent.health.heartbeat import Heartbeats
from paceline.contract.files import find_own_folder, make_own_folder, open_own_file, own_folder_name
from paceline.staging.cache import Lock
from paceline.staging.cleanup import make_private_folder
from paceline.tools.sandbox.network import allocation_lock
from tests.adversary.second_user import OWNER, STRANGER, call_as, needs_two_users, shared_folder

pytestmark = [needs_two_users, pytest.mark.timeout(30)]  # on most of these we used to wait for ever
OURS = f"paceline-{OWNER}"


@pytest.fixture
def shared() -> Iterator[Path]:
    with shared_folder() as path:
        yield path


def fifo(path: Path) -> None:
    os.mkfifo(path, 0o666)
    os.utime(path, (0, 0))


def link_to_a_secret(path: Path) -> None:
    path.symlink_to("/etc/shadow")


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def open_folder(path: Path) -> None:
    path.mkdir(mode=0o777)
    path.chmod(0o777)


def link_to_a_folder(path: Path) -> None:
    theirs = path.with_name("theirs")
    open_folder(theirs)
    path.symlink_to(theirs)


def their_file(path: Path) -> None:
    path.write_text("planted")
    path.chmod(0o666)


OBSTACLES = [fifo, link_to_a_secret, open_folder, link_to_a_folder, their_file]


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_our_folder_is_ours_whatever_has_its_name(
    shared: Path, obstacle: Callable[[Path], None]
) -> None:
    call_as(STRANGER, lambda: obstacle(shared / OURS))

    def use() -> None:
        made = make_own_folder(shared)
        status = made.lstat()
        assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (OWNER, 0o700)
        assert stat.S_ISDIR(status.st_mode)
        assert (
            make_own_folder(shared)
            == find_own_folder(shared)
            == make_private_folder(shared)
            == made
        )

    call_as(OWNER, use)


@pytest.mark.parametrize("obstacle", [fifo, link_to_a_secret, device, open_folder, their_file])
def test_only_our_own_files_are_opened(shared: Path, obstacle: Callable[[Path], None]) -> None:
    call_as(STRANGER, lambda: obstacle(shared / "name"))

    def use() -> None:
        for flags in (os.O_RDONLY, os.O_RDWR, os.O_WRONLY, os.O_RDWR | os.O_CREAT):
            with pytest.raises(OSError):
                open_own_file(shared / "name", flags)
        os.close(open_own_file(shared / "ours", os.O_RDWR | os.O_CREAT))
        assert stat.S_IMODE((shared / "ours").stat().st_mode) == 0o600

    call_as(OWNER, use)


def test_no_agent_waits_for_a_pipe_among_the_heartbeat_files(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def obstruct() -> None:
        for name in ("paceline-heartbeat-0", "heartbeat-0", OURS):
            fifo(shared / name)

    call_as(STRANGER, obstruct)

    def use() -> None:
        monkeypatch.setattr(heartbeat, "MEMORY", str(shared))
        monkeypatch.setattr(heartbeat.tempfile, "gettempdir", lambda: str(shared))
        first = Heartbeats(1)
        fifo(first.path.with_name("heartbeat-1"))  # even in our own folder
        second = Heartbeats(1)
        assert stat.S_IMODE(first.path.parent.stat().st_mode) == 0o700
        first.remove()
        assert second.path.exists()
        second.path.with_name("heartbeat-1").unlink()
        second.remove()
        assert not second.path.parent.exists()

    call_as(OWNER, use)


def test_locks_cannot_be_prepared_by_others(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def obstruct() -> None:
        fifo(shared / f"paceline-sandbox-{OWNER}.lock")
        open_folder(shared / OURS)
        fifo(shared / OURS / "sandbox.lock")

    call_as(STRANGER, obstruct)

    def use() -> None:
        monkeypatch.setattr("tempfile.gettempdir", lambda: str(shared))
        with allocation_lock():
            pass
        folder = make_private_folder(shared)
        assert Lock(folder / "key.lock").acquire(exclusive=True)
        fifo(folder / "other.lock")
        with pytest.raises(OSError, match="not a regular file"):
            Lock(folder / "other.lock").acquire(exclusive=True)

    call_as(OWNER, use)


def test_names_differ_between_users() -> None:
    names: set[str] = {own_folder_name()}

    def check() -> None:
        assert own_folder_name() == OURS
        assert own_folder_name() not in names

    call_as(OWNER, check)
