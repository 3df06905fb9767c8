"""`paceline submit --on A,B --first`: two clusters before one Slurm, and never do both train."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.remote.lab import Lab
from tests.remote.test_forward import start, wait_until
from tests.slurm.harness import Cluster

Laptop = Callable[..., subprocess.CompletedProcess[str]]
SMALL = ("--on", "slurm,cedar", "--first", "--cpu", "--nproc", "1", "-t", "5")
LATER = ("--sbatch-arg", "--begin=now+1hour")


@pytest.fixture
def clusters(slurm_node: Cluster, lab: Lab, project: Path, laptop: Laptop) -> Iterator[Cluster]:
    """The laptop is logged in to `slurm` and `cedar`, both before the same Slurm."""
    if all(node.name != "cedar" for node in lab.more):
        lab.add("cedar", {"SLURM_CONF": slurm_node.environment["SLURM_CONF"]})
    with (project / "paceline.toml").open("a") as file:
        file.write('[profiles.cedar]\nhost = "cedar"\n')
    trained = lab.home / "trained"
    trained.unlink(missing_ok=True)
    (project / "train.py").write_text(
        f"import os\nopen('{trained}', 'a').write(os.environ['PACELINE_RUN'] + '\\n')\n"
    )
    for name in ("slurm", "cedar"):
        laptop("login", name, check=True)
    yield slurm_node
    slurm_node.clear()


def trained(lab: Lab) -> list[str]:
    """Return the runs whose script was executed."""
    path = lab.home / "trained"
    return [Path(line).name for line in path.read_text().split()] if path.exists() else []


def race(lab: Lab) -> dict[str, Any]:
    """Return what the laptop has recorded about its newest submission."""
    paths = sorted(
        (lab.folder / "laptop/.local/state/paceline/first").glob("*.json"), key=os.path.getmtime
    )
    for _ in range(100):  # it may just be written
        try:
            return dict(json.loads(paths[-1].read_text())) if paths else {}
        except (OSError, ValueError):
            time.sleep(0.01)
    raise AssertionError(paths)


def run_folder(lab: Lab, run: str) -> Path:
    return lab.home / "paceline" / "project" / "default" / run


def release(cluster: Cluster) -> None:
    """Let the jobs start that were to begin later."""
    for job in cluster.queue():
        argv = ["scontrol", "update", f"JobId={job.split()[0]}", "StartTime=now"]
        subprocess.run(
            argv, env={**os.environ, **cluster.environment}, check=True, capture_output=True
        )


def test_both_start_at_once_and_one_trains(lab: Lab, laptop: Laptop, clusters: Cluster) -> None:
    done = laptop("submit", *SMALL, "-J", "both", "train.py", check=True)
    found = race(lab)
    assert "paceline-" not in done.stderr  # what marks the beginning of an answer is not part of it
    winner, (loser,) = found["chosen"], {"slurm", "cedar"} - {found["chosen"]}
    assert f"{winner}: started first and is training {found['runs'][winner]}" in done.stdout
    assert f"paceline logs -f {found['runs'][winner]} --on {winner}" in done.stdout
    assert f"{loser}: cancelled {found['runs'][loser]}" in done.stdout
    *_, events = done.stderr.partition(f"--finish {found['id']}\n")
    said = events.splitlines()
    assert all(line.startswith(("slurm: ", "cedar: ")) for line in said), events
    assert len(said) == len(set(said)), "each event once"
    assert done.stderr.count(f"{winner}: started; waiting for permission to train\n") == 1
    assert "running" not in done.stderr
    laptop("wait", found["runs"][winner], "--on", winner, check=True)
    assert trained(lab) == [found["runs"][winner]]
    wait_until(lambda: not clusters.queue())
    lost = run_folder(lab, found["runs"][loser])
    assert not list(lost.glob("attempt-*"))
    shown = json.loads(laptop("ps", "--json", "--on", loser, check=True).stdout)["runs"]
    (row,) = [row for row in shown if row["run_id"] == lost.name]
    assert row["status"] == "cancelled"
    assert row["detail"] == f"{winner} started first"
    shown = laptop("show", lost.name, "--on", loser, check=True).stdout
    assert f"{winner} started first" in shown
    assert "\ncontinue " not in shown
    assert "  continue " not in laptop("cancel", lost.name, "--on", loser, check=True).stdout
    again = laptop("submit", "--resume", lost.name, "--on", loser)
    assert again.returncode == 2
    assert f"will never train: {winner} started first." in again.stderr
    assert not clusters.queue()
    assert found["is_over"]
    lab.wait_until_idle()


@pytest.mark.slow
def test_a_laptop_that_is_killed_after_its_choice(
    lab: Lab, project: Path, laptop: Laptop, clusters: Cluster
) -> None:
    """Whether the permission has been sent or not: only the cluster that was chosen trains, once it is finished."""
    before = race(lab).get("id")
    with start(
        lab,
        "submit",
        *SMALL,
        "-N",
        "2",
        "train.py",
        cwd=project,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        while process.poll() is None and (race(lab).get("id") == before or not race(lab)["chosen"]):
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    chosen = race(lab)["chosen"]
    done = laptop("submit", "--finish", race(lab)["id"], check=True)
    assert f"{chosen}: started first" in done.stdout
    laptop("wait", race(lab)["runs"][chosen], "--on", chosen, check=True)
    wait_until(lambda: not clusters.queue())
    assert trained(lab) == [race(lab)["runs"][chosen]] * 2  # both of its ranks
    assert "already finished" in laptop("submit", "--finish", race(lab)["id"], check=True).stderr


@pytest.mark.slow
def test_a_cluster_that_is_cut_off_does_not_train(
    lab: Lab, project: Path, laptop: Laptop, clusters: Cluster
) -> None:
    """Its job ends by itself; the other one trains."""
    with start(
        lab,
        "submit",
        *SMALL,
        *LATER,
        "--first-timeout",
        "15s",
        "train.py",
        cwd=project,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        wait_until(lambda: len(clusters.queue()) == 2)
        wait_until(lambda: len(race(lab)["runs"]) == 2)
        laptop("logout", "cedar", check=True)
        release(clusters)
        _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    found = race(lab)
    assert found["chosen"] == "slurm"
    assert "cedar: You are not logged in to cedar; without permission it does not train" in errors
    assert "cedar: could not be reached" in errors
    wait_until(lambda: not clusters.queue())
    assert trained(lab) == [found["runs"]["slurm"]]
    assert (run_folder(lab, found["runs"]["cedar"]) / "grant").read_text() == "expired\n"
    assert not list(run_folder(lab, found["runs"]["cedar"]).glob("attempt-*"))


@pytest.mark.slow
def test_ctrl_c_cancels_all(lab: Lab, project: Path, clusters: Cluster) -> None:
    with start(
        lab,
        "submit",
        *SMALL,
        *LATER,
        "train.py",
        cwd=project,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        wait_until(lambda: len(clusters.queue()) == 2)
        wait_until(lambda: len(race(lab)["runs"]) == 2)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=100)
    assert process.returncode == 130, errors
    wait_until(lambda: not clusters.queue())
    assert trained(lab) == []
    assert race(lab)["is_over"]


@pytest.mark.slow
def test_nobody_gets_permission_after_ctrl_c(
    lab: Lab, project: Path, laptop: Laptop, clusters: Cluster
) -> None:
    """One was chosen, and Ctrl-C came while it could not be reached: `--finish` cancels it."""
    with start(
        lab,
        "submit",
        *SMALL,
        *LATER,
        "train.py",
        cwd=project,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        wait_until(lambda: len(clusters.queue()) == 2)
        wait_until(lambda: len(race(lab)["runs"]) == 2)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    found = race(lab)
    path = lab.folder / f"laptop/.local/state/paceline/first/{found['id']}.json"
    path.write_text(json.dumps({**found, "chosen": "cedar", "is_given_up": True}))
    done = laptop("submit", "--finish", found["id"])
    assert done.returncode == 130, done.stderr
    assert f"cedar: cancelled {found['runs']['cedar']}" in done.stdout
    wait_until(lambda: not clusters.queue())
    assert trained(lab) == []
    assert race(lab)["is_over"]


@pytest.mark.parametrize(
    "end", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
)
def test_a_job_whose_answer_is_lost_is_cancelled(
    lab: Lab, project: Path, clusters: Cluster, end: int
) -> None:
    """The command ends when Slurm has the job, and before it hears of it."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    before = race(lab).get("id")
    with start(lab, "submit", *SMALL, *LATER, "train.py", cwd=project, **streams) as process:
        while process.poll() is None and not clusters.queue():
            time.sleep(0.002)
        process.send_signal(end)
        _, errors = process.communicate(timeout=100)
    found = race(lab)
    assert found["id"] != before
    assert f"paceline submit --finish {found['id']}" in errors
    assert found["submissions"]
    if end == signal.SIGKILL:
        assert not found["is_over"]
        with start(lab, "submit", "--finish", found["id"], cwd=project, **streams) as process:
            wait_until(lambda: process.poll() is not None or bool(race(lab)["runs"]))
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=100)
    wait_until(lambda: not clusters.queue())
    assert race(lab)["is_over"], errors
    assert trained(lab) == []


