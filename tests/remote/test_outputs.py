"""What `--on` shows of a sweep arrives on the laptop."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.contract.sweep_folder import Point, Search
from tests.remote.lab import Lab

Laptop = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def scratch_there(lab: Lab) -> Iterator[Path]:
    folder = lab.home / "paceline"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def own(lab: Lab, folder: Path) -> None:
    user = pwd.getpwnam(lab.user)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, user.pw_uid, user.pw_gid, follow_symlinks=False)


@pytest.mark.slow
def test_the_table_of_a_sweep_arrives_here(
    lab: Lab, laptop: Laptop, project: Path, scratch_there: Path
) -> None:
    sweep = scratch_there / "project" / "default" / "digits"
    sweep.mkdir(parents=True)
    (sweep / "sweep.json").write_text(Search("digits", metric="loss").to_json())
    (sweep / "points.jsonl").write_text(Point(0, 0, {"lr": 0.125}).to_line())
    own(lab, scratch_there)
    laptop("login", "plain", check=True)
    laptop("ps", "--on", "plain", check=True)  # installs Paceline there, and says so
    show = ("sweep", "show", "digits", "--on", "plain")
    done = laptop(*show, "--csv", "/dev/stdout", check=True)
    assert "0.125" in done.stdout
    assert "wrote the trials to /dev/stdout" in done.stderr
    wrong = laptop(*show, "--csv", "digits.out")
    assert (wrong.returncode, "would be written on plain" in wrong.stderr) == (2, True)
    # the login node has no Plotly
    done = laptop("report", "digits", "--on", "plain", "-o", "digits.html", check=True)
    assert "wrote the report to digits.html" in done.stdout
    page = (project / "digits.html").read_text()
    assert all(text in page for text in ("api/sweeps/digits", "0.125"))
