"""`paceline data push`: real rsync over a real sshd."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from paceline.ssh.rsync import find_data
from tests.remote.lab import Lab
from tests.remote.test_forward import _without, start

# those that rsync does not send
LINKS = ["around", "outside", "sub/deep/top", "sub/dotted", "sub/out"]
Laptop = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def images(project: Path) -> Path:
    folder = project / "my images"
    for name in ("a.bin", "sub/it's $(touch injected) [x].bin", "sub/new\nline.bin", "empty/.keep"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    (folder / ".env").write_text("TOKEN=x\n")
    (folder / "sub" / "key[1].pem").write_text("x")
    (folder / "sub" / "key1.pem.txt").write_text("harmless")
    (folder / "inside").symlink_to("a.bin")
    (folder / "outside").symlink_to("/etc/passwd")
    (folder / "sub" / "deep").mkdir()
    (folder / "sub" / "deep" / "up").symlink_to("../../a.bin")
    # rsync does not send these three, wherever they lead
    (folder / "sub" / "deep" / "top").symlink_to("../..")
    (folder / "around").symlink_to("sub/../a.bin")
    (folder / "sub" / "dotted").symlink_to("./../a.bin")
    (folder / "sub" / "out").symlink_to("../../a.bin")
    (folder / ".paceline-partial").mkdir()
    (folder / ".paceline-partial" / "a.bin").write_text("half")
    return folder


@pytest.fixture
def there(lab: Lab, laptop: Laptop) -> Iterator[Path]:
    """The project's folder on the cluster, with the laptop logged in."""
    laptop("login", "plain", check=True)
    folder = lab.home / "paceline" / "project"
    yield folder
    shutil.rmtree(lab.home / "paceline", ignore_errors=True)


def names(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if not path.is_dir() or path.is_symlink()
    }


def test_a_folder_is_sent_without_secrets(
    lab: Lab, laptop: Laptop, images: Path, there: Path
) -> None:
    done = laptop("data", "push", "my images", "--on", "plain")
    assert done.returncode == 2
    assert "Add --yes" in done.stderr
    assert not (there / "my images").exists()
    done = laptop("data", "push", "my images", "--yes", "--on", "plain", check=True)
    assert f"7 files, 74 bytes, to plain:{there}/my images" in done.stderr
    assert "secrets, not sent: .env, sub/key[1].pem" in done.stderr
    assert (
        "links that point outside, not sent: around, outside, sub/deep/top, sub/dotted, sub/out"
        in done.stderr
    )
    sent = names(there / "my images")
    assert sent == names(images) - {".env", "sub/key[1].pem", ".paceline-partial/a.bin", *LINKS}
    assert len(sent) == 7
    assert (there / "my images" / "sub" / "key1.pem.txt").read_text() == "harmless"
    assert os.readlink(there / "my images" / "inside") == "a.bin"
    assert not list(lab.home.rglob("injected"))
    assert f"sent 7 files, 74 bytes, to plain:{there}/my images\n" in done.stdout
    # there is nothing to ask
    done = laptop("data", "push", "my images", "--on", "plain", check=True)
    assert f"nothing to send: plain:{there}/my images is up to date\n" in done.stdout
    (images / "a.bin").write_text("newer content")
    done = laptop(
        "data", "push", "my images/", "--yes", "--on", "plain", "--to", "my images", check=True
    )
    assert "new or changed: 1 file, 13 bytes\n" in done.stderr
    assert "sent 1 file, 13 bytes, to plain:" in done.stdout
    assert (there / "my images" / "a.bin").read_text() == "newer content"
    assert names(there / "my images") == sent
    laptop(
        "data",
        "push",
        "my images/a.bin",
        "--yes",
        "--on",
        "plain",
        "--to",
        f"{lab.home}/paceline/",
        check=True,
    )
    assert (lab.home / "paceline" / "a.bin").read_text() == "newer content"
    lab.wait_until_idle()


