"""What the page about macOS and Windows shows runs here, also without what Windows lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks
from tests.docs.terminal import first_missing

PAGE = "docs/macos-windows.md"
# Modules and functions of Python that Windows does not have. `os.name` stays: torch and Python's library rely on it.
LIKE_WINDOWS = """
import os, sys
for name in ("fcntl", "grp", "pty", "pwd", "resource", "termios", "tty"):
    sys.modules[name] = None
for name in ("fork", "geteuid", "getpgid", "getuid", "killpg", "setpgid"):
    delattr(os, name)
"""


def environment(folder: Path, path: str) -> dict[str, str]:
    binaries = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {
        **os.environ,
        "PATH": binaries,
        "PYTHONPATH": path,
        "PACELINE_SCRATCH": str(folder / "runs"),
    }


@pytest.mark.parametrize("command", ["run train.py", "submit train.py", "ps", "sandbox up"])
def test_commands_say_that_they_do_not_work_on_windows(tmp_path: Path, command: str) -> None:
    code = f"{LIKE_WINDOWS}\nfrom paceline.__main__ import main\nmain()"
    done = subprocess.run(
        [sys.executable, "-c", code, *command.split()], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(
        "paceline: error: This command does not work on Windows.\n  Use it in WSL 2."
    )


@pytest.mark.parametrize(
    "lacking", [pytest.param("nothing", marks=pytest.mark.slow), "what Windows lacks"]
)
def test_the_script_starts_its_own_ranks(tmp_path: Path, lacking: str) -> None:
    (script,) = (block for block in blocks(PAGE) if block.title)
    (tmp_path / script.title).write_text(script.text, encoding="utf-8")
    light = str(ROOT / "tests" / "light_torch")
    if lacking != "nothing":
        (tmp_path / "site").mkdir()
        faster = (ROOT / "tests/light_torch/sitecustomize.py").read_text(encoding="utf-8")
        (tmp_path / "site/sitecustomize.py").write_text(f"{faster}\n{LIKE_WINDOWS}")
        light = str(tmp_path / "site")
    for block in blocks(PAGE):
        for command, shown in block.dialogue() if block.language == "console" else ():
            if command.startswith("paceline") and lacking != "nothing":
                continue  # `paceline run` is for Linux and macOS
            done = subprocess.run(
                command,
                shell=True,
                cwd=tmp_path,
                env=environment(tmp_path, light),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=200,
            )
            output = done.stderr + done.stdout
            assert done.returncode == 0, output
            assert first_missing(shown, output) is None, output