def test_all_questions_come_before_the_first_job(
    lab: Lab, project: Path, laptop: Laptop, clusters: Cluster
) -> None:
    """A no to the last question, or a cluster without a connection: no cluster gets the job."""
    before = race(lab).get("id")
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(project)
        argv = [sys.executable, "-m", "paceline", "submit", *SMALL, *LATER, "train.py"]
        os.execve(sys.executable, argv, {**os.environ, **lab.variables})
    seen, answers = b"", [b"y\n", b"n\n"]
    with suppress(OSError):  # the terminal is gone once the command is
        while part := os.read(terminal, 4096):
            seen += part
            if answers and seen.count(b"Send it? [y/N]") > 2 - len(answers):
                os.write(terminal, answers.pop(0))
    _, status = os.waitpid(child, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 2, seen
    assert b"slurm for the first time" in seen
    assert b"cedar for the first time" in seen
    assert b"Nothing was sent" in seen
    laptop("logout", "cedar", check=True)
    done = laptop("submit", *SMALL, *LATER, "--yes", "train.py")
    assert done.returncode == 1
    assert "You are not logged in to cedar" in done.stderr
    assert race(lab).get("id") == before
    assert not clusters.queue()


def test_mistakes_are_named(laptop: Laptop, clusters: Cluster) -> None:
    for args, text in (
        (("--on", "slurm", "--first"), "needs several clusters"),
        (("--first",), "needs several clusters"),
        (
            ("--on", "slurm,cedar", "--first", "--dry-run"),
            "--dry-run cannot be combined with --first",
        ),
        (("--on", "slurm,cedar"), "This takes one cluster"),
    ):
        done = laptop("submit", *args, "train.py")
        assert done.returncode == 2, done.stderr
        assert text in done.stderr
    assert "no unfinished submission" in laptop("submit", "--finish", "nothing").stderr
    done = laptop("submit", "--on", "slurm,cedar", "--first", "-p", "nowhere", "train.py")
    assert done.returncode == 2
    assert "nowhere" in done.stderr
    assert not clusters.queue()