def test_it_asks_in_a_terminal(
    lab: Lab, laptop: Laptop, project: Path, images: Path, there: Path
) -> None:
    for answer, exists in ((b"n\n", False), (b"y\n", True)):
        child, terminal = pty.fork()
        if child == 0:
            os.chdir(project)
            argv = [sys.executable, "-m", "paceline", "data", "push", "my images", "--on", "plain"]
            os.execve(sys.executable, argv, {**os.environ, **lab.variables})
        seen = b""
        while b"Send it? [y/N]" not in seen:
            seen += os.read(terminal, 4096)
        assert b"my images: 7 files" in b" ".join(seen.split())  # a terminal wraps it
        os.write(terminal, answer)
        with suppress(OSError):  # the terminal is gone once the command is
            while os.read(terminal, 4096):
                pass
        os.waitpid(child, 0)
        os.close(terminal)
        assert (there / "my images").exists() == exists


@pytest.mark.slow
def test_a_connection_that_is_cut(lab: Lab, laptop: Laptop, project: Path, there: Path) -> None:
    """The same command goes on where the first one was cut off."""
    content = os.urandom(1 << 20) * 200
    (project / "huge.bin").write_bytes(content)
    with start(
        lab,
        "data",
        "push",
        "huge.bin",
        "--yes",
        "--on",
        "plain",
        cwd=project,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        while process.poll() is None and not any(
            path.stat().st_size > 20 << 20 for path in there.glob(".huge.bin.*")
        ):
            time.sleep(0.01)
        for line in lab.processes():
            if lab.service in line:  # the connection itself; rsync notices that it is gone
                os.kill(int(line.split()[0]), signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1, errors
    assert "The connection to plain was lost" in errors
    assert not (there / "huge.bin").exists()
    lab.wait_until_empty()
    assert (there / ".paceline-partial" / "huge.bin").stat().st_size > 20 << 20
    laptop("login", "--close")
    laptop("login", "plain", check=True)
    laptop("data", "push", "huge.bin", "--yes", "--on", "plain", check=True)
    assert (there / "huge.bin").read_bytes() == content
    assert os.listdir(there) == ["huge.bin"]


def test_mistakes_are_named(
    lab: Lab, laptop: Laptop, project: Path, images: Path, there: Path
) -> None:
    done = laptop("data", "push", "my images")
    assert done.returncode == 2
    assert "`paceline data push` needs a cluster" in done.stderr
    assert "no file or folder" in laptop("data", "push", "nothing", "--on", "plain").stderr
    assert (
        "looks like a file of secrets"
        in laptop("data", "push", "my images/.env", "--on", "plain", "--yes").stderr
    )
    done = laptop("data", "push", "my images", "--on", "plain", "--yes", "--to", "/proc/nowhere/x")
    assert "/proc/nowhere" in done.stderr
    done = laptop("data", "push", "my images", "--on", "plain", "--yes", "--to", "/dev/full/x")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    for args in (["~nosuch-user/x"], ["my images", "--to", "~nosuch-user/x"]):
        done = laptop("data", "push", *args, "--on", "plain", "--yes")
        assert (done.returncode, "there is no user 'nosuch-user'" in done.stderr) == (2, True), (
            done.stderr
        )


def test_a_full_disk_is_named(lab: Lab, laptop: Laptop, project: Path, there: Path) -> None:
    disk = lab.folder / "small"
    disk.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m,mode=777", "none", str(disk)], check=True
    )
    try:
        (project / "large.bin").write_bytes(os.urandom(3 << 20))
        done = laptop(
            "data", "push", "large.bin", "--on", "plain", "--yes", "--to", f"{disk}/large.bin"
        )
        assert " free, but the data needs " in done.stderr
        (disk / "large.bin").touch()  # something is there, so less may be needed
        os.utime(disk / "large.bin", (0, 0))
        (disk / "large.bin").chmod(0o666)
        done = laptop(
            "data", "push", "large.bin", "--on", "plain", "--yes", "--to", f"{disk}/large.bin"
        )
        assert done.returncode == 1
        assert "The disk on plain is full" in done.stderr
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_what_is_sent(images: Path) -> None:
    found = find_data(images)
    assert (len(found.names), sorted(found.secrets)) == (7, [".env", "sub/key[1].pem"])
    assert sorted(found.outside) == LINKS


def test_the_content_of_a_link_is_sent(
    project: Path, lab: Lab, laptop: Laptop, there: Path
) -> None:
    (project / "real.bin").write_text("content")
    (project / "link.bin").symlink_to("real.bin")
    (project / "gone.bin").symlink_to("nowhere")
    laptop("data", "push", "link.bin", "--yes", "--on", "plain", check=True)
    assert not (there / "link.bin").is_symlink()
    assert (there / "link.bin").read_text() == "content"
    (project / "imagenet-2012").mkdir()
    (project / "imagenet-2012" / "a.bin").write_text("image")
    (project / "data").symlink_to("imagenet-2012")
    done = laptop("data", "push", "data", "--yes", "--on", "plain", check=True)
    assert f"sent 1 file, 5 bytes, to plain:{there}/data\n" in done.stdout
    # where `stage` looks for what has these names here
    assert names(there) == {"link.bin", "data/a.bin"}
    assert (
        "no file or folder" in laptop("data", "push", "gone.bin", "--yes", "--on", "plain").stderr
    )


def test_newer_files_and_links_there_are_kept(
    lab: Lab, laptop: Laptop, project: Path, there: Path
) -> None:
    for name in ("labels.csv", "notes.txt", "train/1.png"):
        (project / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        (project / "images" / name).write_text("mine")
        os.utime(project / "images" / name, (1_600_000_000,) * 2)
    lab.on_node(
        f"mkdir -p {there}/images/disk; cd {there}/images; echo corrected >labels.csv; ln -s disk train"
    )
    lab.on_node(
        f"echo older >{there}/images/notes.txt; touch -d 2001-01-01 {there}/images/notes.txt"
    )
    done = laptop("data", "push", "images", "--yes", "--on", "plain", check=True)
    assert "1 newer on the cluster, not overwritten: labels.csv\n" in done.stderr
    assert (there / "images" / "labels.csv").read_text() == "corrected\n"
    assert (there / "images" / "notes.txt").read_text() == "mine"
    assert os.readlink(there / "images" / "train") == "disk"
    assert (there / "images" / "disk" / "1.png").read_text() == "mine"


def test_without_rsync_data_comes_by_tar(
    lab: Lab, laptop: Laptop, images: Path, there: Path
) -> None:
    folder = images.parent.parent / "bin"
    folder.mkdir()
    (folder / "tar").symlink_to(shutil.which("tar") or "")
    path = f"{lab.bin}:{folder}:{_without('rsync')}"
    laptop("data", "push", "my images", "--on", "plain", "--yes", check=True, PATH=path)
    left = {".env", "sub/key[1].pem", ".paceline-partial/a.bin", *LINKS}
    assert names(there / "my images") == names(images) - left
    lab.wait_until_idle()


@pytest.mark.parametrize("user", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_host_is_an_ipv6_address(
    lab: Lab, laptop: Laptop, project: Path, there: Path, user: bool
) -> None:
    (project / "a.bin").write_text("content")
    host = f"{lab.user}@fe80::7" if user else "fe80::7"
    (project / "paceline.toml").write_text(f'[profiles.six]\nhost = "{host}"\n')
    with lab.link(lab.plain, "fe80::7"):
        laptop("login", "six", check=True)
        laptop("data", "push", "a.bin", "--yes", "--on", "six", check=True)
        laptop("login", "--close", "six", check=True)
    assert (there / "a.bin").read_text() == "content"
