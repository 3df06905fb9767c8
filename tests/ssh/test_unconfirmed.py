"""Submissions whose answer has not arrived: identical ones at the same time do not disturb each other."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.ssh.unconfirmed import open_submission

MANY = """
import time
from paceline.ssh.unconfirmed import open_submission
for _ in range(60):
    it = open_submission("alps", "login.alps", ["submit", "train.py"])
    assert not it.is_repeat, "every answer has arrived"
    assert it.path.stat().st_ino, "the file is there until its answer is"
    time.sleep(0.001)
    it.confirm()
"""


@pytest.fixture(autouse=True)
def cache(guard: None, tmp_path: Path) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        yield tmp_path


def test_identical_submissions_at_the_same_time(cache: Path) -> None:
    started = [
        subprocess.Popen(
            [sys.executable, "-c", MANY], stderr=subprocess.PIPE, text=True, env=dict(os.environ)
        )
        for _ in range(4)
    ]
    for each in started:
        _, errors = each.communicate(timeout=100)
        assert each.returncode == 0, errors
    assert not list(cache.glob("**/submissions/*"))


def test_a_submission_is_repeated_until_its_answer_is_here() -> None:
    first = open_submission("alps", "login.alps", ["submit", "a.py"])
    beside = open_submission("alps", "login.alps", ["submit", "a.py"])  # the first is still waiting
    assert not beside.is_repeat
    beside.confirm()
    first.close()  # its answer was lost
    assert not open_submission("alps", "login.alps", ["submit", "b.py"]).is_repeat
    # another profile of this host
    assert not open_submission("alps-debug", "login.alps", ["submit", "a.py"]).is_repeat
    again = open_submission("alps", "login.alps", ["submit", "a.py"])
    assert again.is_repeat
    assert again.id == first.id
    again.confirm()
    assert not open_submission("alps", "login.alps", ["submit", "a.py"]).is_repeat
