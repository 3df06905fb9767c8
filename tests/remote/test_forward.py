"""Commands with `--on` against a real sshd: Paceline is installed there, and nothing of it stays running."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import shutil
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.remote.lab import Lab
from tests.until import until

Laptop = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(autouse=True)
def no_runs(lab: Lab) -> None:
    """Other tests may have left runs on the login node."""
    shutil.rmtree(lab.home / "paceline", ignore_errors=True)


def test_paceline_is_installed_once_and_used(lab: Lab, laptop: Laptop) -> None:
    lab.uninstall()
    laptop("login", "lab", check=True)
    before = lab.prompted()
    first = laptop("ps", "--on", "lab", "--json", check=True)
    assert "installing Paceline" in first.stderr
    assert json.loads(first.stdout)["scratch"] == str(lab.home / "paceline")
    second = laptop("ps", "--json", "--on=lab", check=True)
    assert "installing" not in second.stderr
    assert json.loads(second.stdout)["runs"] == []
    assert lab.prompted() == before
    lab.wait_until_idle()
    cache = lab.home / ".cache" / "paceline"
    assert not list(cache.glob("secrets-*"))
    assert not list(cache.glob("*.partial-*"))
    assert os.stat(cache).st_mode & 0o077 == 0


def test_output_is_not_spoiled_by_start_up_files(lab: Lab, laptop: Laptop) -> None:
    (lab.home / ".bashrc").write_text("echo Welcome\n")
    try:
        laptop("login", "plain", check=True)
        done = laptop("ps", "--on", "plain", "--json", check=True)
    finally:
        (lab.home / ".bashrc").unlink()
    assert json.loads(done.stdout)["runs"] == []


def test_errors_and_exit_codes_are_passed_on(
    lab: Lab, laptop: Laptop, project: Path, tmp_path: Path
) -> None:
    assert laptop("show", "--on", "plain", "nothing").returncode == 1
    (tmp_path / "lines").write_text("0.1\n0.2\n")
    (project / "train.py").touch()
    (project / "small").touch()
    # as in `while read lr; do paceline submit ...; done < lines`
    with (tmp_path / "lines").open() as lines:
        for line, code in (
            ("login plain", 0),
            ("ps --on plain", 0),
            ("show --on plain nothing", 2),
            ("submit --on plain --dry-run train.py", 0),
            ("data push small --yes --on plain", 0),
        ):
            options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            with start(lab, *line.split(), cwd=project, stdin=lines, **options) as process:
                said, _ = process.communicate(timeout=60)
            assert process.returncode == code, said
            assert code == 0 or "nothing" in said
            assert "Traceback" not in said
            assert os.lseek(lines.fileno(), 0, os.SEEK_CUR) == 0, f"{line} read its caller's input"
    assert laptop("ps", "--on", "plain", "--nonsense").returncode == 2  # found here already
    assert laptop("show", "--on", "plain,lab").returncode == 2


DOWN = 'echo "Slurmctld(primary) at ctl is DOWN"; exit 1'
NOT_CONFIGURED = 'echo "scontrol: fatal: Could not establish a configuration source" >&2; exit 1'


def test_a_default_cluster(lab: Lab, laptop: Laptop, project: Path, tmp_path: Path) -> None:
    """It counts where this machine has no Slurm of its own, or only its programs; `--on here` is this machine."""
    with (project / "paceline.toml").open("a") as file:
        file.write('[project]\non = "plain"\n')
    path = f"{lab.bin}:{_without('sbatch')}"
    laptop("login", check=True)
    there, here = str(lab.home / "paceline"), str(project / "runs")
    found = [
        json.loads(laptop("ps", "--json", *more, check=True, PATH=path).stdout)["scratch"]
        for more in ((), ("--on", "here"))
    ]
    assert found == [there, here]
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in (
        ("sbatch", "exit 1"),
        ("scontrol", f"if [ -e {tmp_path}/up ]; then {DOWN}; else {NOT_CONFIGURED}; fi"),
    ):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    path = f"{programs}:{path}"

    def chosen(**more: str) -> str:
        return str(
            json.loads(laptop("ps", "--json", check=True, PATH=path, **more).stdout)["scratch"]
        )

    assert chosen(SLURM_CONF=str(tmp_path / "absent")) == there
    (tmp_path / "slurm.conf").touch()
    assert chosen(SLURM_CONF=str(tmp_path / "slurm.conf")) == here
    (tmp_path / "up").touch()  # a configuration that comes from elsewhere
    assert chosen() == here


def _without(program: str) -> str:
    folders = os.environ["PATH"].split(":")
    return ":".join(folder for folder in folders if not Path(folder, program).exists())


def start(lab: Lab, *args: str, cwd: Path, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "paceline", *args],
        cwd=cwd,
        env={**os.environ, **lab.variables},
        text=True,
        **options,
    )


@pytest.fixture
def slow(lab: Lab, project: Path) -> Iterator[list[str]]:
    """A command for the login node that goes on for minutes: Slurm does not answer there."""
    with (project / "paceline.toml").open("a") as file:
        file.write('[profiles.slow]\nhost = "plain"\nsetup = "PATH=$HOME/bin:$PATH"\n')
    run = lab.home / "paceline" / "project" / "default" / "20260101-120000-aaaa"
    shutil.rmtree(lab.home / "paceline", ignore_errors=True)  # runs of other tests
    for folder in (run, lab.home / "bin"):
        folder.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    (run / "job").write_text("7")
    (lab.home / "bin" / "squeue").write_text("#!/bin/sh\ntouch ~/asked\nexec sleep 600\n")
    (lab.home / "bin" / "squeue").chmod(0o755)
    yield ["ps", "--on", "slow"]
    shutil.rmtree(lab.home / "paceline")
    shutil.rmtree(lab.home / "bin")


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
)
def test_nothing_stays_there_when_the_command_here_ends(
    lab: Lab, laptop: Laptop, project: Path, slow: list[str], number: signal.Signals
) -> None:
    """The command writes nothing to its output, so nothing tells it that its reader is gone."""
    laptop("login", "plain", check=True)
    with start(
        lab,
        *slow,
        cwd=project,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        until(lambda: follows(lab) or process.poll() is not None)
        assert process.poll() is None, process.communicate()
        os.killpg(process.pid, number)
        said, _ = process.communicate(timeout=60)
    assert number != signal.SIGINT or process.returncode == 130
    assert "Traceback" not in said
    lab.wait_until_idle()


def test_nothing_stays_there_when_the_connection_is_closed(
    lab: Lab, laptop: Laptop, project: Path, slow: list[str]
) -> None:
    laptop("login", "plain", check=True)
    with start(
        lab,
        *slow,
        cwd=project,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        until(lambda: follows(lab))
        laptop("login", "--close", check=True)
        _, errors = process.communicate(timeout=60)
    lab.wait_until_empty()
    assert process.returncode == 1
    assert "connection to slow was lost" in errors


def test_a_terminal_there_is_as_wide_as_here_and_ctrl_c_reaches_it(
    lab: Lab, laptop: Laptop, project: Path, slow: list[str]
) -> None:
    laptop("login", "plain", check=True)
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(project)
        argv = [sys.executable, "-m", "paceline", *slow]
        os.execve(sys.executable, argv, {**os.environ, **lab.variables})
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 77, 0, 0))
    until(lambda: follows(lab))
    pid = next(int(line.split()[0]) for line in lab.processes() if "start.py" in line)
    there = os.open(f"/proc/{pid}/fd/0", os.O_RDONLY | os.O_NOCTTY)
    rows, columns, *_ = struct.unpack("HHHH", fcntl.ioctl(there, termios.TIOCGWINSZ, b"\0" * 8))
    os.close(there)
    assert (rows, columns) == (33, 77)
    os.write(terminal, b"\x03")
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 130
    os.close(terminal)
    lab.wait_until_idle()


def follows(lab: Lab) -> bool:
    """Whether the command on the login node has begun, and waits for Slurm."""
    file = lab.home / "asked"
    has_begun = file.exists() and any("start.py" in line for line in lab.processes())
    if has_begun:
        file.unlink()
    return has_begun
