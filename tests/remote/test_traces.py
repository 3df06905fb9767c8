"""What stays after `paceline login --close`, on the login node and here: nothing that runs, no socket, no temporary file."""

from __future__ import annotations

import os
import pty
import pwd
import select
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.remote.lab import Lab
from tests.remote.relay import Relay
from tests.remote.test_links import masters

Laptop = Callable[..., subprocess.CompletedProcess[str]]
SHARED = ("/tmp", "/var/tmp", "/dev/shm", "/run")


def files_of(uid: int, *, besides: Path) -> set[str]:
    """Return the paths of a user's files in places that all users share."""
    paths = [
        path for place in SHARED for pattern in ("*", "*/*") for path in Path(place).glob(pattern)
    ]
    found = set()
    for path in paths:
        with suppress(OSError):
            if path.lstat().st_uid == uid and besides not in (path, *path.parents):
                found.add(os.path.realpath(path))
    return found


def sockets_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if stat.S_ISSOCK(path.lstat().st_mode)]


def test_nothing_is_left_after_the_connection_is_closed(
    lab: Lab, laptop: Laptop, project: Path
) -> None:
    (project / "train.py").write_text("print(1)\n")
    uid = pwd.getpwnam(lab.user).pw_uid
    before = files_of(uid, besides=lab.folder)  # an earlier user may have had this number
    cache = lab.home / ".cache" / "paceline"
    earlier = set(cache.rglob("*"))  # commands that other tests have killed leave something
    laptop("login", "lab", check=True)
    laptop("ps", "--on", "lab", check=True)
    laptop(
        "submit",
        "--on",
        "lab",
        "--dry-run",
        "--cpu",
        "--nproc",
        "1",
        "-t",
        "5",
        "train.py",
        check=True,
    )
    assert laptop("logs", "--on", "lab", "nothing").returncode == 2
    assert masters(lab)
    assert sockets_below(lab.folder / "run")
    laptop("login", "--close", check=True)
    lab.wait_until_empty()
    assert masters(lab) == []
    assert os.listdir(lab.folder / "run" / "paceline") == []
    assert sockets_below(lab.home) == []
    # The documentation names what stays: the cache, and the last answer of Slurm, which all commands of a user share.
    left = files_of(uid, besides=lab.folder) - before
    assert {path for path in left if not path.startswith(f"/dev/shm/paceline-{uid}")} == set()
    new = {path for path in cache.iterdir() if path not in earlier}
    assert {path.name for path in new if not path.name.startswith("paceline-")} <= {"code", "work"}
    assert not [path for path in cache.rglob("*.partial-*") if path not in earlier]


def test_a_connection_whose_process_was_killed(lab: Lab, laptop: Laptop) -> None:
    laptop("login", "plain", check=True)
    (master,) = masters(lab)
    master.send_signal(signal.SIGKILL)
    master.wait()
    done = laptop("ps", "--on", "plain")
    assert done.returncode == 1
    assert "You are not logged in to plain" in done.stderr
    laptop("login", "plain", check=True)
    laptop("ps", "--on", "plain", check=True)
    (master,) = masters(lab)
    master.send_signal(signal.SIGKILL)
    master.wait()
    assert "closed" in laptop("login", "--close", check=True).stderr
    assert os.listdir(lab.folder / "run" / "paceline") == []


def test_a_command_in_a_terminal_asks_nothing(lab: Lab, project: Path) -> None:
    """Neither in the terminal, nor through the program that asks in a window."""
    before = lab.prompted()
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(project)
        variables = {**os.environ, **lab.variables}
        del variables["SSH_ASKPASS_REQUIRE"]
        os.execve(
            sys.executable, [sys.executable, "-m", "paceline", "ps", "--on", "lab"], variables
        )
    shown = b""
    while select.select([terminal], [], [], 60)[0]:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # its end
            break
        shown += part
    _, status = os.waitpid(child, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 1
    assert b"You are not logged in to lab" in shown
    assert b"code" not in shown.replace(b"exit code", b"").lower()
    assert lab.prompted() == before


def test_nothing_is_sent_to_a_host_whose_key_has_changed(lab: Lab, laptop: Laptop) -> None:
    with lab.link(lab.codes) as relay:
        other = Path(f"{lab.plain.host_key}.pub").read_text()
        known = lab.folder / "changed_hosts"
        known.write_text(f"[127.0.0.1]:{lab.codes.port} {other}")
        entry = lab.folder / "links" / "link"
        entry.write_text(entry.read_text().replace(str(lab.known_hosts), str(known)))
        before = lab.prompted()
        done = laptop("login", "link")
        assert done.returncode == 1
        assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in done.stderr
        assert lab.prompted() == before  # no code, and no question whether to go on
        assert relay.connections == 1
        assert laptop("ps", "--on", "link").returncode == 1
        assert relay.connections == 1
    known.unlink()
    assert os.listdir(lab.folder / "run" / "paceline") == []


def test_a_link_that_is_cut_while_code_is_sent(
    lab: Lab, laptop: Laptop, project: Path, link: Relay
) -> None:
    (project / "train.py").write_text("print(1)\n")
    (project / "table.bin").write_bytes(os.urandom(3 << 20))
    submit = ("submit", "--on", "link", "--dry-run", "--cpu", "--nproc", "1", "-t", "5", "train.py")
    laptop("login", "link", check=True)
    laptop("ps", "--on", "link", check=True)
    link.cut_after(1 << 20)
    done = laptop(*submit)
    assert done.returncode == 1
    assert "You are not logged in to link" in done.stderr
    assert link.is_cut
    lab.wait_until_empty()
    link.restore()
    laptop("login", "link", check=True)
    again = laptop(*submit, check=True)
    assert "lost earlier" not in again.stderr  # nothing had been submitted
    code = lab.home / ".cache" / "paceline" / "code"
    found = [
        path.stat().st_size for path in code.glob("*/*/table.bin") if ".partial" not in str(path)
    ]
    assert found == [3 << 20]


@pytest.mark.slow
def test_a_full_disk_while_code_is_sent(lab: Lab, laptop: Laptop, project: Path) -> None:
    (project / "train.py").write_text("print(1)\n")
    (project / "table.bin").write_bytes(os.urandom(3 << 20))
    submit = (
        "submit",
        "--on",
        "plain",
        "--dry-run",
        "--cpu",
        "--nproc",
        "1",
        "-t",
        "5",
        "train.py",
    )
    laptop("login", "plain", check=True)
    laptop("ps", "--on", "plain", check=True)
    objects = lab.home / ".cache" / "paceline" / "code"
    subprocess.run(["rm", "-rf", str(objects)], check=True)
    objects.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,mode=777", "tmpfs", str(objects)], check=True
    )
    try:
        done = laptop(*submit)
    finally:
        subprocess.run(["umount", str(objects)], check=True)
        objects.rmdir()
    assert done.returncode == 1
    assert "Your code did not arrive on plain as it is here" in done.stderr
    laptop(*submit, check=True)
