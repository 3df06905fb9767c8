"""A request whose command cannot start on the login node does not stay there: there may be secrets in it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.ssh.installation import Installation
from paceline.ssh.request import ABSENT
from paceline.ssh.shell_text import SETUP_FAILED


@pytest.mark.parametrize(
    ("setup", "code", "said"),
    [
        (
            None,
            ABSENT,
            "Files of Paceline are missing in {folder}.\n  Repeat the command: it installs them again.",
        ),
        ("true", ABSENT, "Files of Paceline are missing"),
        ("echo 'it'\\''s'; false", SETUP_FAILED, "exit code 1"),
    ],
)
def test_a_request_that_cannot_start_is_removed(
    tmp_path: Path, setup: str | None, code: int, said: str
) -> None:
    cache = tmp_path / "it's a cache"
    waiting, other = cache / "request-1a", cache / "request-2b"
    cache.mkdir()
    for path in (waiting, other):
        path.write_text("secret")
    installation = Installation(sys.executable, str(cache), str(cache / "0.1.0"), setup)
    script = installation.command("run", waiting.name, "pipes")
    done = subprocess.run(
        ["sh", "-c", script], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == code
    assert said.format(folder=cache / "0.1.0") in done.stderr
    assert (waiting.exists(), other.exists()) == (False, True)
    done = subprocess.run(
        ["sh", "-c", installation.command("receive")], capture_output=True, text=True, check=False
    )
    # the laptop installs it: nothing to tell the user
    assert (done.returncode, done.stdout) == (code, "")
    assert "Files of Paceline" not in done.stderr
