"""Paceline on the login node: complete or absent, whatever happens while it is installed."""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.contract.files.sent_code import SentCode
from paceline.ssh import paceline_bundle
from paceline.ssh.paceline_bundle import Target
from paceline.ssh.remote import entry, unpack
from paceline.ssh.remote.cache_cleanup import INTERVAL, is_damaged
from paceline.ssh.request import Request
from tests.remote.lab import Lab

Laptop = Callable[..., subprocess.CompletedProcess[str]]


def clear(lab: Lab) -> Path:
    cache = lab.home / ".cache"
    subprocess.run(["rm", "-rf", str(cache)], check=True)
    return cache / "paceline"


def test_two_laptops_at_once(lab: Lab, laptop: Laptop, project: Path) -> None:
    laptop("login", "plain", check=True)
    cache = clear(lab)
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "paceline", "ps", "--on", "plain", "--json"],
            cwd=project,
            text=True,
            env={**os.environ, **lab.variables, "XDG_CACHE_HOME": str(project / f"cache{number}")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for number in range(2)
    ]
    for process in started:
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        assert '"runs"' in output
    (installed,) = [path for path in cache.iterdir() if (path / unpack.COMPLETE).exists()]
    assert (installed / "paceline" / "cli" / "commands" / "ps.py").is_file()
    assert not list(cache.glob(".*"))


@pytest.mark.slow
def test_a_full_disk_leaves_nothing_behind(lab: Lab, laptop: Laptop) -> None:
    laptop("login", "plain", check=True)
    cache = clear(lab)
    cache.parent.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m,mode=777", "tmpfs", str(cache.parent)], check=True
    )
    try:
        done = laptop("ps", "--on", "plain")
        left = [path for path in cache.rglob("*") if path.is_file()]
    finally:
        subprocess.run(["umount", str(cache.parent)], check=True)
        cache.parent.rmdir()
    assert done.returncode == 1
    assert "Cannot install Paceline on plain: No space left on device" in done.stderr
    assert not left
    laptop("ps", "--on", "plain", check=True)


def test_a_python_that_is_too_old_is_explained(lab: Lab, laptop: Laptop, project: Path) -> None:
    old = lab.home / "old python"
    old.write_text(
        '#!/bin/sh\necho \'["/old/python3", [3, 9], "x86_64", "linux", ["glibc", "2.28"]]\'\n'
    )
    old.chmod(0o755)
    (project / "paceline.toml").write_text(
        '[profiles.plain]\nhost = "plain"\npython = "~/old python"\n'
    )
    laptop("login", "plain", check=True)
    done = laptop("ps", "--on", "plain")
    assert done.returncode == 1
    assert "needs Python 3.10 or newer on plain, and found /old/python3 (3.9)" in done.stderr
    assert 'setup = "module load python"' in done.stderr
    (project / "paceline.toml").write_text(
        '[profiles.plain]\nhost = "plain"\npython = "/no/such"\n'
    )
    assert "There is no Python '/no/such' on plain" in laptop("ps", "--on", "plain").stderr


def test_commands_of_the_profile_come_first(lab: Lab, laptop: Laptop, project: Path) -> None:
    """As `module load python` does; what they print is no part of the answer."""
    setup = "echo loading; PATH=$HOME/tools:$PATH; export SCRATCH=$HOME/big"
    profile = f'[profiles.plain]\nhost = "plain"\nsetup = "{setup}"\npython = "my-python"\n'
    (project / "paceline.toml").write_text(profile)
    (lab.home / "tools").mkdir(exist_ok=True)
    tool = lab.home / "tools" / "my-python"
    tool.unlink(missing_ok=True)
    tool.symlink_to("/usr/bin/python3")
    laptop("login", "plain", check=True)
    done = laptop("ps", "--on", "plain", "--json", check=True)
    assert f'"{lab.home}/big/paceline"' in done.stdout
    assert "loading" not in done.stdout
    news = "paceline: `setup` of plain printed:\n  loading\n"
    assert done.stderr.endswith(news), "it is new"
    assert not laptop("ps", "--on", "plain", "--json", check=True).stderr, "it is not new any more"
    failed = laptop("logs", "--on", "plain", "nothing")
    assert failed.stderr.endswith(news), "it may say why the command has failed"
    (project / "paceline.toml").write_text(profile.replace("echo loading", "echo done"))
    assert "printed:\n  done\n" in laptop("ps", "--on", "plain", check=True).stderr


@pytest.mark.parametrize(
    ("commands", "code", "said"),
    [
        ("echo first; no-such-command --x", 127, "no-such-command: not found"),
        pytest.param("echo ready\nexit 3", 3, "ready", marks=pytest.mark.slow),
        pytest.param("echo 'never closed", 2, "Unterminated quoted string", marks=pytest.mark.slow),
    ],
)
def test_commands_of_the_profile_that_fail(
    request: pytest.FixtureRequest, project: Path, commands: str, code: int, said: str
) -> None:
    """Before Paceline is there, and later."""
    lab, laptop = request.getfixturevalue("lab"), request.getfixturevalue("laptop")
    file = lab.home / f"setup-{code}.sh"
    (project / "paceline.toml").write_text(
        f'[profiles.plain]\nhost = "plain"\nsetup = ". {file}"\n'
    )
    laptop("login", "plain", check=True)
    for _ in range(2):
        file.write_text(f"{commands}\n")
        done = laptop("ps", "--on", "plain")
        assert done.returncode == 1
        assert f"`setup` of plain failed with exit code {code}:" in done.stderr
        assert said in done.stderr
        assert "Fix `setup` in [profiles.plain]" in done.stderr
        # not the text of the whole script
        assert all(len(word) < 100 for word in done.stderr.split())
        file.write_text("true\n")
        laptop("ps", "--on", "plain", check=True)


def test_a_request_that_is_not_carried_out_does_not_stay(
    lab: Lab, laptop: Laptop, project: Path
) -> None:
    """It may hold secrets. Here the commands of the profile fail between its arrival and its start."""
    calls = lab.home / "calls"
    setup = "echo >>$HOME/calls; [ $(wc -l <$HOME/calls) -ne 2 ]"
    (project / "paceline.toml").write_text(f'[profiles.plain]\nhost = "plain"\nsetup = "{setup}"\n')
    calls.write_text("\n" * 9)
    calls.chmod(0o666)
    laptop("login", "plain", check=True)
    laptop("ps", "--on", "plain", check=True)
    calls.write_text("")
    earlier = lab.requests()
    assert laptop("ps", "--on", "plain").returncode != 0
    assert calls.read_text() == "\n" * 3  # once more, to see whether it fails still
    assert lab.requests() <= earlier


@pytest.mark.parametrize("text", ["", "{}", "not json"])
def test_a_request_is_removed_before_it_is_read(tmp_path: Path, text: str) -> None:
    request = tmp_path / "request-1a"
    request.write_text(text)
    with pytest.raises((TypeError, ValueError)):
        entry.take_over(request, terminal=True)
    assert not request.exists()


def test_a_request_whose_sender_is_gone_is_removed(tmp_path: Path) -> None:
    request = Request(["ps"], ".", SentCode("project", {}), secrets={"TOKEN": "hush"})
    program = "import sys, pathlib; from paceline.ssh.remote import entry; entry.receive(pathlib.Path(sys.argv[1]))"
    for is_gone in (False, True):
        with subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            if is_gone:
                process.stdout.close()
            process.stdin.write(f"{request.to_json()}\n".encode())
            process.stdin.close()
            process.wait(60)
        assert (process.returncode == 0) != is_gone
        # that of the sender who waits for the answer
        assert len(list(tmp_path.glob("request-*"))) == 1


def test_modules_are_known_to_the_profile(lab: Lab, laptop: Laptop, project: Path) -> None:
    """Over ssh, the shell has not read what defines `module`."""
    if not any(map(os.path.exists, ("/etc/profile.d/lmod.sh", "/etc/profile.d/modules.sh"))):
        pytest.skip("no modules here: install lmod")
    (lab.home / "modulefiles").mkdir(exist_ok=True)
    (lab.home / "modulefiles" / "big").write_text(f"#%Module\nsetenv SCRATCH {lab.home}/big\n")
    setup = "module use $HOME/modulefiles; module load big"
    (project / "paceline.toml").write_text(f'[profiles.plain]\nhost = "plain"\nsetup = "{setup}"\n')
    laptop("login", "plain", check=True)
    done = laptop("ps", "--on", "plain", "--json", check=True)
    assert f'"{lab.home}/big/paceline"' in done.stdout


def test_an_archive_that_was_cut_is_not_installed(tmp_path: Path) -> None:
    archive = tmp_path / "archive.zip"
    with zipfile.ZipFile(archive, "w") as out:
        out.writestr("module.py", "x = 1\n" * 1000)
    old = tmp_path / "cache" / ".partial-old"
    old.mkdir(parents=True)
    os.utime(old, (time.time() - 2 * unpack.ABANDONED,) * 2)
    program = [sys.executable, unpack.__file__, str(tmp_path / "cache"), "name"]
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    cut = subprocess.run(
        [*program, digest], input=archive.read_bytes()[:-100], capture_output=True, check=False
    )
    assert cut.returncode == 1
    assert b"arrived incomplete" in cut.stderr
    assert list((tmp_path / "cache").iterdir()) == []
    for _ in range(2):
        subprocess.run([*program, digest], input=archive.read_bytes(), check=True)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["name"]
    assert (tmp_path / "cache" / "name" / "module.py").is_file()


