"""Files that commands with `--on` write arrive on the laptop, and nothing of them stays on the login node."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.contract.sweep_folder import Point, Search
from tests.remote.lab import Lab
from tests.remote.relay import Relay

Laptop = Callable[..., subprocess.CompletedProcess[str]]
SCRIPT = """
import paceline, torch
with paceline.session(cpu=True) as run:
    model = run.wrap(torch.nn.Linear(600, 600))
    opt = torch.optim.SGD(model.parameters(), 0.1)
    run.resume(model=model, opt=opt)
    for _ in run.steps(range(2)):
        run.backward(model(torch.ones(1, 600)).sum())
        run.update(opt)
    run.save()
"""


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


def left_there(lab: Lab) -> list[Path]:
    return list((lab.home / ".cache" / "paceline").glob("output-*"))


def test_exported_weights_arrive_here(
    lab: Lab, laptop: Laptop, link: Relay, project: Path, scratch_there: Path
) -> None:
    (project / "train.py").write_text(SCRIPT)
    subprocess.run(
        [sys.executable, "-m", "paceline", "run", "--nproc", "1", "--cpu", "train.py"],
        cwd=project,
        env={**os.environ, "PACELINE_SCRATCH": str(scratch_there)},
        check=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
    )
    own(lab, scratch_there)
    laptop("login", "link", check=True)
    done = laptop("export", "--on", "link", "last", "-o", "weights.safetensors", check=True)
    assert (
        done.stderr.splitlines()[-1] == "paceline: weights.safetensors: 2 tensors, 1.4 MB, step 2"
    )
    assert "output-" not in done.stdout + done.stderr  # a temporary folder there
    again = laptop(
        "export", "--on", "link", "last", "-o", str(project / "weights.safetensors"), check=True
    )
    assert again.stderr == "paceline: weights.safetensors: 2 tensors, 1.4 MB, step 2\n"
    (record,) = scratch_there.glob("*/*/*/run.json")
    laptop("export", str(record.parent), "--on", "here", check=True)
    assert (project / "weights.safetensors").read_bytes() == (
        project / "model.safetensors"
    ).read_bytes()
    assert left_there(lab) == []
    before = (project / "weights.safetensors").stat().st_mtime_ns
    wrong = laptop("export", "--on", "link", "last", "-o", "weights.txt")
    assert (wrong.returncode, "has to end in" in wrong.stderr) == (2, True)
    assert (
        "there is no folder 'nowhere'"
        in laptop("export", "--on", "link", "-o", "nowhere/weights.pt").stderr
    )
    assert left_there(lab) == []
    assert (project / "weights.safetensors").stat().st_mtime_ns == before
    assert not list(project.glob(".*.partial"))


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
    done = laptop("sweep", "show", "digits", "--on", "plain", "--csv", "my trials.csv", check=True)
    assert (done.stdout, done.stderr) == ("wrote 1 trial to my trials.csv\n", "")
    assert "0.125" in (project / "my trials.csv").read_text()
    named_alike = scratch_there / "project" / "default" / "20260101-120000-aaaa"
    named_alike.mkdir()
    (named_alike / "run.json").write_text('{"name": "digits"}')
    own(lab, scratch_there)
    # the newest sweep, not the newest run
    laptop("sweep", "show", "--on", "plain", "--csv", "again.csv", check=True)
    # the login node has no Plotly
    done = laptop("sweep", "show", "--on", "plain", "--report", "digits.html", check=True)
    assert "wrote the report to digits.html" in done.stdout
    assert (project / "again.csv").read_bytes() == (project / "my trials.csv").read_bytes()
    assert all(
        text in (project / "digits.html").read_text() for text in ("api/sweeps/digits", "0.125")
    )
    done = laptop("sweep", "show", "digits", "--on", "plain", "--report", "named.html", check=True)
    assert "api/sweeps/digits" in (project / "named.html").read_text()
    assert left_there(lab) == []
