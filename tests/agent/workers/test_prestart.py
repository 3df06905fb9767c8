"""The zygote that starts before its agent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.agent.workers.zygote.prestart import FLAGS, NO_PRESTART, SHORT, guess
from paceline.agent.workers.zygote.start import ZygoteOptions
from paceline.cli.commands.run import command
from paceline.cli.parser import single_command
from tests.agent.conftest import is_alive, until


@pytest.mark.parametrize(
    ("args", "threads", "preload"),
    [
        (["t.py"], 4, []),
        (["--nproc", "4", "t.py", "--nproc", "1", "--dry-run"], 2, []),
        (["--nproc=8", "--cpu", "--preload", "a", "--preload=b", "t.py"], 1, ["a", "b"]),
        (["--nproc", "99", "--env", "A=1", "--style", "fork", "t.py"], 1, []),
        (["--env", "OMP_NUM_THREADS=3", "t.py"], 3, []),
        (["--no-snapshot", "--nproc", "1", "t.py"], 8, []),
        (["-m", "some.module"], 4, []),
        (["--no-check", "--deterministic", "-J", "x", "-N1", "--nproc", "1", "t.py"], 8, []),
    ],
)
def test_guessed_options(
    args: list[str],
    threads: int,
    preload: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").touch()
    options = guess(args, cores=8, environ={"CUDA_VISIBLE_DEVICES": ""})
    assert options is not None
    assert (options.threads, options.preload) == (threads, preload)
    assert ZygoteOptions.from_args(options.to_args()).to_args() == options.to_args()


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["--help"],
        ["--dry-run", "t.py"],
        ["--style", "torchrun", "t.py"],
        ["--style=spawn", "t.py"],
        ["--nodes", "2", "t.py"],
        ["-N", "2", "t.py"],
        ["-N2", "t.py"],
        ["--resume", "last"],
        ["missing.py"],
        ["--nproc", "0", "t.py"],
        ["--nproc"],
    ],
)
def test_no_zygote_is_started(
    args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").touch()
    assert guess(args, cores=8, environ={}) is None


def test_options_without_a_value_are_known() -> None:
    """Otherwise the guess would take the script for an option's value."""
    options = [each for each in single_command(command).params if each.param_type_name == "option"]
    flags = {flag: each for each in options for flag in each.opts}
    switches = {flag for flag, each in flags.items() if each.is_flag}
    assert set(FLAGS) == switches - set(NO_PRESTART)
    assert set(NO_PRESTART) <= flags.keys() | {"--help", "-h"}
    with_value = [each for each in options if not each.is_flag]
    assert {
        (short, long)
        for each in with_value
        for short in each.opts
        for long in each.opts
        if len(short) == 2 and len(long) > 2
    } == set(SHORT.items())


@pytest.mark.parametrize("written", ["", "[launch]\nnproc = 1\npreload = ['colorsys']\n"])
def test_it_is_adopted_only_if_the_guess_was_right(
    paceline: Callable[..., subprocess.CompletedProcess[str]],
    without_torch: None,
    tmp_path: Path,
    written: str,
) -> None:
    """What paceline.toml says is not known before the command has read it."""
    (tmp_path / "paceline.toml").write_text(written)
    (tmp_path / "t.py").write_text("import sys; print('colorsys' in sys.modules, sys.argv[1:])")
    done = paceline("run", "--cpu", "--nproc", "1", "t.py", check=True)
    assert done.stdout == f"{bool(written)} []\n"


STARTS_ONE = """
import os, sys, time
from paceline.agent.workers.zygote import prestart
prestart.start(["paceline", "run", "t.py"])
assert prestart.prestarted is not None
print("begun", flush=True)
time.sleep(3600)
"""


def test_it_ends_with_the_command_that_started_it(tmp_path: Path) -> None:
    """Even in the middle of an import."""
    (tmp_path / "t.py").touch()
    (tmp_path / "torch.py").write_text(
        "import os, time\nopen('importing', 'w').write(str(os.getpid()))\ntime.sleep(3600)\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-c", STARTS_ONE], cwd=tmp_path, env=environ, stdout=subprocess.PIPE
    )
    importing = tmp_path / "importing"
    until(lambda: importing.exists() and importing.read_text(), "the import")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    until(lambda: not is_alive(int(importing.read_text())), "the end of the zygote")