def test_an_installation_that_was_partly_removed_is_made_again(tmp_path: Path) -> None:
    """Clusters remove files that were not used for weeks, one by one."""
    archive = tmp_path / "archive.zip"
    with zipfile.ZipFile(archive, "w") as out:
        for name in ("module.py", "deep/other.py", "__main__.py"):
            out.writestr(name, "x = 1\n")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    program = [sys.executable, unpack.__file__, str(tmp_path / "cache"), "name", digest]
    made = tmp_path / "cache" / "name"

    def install() -> int:
        subprocess.run(program, input=archive.read_bytes(), check=True)
        assert [path.name for path in (tmp_path / "cache").iterdir()] == ["name"]
        assert unpack.is_whole(str(made))
        return made.stat().st_ino

    first = install()
    assert install() == first
    for name in ("module.py", "deep/other.py", unpack.MODULES, unpack.COMPLETE):
        (made / name).unlink()
        assert not unpack.is_whole(str(made))
        assert install() != first
        first = made.stat().st_ino
    (made / "module.py").write_text("x")
    assert install() != first
    assert is_damaged(made, thorough=False) is is_damaged(made, thorough=True) is False
    (made / "module.py").unlink()
    assert not is_damaged(made, thorough=False)  # it is looked at once a day
    assert is_damaged(made, thorough=True)
    os.utime(made / unpack.COMPLETE, (time.time() - 2 * INTERVAL,) * 2)
    assert is_damaged(made, thorough=False)


@pytest.mark.slow
def test_what_was_removed_on_a_cluster_is_installed_again(
    lab: Lab, laptop: Laptop, project: Path
) -> None:
    laptop("login", "plain", check=True)
    laptop("ps", "--on", "plain", check=True)
    (complete,) = (lab.home / ".cache" / "paceline").glob(f"*/{unpack.COMPLETE}")
    installed = complete.parent
    native = next(installed.glob("pydantic_core/*.so")).relative_to(installed)
    (project / "train.py").write_text("")
    submit, ps = ["submit", "--yes", "--on", "plain", "train.py"], ["ps", "--on", "plain"]
    for command, names in (
        (ps, [unpack.MODULES, "paceline/cli"]),
        (submit, ["paceline/agent/main.py"]),
    ):
        lab.on_node(f"cd {installed} && rm -rf {' '.join(names)}")
        done = laptop(*command)
        assert "installing Paceline" in done.stderr
        assert "Traceback" not in done.stderr
        assert all((installed / name).exists() for name in names)
    lab.on_node(f"cd {installed} && rm -f {native}")
    earlier = lab.requests()
    # needs it, and did not look first: that happens once a day
    done = laptop("ps", "--on", "plain")
    assert (done.returncode, "Repeat the command" in done.stderr) == (1, True), done.stderr
    assert lab.requests() <= earlier
    laptop("ps", "--on", "plain", check=True)


def test_a_bundle_that_was_cut_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paceline_bundle, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(
        paceline_bundle,
        "_copy_installed",
        lambda folder: bool((folder / "package.py").write_text("x = 1\n")),
    )
    monkeypatch.setattr(Target, "fits_here", lambda self: True)
    target = Target("/usr/bin/python3", (3, 11), "x86_64", "linux", (2, 28))
    made = paceline_bundle.make_bundle(target)
    content, written = made.path.read_bytes(), made.path.stat().st_mtime_ns
    assert paceline_bundle.make_bundle(target) == made
    assert made.path.stat().st_mtime_ns == written
    middle = len(content) // 2
    for wrong in (b"", content[:middle], content[:middle] + bytes(100) + content[middle + 100 :]):
        made.path.write_bytes(wrong)
        assert paceline_bundle.make_bundle(target) == made
        assert made.path.read_bytes() == content


@functools.cache
def _has_index() -> bool:
    argv = [sys.executable, "-m", "pip", "index", "versions", "mdurl"]
    return subprocess.run(argv, capture_output=True, check=False, timeout=60).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "machine", "expected"),
    [
        ((3, 10), "x86_64", "cpython-310-x86_64"),
        pytest.param((3, 13), "aarch64", "cpython-313-aarch64", marks=pytest.mark.slow),
    ],
)
def test_packages_for_another_python_are_downloaded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: tuple[int, int],
    machine: str,
    expected: str,
) -> None:
    if not _has_index():
        pytest.skip("no package index can be reached")
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        made = paceline_bundle.make_bundle(
            Target("/usr/bin/python3", version, machine, "linux", (2, 28))
        )
        again = paceline_bundle.make_bundle(
            Target("/usr/bin/python3", version, machine, "linux", (2, 28))
        )
    assert made == again
    with zipfile.ZipFile(made.path) as archive:
        names = archive.namelist()
    assert any(name.startswith("pydantic_core/") and expected in name for name in names), names
    assert {
        "__main__.py",
        "paceline/cli/commands/ps.py",
        "rich/console.py",
        "typer/main.py",
        "psutil/__init__.py",
    } <= set(names)
    assert ("tomli/__init__.py" in names) == (version < (3, 11))
    assert not [
        path for path in (tmp_path / "paceline" / "bundles").iterdir() if path.suffix != ".zip"
    ]
