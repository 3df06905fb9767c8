"""`paceline submit --on A,B --first`: two clusters before one Slurm; the first to start goes on, the other is cancelled."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.remote.lab import Lab
from tests.remote.test_forward import start
from tests.slurm.harness import Cluster
from tests.until import until

Laptop = Callable[..., subprocess.CompletedProcess[str]]
SMALL = ("--on", "slurm,cedar", "--first", "--cpu", "--nproc", "1", "-t", "5")
LATER = ("--sbatch-arg", "--begin=now+1hour")


@pytest.fixture
def clusters(slurm_node: Cluster, lab: Lab, project: Path, laptop: Laptop) -> Iterator[Cluster]:
    """The laptop is logged in to `slurm` and `cedar`, both before the same Slurm."""
    if all(node.name != "cedar" for node in lab.more):
        lab.add("cedar", {"SLURM_CONF": slurm_node.environment["SLURM_CONF"]})
    with (project / "paceline.toml").open("a") as file:
        file.write(
            '[profiles.cedar]\nhost = "cedar"\n[profiles.cedar.project]\nscratch = "~/cedar"\n'
        )
    (project / "train.py").write_text("import time\ntime.sleep(60)\n")
    for name in ("slurm", "cedar"):
        laptop("login", name, check=True)
    yield slurm_node
    slurm_node.clear()


def races(lab: Lab) -> list[dict[str, Any]]:
    """Return what the laptop has recorded about races that are not finished."""
    folder = lab.folder / "laptop/.local/state/paceline/first"
    return [json.loads(path.read_text()) for path in folder.glob("*.json")]


def rows(laptop: Laptop, cluster: str) -> list[dict[str, Any]]:
    shown = laptop("ps", "--json", "--on", cluster, check=True).stdout
    return list(json.loads(shown)["runs"])


def test_the_first_to_start_goes_on(lab: Lab, laptop: Laptop, clusters: Cluster) -> None:
    done = laptop("submit", *SMALL, "train.py", check=True, PACELINE_POLL_INTERVAL="0.5")
    winner = "slurm" if "slurm: started first" in done.stdout else "cedar"
    (loser,) = {"slurm", "cedar"} - {winner}
    assert f"{loser}: cancelled" in done.stdout
    assert f"--on {winner}" in done.stdout
    (kept,), (lost,) = rows(laptop, winner), rows(laptop, loser)
    assert kept["status"] == "running"
    assert lost["status"] == "cancelled"
    assert kept["request"] == lost["request"] != ""
    assert races(lab) == []
    laptop("cancel", kept["run_id"], "--on", winner, check=True)


@pytest.mark.slow  # the test above finishes a race
def test_an_interrupted_race_is_finished_later(
    lab: Lab, laptop: Laptop, project: Path, clusters: Cluster
) -> None:
    with start(
        lab,
        *("submit", *SMALL, *LATER, "train.py"),
        cwd=project,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        for _ in ("slurm", "cedar"):  # both have answered
            assert process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    assert len(clusters.queue()) == 2
    (race,) = races(lab)
    assert f"--finish {race['id']}" in laptop("ps", "--on", "slurm", check=True).stderr
    (job, _) = clusters.queue()
    subprocess.run(
        ["scontrol", "update", f"JobId={job.split()[0]}", "StartTime=now"],
        env={**os.environ, **clusters.environment},
        check=True,
        capture_output=True,
    )
    done = laptop("submit", "--finish", race["id"], check=True, PACELINE_POLL_INTERVAL="0.5")
    assert "started first" in done.stdout
    assert len(clusters.queue()) == 1
    assert races(lab) == []
    assert "no unfinished" in laptop("submit", "--finish", race["id"]).stderr


def test_ctrl_c_cancels_all(lab: Lab, project: Path, clusters: Cluster) -> None:
    with start(
        lab,
        *("submit", *SMALL, *LATER, "train.py"),
        cwd=project,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        until(lambda: len(clusters.queue()) == 2)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
    assert process.returncode == 130
    until(lambda: not clusters.queue())
    assert races(lab) == []


def test_what_does_not_fit(laptop: Laptop, project: Path) -> None:
    (project / "train.py").write_text("print(1)\n")
    for args, said in (
        (["--on", "slurm", "--first"], "--first needs several clusters"),
        (["--on", "slurm,cedar"], "This takes one cluster"),
        (["--on", "slurm,plain", "--first", "--wait"], "--wait cannot be combined with --first"),
        (["--first"], "--first needs several clusters"),
    ):
        done = laptop("submit", *args, "train.py")
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr
