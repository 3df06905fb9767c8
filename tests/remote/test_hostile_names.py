"""Names, arguments and values with quotes, `$()`, newlines, dashes and any bytes arrive unchanged, or are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import EnvironmentProblem, SpecError, UsageError
from paceline.spec.clusters import Cluster, ProjectFile
from paceline.ssh import connection as connections
from paceline.ssh.connection import Connection, shell_command, word, words
from tests.remote.lab import Lab

Laptop = Callable[..., subprocess.CompletedProcess[str]]
# What a command line can hold: any bytes but NUL, as Python has them.
ANY_BYTES = st.binary(max_size=30).map(lambda content: os.fsdecode(content.replace(b"\0", b"")))
NASTY = st.sampled_from(
    [
        "$(touch injected)",
        "`touch injected`",
        "a b",
        "'",
        '"',
        "\\",
        "\n",
        "-rf",
        "--",
        "!!",
        "\udcff",
    ]
)
ARGUMENTS = st.lists(st.one_of(ANY_BYTES, NASTY, st.lists(NASTY).map("".join)), max_size=8)


@settings(max_examples=30, deadline=None)
@given(ARGUMENTS)
def test_a_shell_reads_back_what_was_meant(arguments: list[str]) -> None:
    command = shell_command(f"printf '%s\\0' {words(arguments)}" if arguments else "true")
    done = subprocess.run(["sh", "-c", command], capture_output=True, check=True)
    assert [os.fsdecode(each) for each in done.stdout.split(b"\0")[:-1]] == arguments


def test_nul_is_refused() -> None:
    with pytest.raises(UsageError, match="NUL"):
        word("a\0b")


@settings(deadline=None)
@given(st.one_of(st.text(max_size=20), NASTY, st.tuples(NASTY, st.just("@host")).map("".join)))
def test_a_host_is_a_name_or_refused(host: str) -> None:
    """Whatever is accepted is neither an option of ssh nor text for a shell."""
    values = {"profiles": {"bad": {"host": host}}}
    try:
        ProjectFile(Path("paceline.toml"), values).clusters()
    except (SpecError, UsageError):
        return
    assert host[0] != "-"
    assert not set(host) & set(" \t\n'\"$`\\;&|<>()*?!#~{}=,/")
    assert host.isascii()


@pytest.fixture
def hostile(lab: Lab, laptop: Laptop, tmp_path: Path) -> Iterator[Path]:
    """A project whose folder has a hostile name; logged in to `plain`."""
    folder = tmp_path / 'it\'s $(touch injected) `touch injected` "q" -x'
    folder.mkdir()
    (folder / "paceline.toml").write_text('[profiles.plain]\nhost = "plain"\n')
    (folder / "-train $(touch injected).py").write_text("print(1)\n")
    laptop("login", "plain", check=True, cwd=folder)
    yield folder
    assert not list(tmp_path.rglob("injected"))
    assert not list(lab.home.rglob("injected"))


def test_a_project_with_a_hostile_name(lab: Lab, laptop: Laptop, hostile: Path) -> None:
    """The script that Slurm would get has the same arguments and values as on this machine."""
    line = (
        "submit",
        "--dry-run",
        "--cpu",
        "--nproc",
        "1",
        "-t",
        "5",
        "--env",
        "V=$(touch injected) 'x'",
        "-J",
        "a$(id)b",
        "./-train $(touch injected).py",
        "--x",
        "a b",
        "$(touch injected)",
        "a\nb",
        "-",
        "é",
    )
    here = laptop(*line, cwd=hostile)
    there = laptop(line[0], "--on", "plain", *line[1:], cwd=hostile)
    assert there.returncode == here.returncode, there.stderr
    if here.returncode:  # refused, and for the same reason
        assert there.stderr.splitlines()[-2:] == here.stderr.splitlines()[-2:]
    else:
        assert lines_with(there.stdout) == lines_with(here.stdout)
    assert "Traceback" not in there.stderr


def lines_with(script: str) -> list[str]:
    """Return what a script has of the name, the value and the arguments."""
    lines = script.splitlines()
    arguments = [line[line.index(" --x ") :] for line in lines if " --x " in line]
    assert arguments
    return [*arguments, *(line for line in lines if "--job-name" in line or "V=" in line)]


# -- other machines ----------------------------------------------------------------------------------------------

LIKE_WINDOWS = """
import os, sys
for name in ("fcntl", "grp", "pty", "pwd", "resource", "termios", "tty"):
    sys.modules[name] = None
for name in ("fork", "geteuid", "getpgid", "getuid", "killpg", "setpgid"):
    delattr(os, name)
"""


@pytest.mark.parametrize("command", [("login", "far"), ("login", "--show"), ("ps", "--on", "far")])
def test_windows_is_explained(tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "sitecustomize.py").write_text(LIKE_WINDOWS)
    (tmp_path / "paceline.toml").write_text('[profiles.far]\nhost = "far"\n')
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *command],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "does not work on Windows" in done.stderr
    assert "Use it in WSL 2" in done.stderr


def test_windows_has_no_shared_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(os, "getuid")
        with pytest.raises(
            EnvironmentProblem, match="OpenSSH for Windows cannot keep a connection open"
        ):
            Connection(Cluster("far", "far"))


@pytest.mark.parametrize("depth", [0, 8])
def test_sockets_of_macos_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, depth: int) -> None:
    """A path has at most 104 bytes there, of which ssh needs 17 while it opens the socket."""
    runtime = tmp_path.joinpath(*["very-long-name"] * depth)
    runtime.mkdir(parents=True, exist_ok=True)
    with monkeypatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(runtime) if depth else "")
        path = str(connections.socket_folder() / ("x" * 12))
    assert len(os.fsencode(path)) + 17 < 104


def test_files_with_windows_line_ends(tmp_path: Path) -> None:
    text = '[profiles.far]\nhost = "far"\nsetup = """\nmodule load python\nexport A=1\n"""\n'
    (tmp_path / "paceline.toml").write_bytes(text.replace("\n", "\r\n").encode())
    cluster = ProjectFile.find(tmp_path).clusters()["far"]
    assert cluster == Cluster(
        "far", "far", None, "module load python\nexport A=1\n", has_profile=True
    )
