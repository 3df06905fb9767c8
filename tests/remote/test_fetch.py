"""`paceline fetch`: a real run comes home over a real sshd, and local commands read it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.remote.lab import Lab
from tests.remote.test_forward import start

Laptop = Callable[..., subprocess.CompletedProcess[str]]
SCRIPT = """\
import torch, paceline
with paceline.session(cpu=True, save_every_steps=1) as run:
    model = run.wrap(torch.nn.Linear(2, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    data = run.loader(torch.utils.data.TensorDataset(torch.ones(8, 2)), batch_size=4)
    run.resume(model=model, opt=opt)
    for epoch in run.epochs(1):
        for (x,) in run.steps(data):
            run.backward(model(x).sum())
            run.update(opt)
            run.log(loss=1.0)
    run.print("trained at home")
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of a project."""
    project = tmp_path_factory.mktemp("trained") / "project"
    project.mkdir()
    (project / "train.py").write_text(SCRIPT)
    argv = [
        sys.executable,
        "-m",
        "paceline",
        "run",
        "--cpu",
        "--nproc",
        "1",
        "-J",
        "far",
        "train.py",
    ]
    subprocess.run(argv, cwd=project, check=True, capture_output=True)
    return project / "runs"


@pytest.fixture
def far_run(lab: Lab, trained: Path) -> Iterator[Path]:
    """A run on the cluster."""
    there = lab.home / "paceline"
    shutil.copytree(trained, there, symlinks=True)
    (run,) = (there / "project" / "default").iterdir()
    (snapshot,) = (path for path in (there / "project" / ".snapshots").iterdir() if path.is_dir())
    (run / "code").unlink()
    (run / "code").symlink_to(snapshot)
    owner = os.stat(lab.home)
    for path in (there, *there.rglob("*")):
        os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)
    yield run
    shutil.rmtree(there)


def test_a_run_comes_home_and_is_read_here(
    lab: Lab, project: Path, laptop: Laptop, far_run: Path
) -> None:
    laptop("login", "plain", check=True)
    done = laptop("fetch", "far", "--on", "plain", check=True)
    assert re.search(r"left    \S+ [kM]B on plain; --all", done.stdout), done.stdout
    done = laptop("fetch", "far", "--on", "plain", "--weights", check=True)
    assert re.search(r"left    \S+ [kM]B on plain; --all", done.stdout), done.stdout
    folder = project / "runs" / "project" / "default" / far_run.name
    assert f"fetched {far_run.name} (done) from plain" in done.stdout
    assert f"folder  {folder}" in done.stdout
    checkpoints = sorted(os.listdir(far_run / "checkpoints"))
    assert os.listdir(folder / "checkpoints") == checkpoints[-1:]
    assert "trained at home" in laptop("logs", "far", check=True).stdout
    assert "done" in laptop("show", "far", check=True).stdout
    (listed,) = json.loads(laptop("ps", "--json", check=True).stdout)["runs"]
    assert (listed["name"], listed["status"]) == ("far", "done")
    laptop("report", "far", "--light", check=True)
    laptop("export", "far", check=True)
    assert "nothing new" in laptop("fetch", "last", "--on", "plain", "--weights", check=True).stdout
    done = laptop("fetch", "far", "--on", "plain", "--all", "--to", "results", check=True)
    assert sorted(os.listdir(project / "results" / far_run.name / "checkpoints")) == checkpoints
    assert f"weights {len(checkpoints)} checkpoints\n" in done.stdout
    done = laptop("fetch", "far", "--on", "plain", "--to", "results", check=True)
    assert "nothing new" in done.stdout
    assert "left " not in done.stdout
    with (far_run / "metrics.jsonl").open("a") as file:
        file.write("{}\n")
    assert (
        ": 1 new or changed file, "
        in laptop("fetch", "far", "--on", "plain", "--to", "results", check=True).stdout
    )
    assert (project / "results" / far_run.name / "code" / "train.py").read_text() == SCRIPT
    lab.wait_until_idle()


@pytest.mark.slow
def test_a_connection_that_is_cut(lab: Lab, project: Path, laptop: Laptop, far_run: Path) -> None:
    """The same command goes on where the first one was cut off."""
    size = 400 << 20
    lab.on_node(
        f"mkdir -p {far_run}/collected && truncate -s {size} {far_run}/collected/huge.safetensors"
    )
    laptop("login", "plain", check=True)
    folder = project / "runs" / "project" / "default" / far_run.name
    part = folder / "collected" / ".paceline-partial" / "huge.safetensors"
    with start(
        lab,
        "fetch",
        "far",
        "--all",
        "--on",
        "plain",
        cwd=project,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        while process.poll() is None and not any(
            path.stat().st_size > size // 10
            for path in folder.glob("collected/.huge.safetensors.*")
        ):
            time.sleep(0.01)
        lab.cut()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "The connection to plain was lost" in errors
    assert not (folder / "collected" / "huge.safetensors").exists()
    assert size // 10 < part.stat().st_size < size
    lab.wait_until_empty()
    laptop("login", "--close")
    laptop("login", "plain", check=True)
    laptop("fetch", "far", "--all", "--on", "plain", check=True)
    assert (folder / "collected" / "huge.safetensors").stat().st_size == size
    assert not part.exists()


def test_mistakes_are_named(laptop: Laptop) -> None:
    done = laptop("fetch", "last")
    assert done.returncode == 2
    assert "`paceline fetch` needs a cluster" in done.stderr
    assert laptop("fetch", "last", "--on", "plain").returncode == 1
    laptop("login", "plain", check=True)
    done = laptop("fetch", "nothing", "--on", "plain")
    assert done.returncode == 2
    assert "There is no run 'nothing'" in done.stderr
    assert "`paceline ps --on plain` lists runs" in done.stderr
    done = laptop("show", "last", "--on", "plain")
    assert "Submit one with `paceline submit --on plain SCRIPT`" in done.stderr
    assert "PACELINE_SCRATCH" not in done.stderr
    done = laptop("fetch", "last", "--on", "plain", "--weights", "--all")
    assert done.returncode == 2
    assert "Use only one of" in done.stderr
    done = laptop("fetch", "last", "--on", "plain", "--to", "~nosuch-user/x")
    assert (done.returncode, "there is no user 'nosuch-user'" in done.stderr) == (2, True)
    assert laptop("fetch", "--on", "plain,lab").returncode == 2
