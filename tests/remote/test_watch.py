"""Watching runs of a cluster from the laptop, over a real sshd: there, and in the copy here."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.contract.claims import describe_processes
from paceline.contract.run_folder import format_mark
from tests.remote.lab import Lab
from tests.slurm.harness import Cluster
from tests.until import until

Laptop = Callable[..., subprocess.CompletedProcess[str]]
START = "pid-1-abcdef"


class RunThere:
    """A run on the login node, written by hand. It counts as running as long as this process does."""

    def __init__(self, lab: Lab, run_id: str, name: str = "") -> None:
        self.lab = lab
        self.folder = lab.home / "paceline" / "project" / "default" / run_id
        for each in ("claims", "attempt-1", "events", f"job-starts/{START}"):
            (self.folder / each).mkdir(parents=True)
        about = {
            "run_id": run_id,
            "project": "project",
            "experiment": "default",
            "name": name,
            "nodes": 1,
            "nproc": 1,
            "program": "train.py",
            "created": time.time(),
            "command": ["paceline", "run", "train.py"],
        }
        (self.folder / "run.json").write_text(json.dumps(about))
        (self.folder / "environment.sh").write_text("export TOKEN=secret\n")
        (self.folder / "claims" / "1").symlink_to(START)
        (self.folder / "job-starts" / START / "process").write_text(
            describe_processes([os.getpid()])
        )
        (self.folder / "attempt-1" / "start").write_text(f"{START} -1\n")
        self.log = self.folder / "attempt-1" / "rank-0.log"
        self.print("")
        self.own()

    def own(self) -> None:
        user = pwd.getpwnam(self.lab.user)
        for path in (self.lab.home / "paceline", *(self.lab.home / "paceline").rglob("*")):
            os.chown(path, user.pw_uid, user.pw_gid, follow_symlinks=False)

    def print(self, text: str) -> None:
        with self.log.open("ab") as file, self.log.with_suffix(".times").open("ab") as times:
            times.write(format_mark(file.tell(), time.time()))
            times.flush()
            file.write(text.encode())

    def record(self, **numbers: float) -> None:
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"time": time.time(), **numbers}) + "\n")

    def end(self, verdict: str = "done") -> None:
        for path in (
            self.folder / "attempt-1" / "verdict",
            self.folder / "job-starts" / START / "verdict",
        ):
            path.write_text(verdict)
        self.own()


@pytest.fixture
def run_there(lab: Lab) -> Iterator[Callable[..., RunThere]]:
    yield lambda run_id="20260101-120000-aaaa", name="": RunThere(lab, run_id, name)
    shutil.rmtree(lab.home / "paceline", ignore_errors=True)


class Watcher:
    """A command on the laptop that goes on; its output is in files."""

    def __init__(self, lab: Lab, project: Path, name: str, *args: str, **variables: str) -> None:
        self.output, self.errors = project.parent / f"{name}.out", project.parent / f"{name}.err"
        with self.output.open("wb") as output, self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "paceline", *args],
                cwd=project,
                env={**os.environ, **lab.variables, **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
            )

    def wait_for(self, text: str, *, errors: bool = False) -> None:
        path = self.errors if errors else self.output
        until(lambda: text in path.read_text() or self.process.poll() is not None)
        assert text in path.read_text(), self.errors.read_text()

    def finish(self) -> int:
        return self.process.wait(timeout=90)


@pytest.fixture
def watch(lab: Lab, project: Path) -> Iterator[Callable[..., Watcher]]:
    """Start a command on the laptop that goes on: `watch("logs", "-f")`."""
    started: list[Watcher] = []

    def start(*args: str, **variables: str) -> Watcher:
        started.append(Watcher(lab, project, f"watcher-{len(started)}", *args, **variables))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()


def test_a_log_is_followed_there_to_its_end(
    lab: Lab, laptop: Laptop, watch: Callable[..., Watcher], run_there: Callable[..., RunThere]
) -> None:
    run = run_there()
    laptop("login", "plain", check=True)
    watcher = watch("logs", "-f", "--on", "plain", "last")
    run.print("one\n")
    watcher.wait_for("one\n")
    run.print("two\n")
    run.end()
    assert watcher.finish() == 0, watcher.errors.read_text()
    assert watcher.output.read_text() == "one\ntwo\n"
    lab.wait_until_idle()


def test_what_was_seen_is_shown_without_a_connection(
    lab: Lab,
    laptop: Laptop,
    project: Path,
    watch: Callable[..., Watcher],
    run_there: Callable[..., RunThere],
) -> None:
    run = run_there(name="digits")
    run.print("hello from there\n")
    for step in range(5):
        run.record(step=step, loss=1 / (1 + step))
    run.own()
    laptop("login", "plain", check=True)
    shown = laptop("show", "--on", "plain", "digits", check=True)
    assert f"paceline cancel {run.folder.name} --on plain" in shown.stdout
    report = laptop("report", "--on", "plain", "--light", "-o", "here.html", check=True)
    assert "hello from there" in (project / "here.html").read_text(), report.stderr
    assert laptop("ps", "--on", "plain", check=True).stdout.count("digits") == 1
    watcher = watch("ui", "--on", "plain")
    watcher.wait_for("Press Ctrl-C")
    watcher.process.send_signal(signal.SIGINT)
    assert watcher.finish() == 0
    laptop("login", "--close", check=True)
    lab.wait_until_empty()
    for command in (
        ("show", "digits"),
        ("ps",),
        ("logs", "last"),
        ("report", "--light", "-o", "later.html"),
    ):
        done = laptop(*command, "--on", "plain", check=True)
        assert "no connection to plain; showing data received until" in done.stderr
    assert f"plain:{run.folder}" in laptop("show", "--on", "plain", "digits").stdout
    seen = laptop("ps", "--on", "plain", check=True).stdout
    assert re.search(r"running \d+ s ago", seen), seen
    never = laptop("ps", "--on", "closed")
    assert never.returncode == 1  # nobody was ever logged in there
    assert "not logged in to closed" in never.stderr
    assert "hello from there" in laptop("logs", "--on", "plain", "digits", check=True).stdout
    assert "hello from there" in (project / "later.html").read_text()
    assert "not logged in" in laptop("logs", "-f", "--on", "plain", "digits").stderr
    assert "not logged in" in laptop("wait", "--on", "plain", "digits").stderr


def test_waiting_returns_how_the_run_ended(
    lab: Lab, laptop: Laptop, project: Path, run_there: Callable[..., RunThere]
) -> None:
    run = run_there(name="digits")
    laptop("login", "plain", check=True)
    watcher = Watcher(lab, project, "wait", "wait", "--on", "plain", "digits")
    time.sleep(1)
    run.end("failed")
    assert watcher.finish() == 1
    done = laptop("wait", "--on", "plain", "nothing")
    assert done.returncode == 2
    assert "There is no run 'nothing'" in done.stderr
    lab.wait_until_idle()


def test_the_browser_shows_runs_through_a_lost_connection_and_acts_there(
    lab: Lab, laptop: Laptop, project: Path, run_there: Callable[..., RunThere]
) -> None:
    run = run_there(name="digits")
    laptop("login", "plain", check=True)
    user = pwd.getpwnam(lab.user)
    job = {**os.environ, "SLURM_JOB_ID": "1"}  # not one of the processes that the login node counts
    with (
        subprocess.Popen(["sleep", "600"], user=user.pw_uid, group=user.pw_gid, env=job) as command,
        contextlib.ExitStack() as cleanup,
    ):
        cleanup.callback(command.kill)
        (run.folder / "job-starts" / START / "process").write_text(
            describe_processes([command.pid])
        )
        run.own()
        watcher = Watcher(lab, project, "ui", "ui", "--on", "plain", "--allow-actions")
        watcher.wait_for("Press Ctrl-C")
        link = re.search(r"http://127.0.0.1:\d+\S+", watcher.output.read_text())
        assert link is not None
        with httpx.Client(trust_env=False, timeout=60, follow_redirects=True) as client:
            client.get(link[0])
            base = link[0].partition("?")[0]

            def runs() -> dict[str, Any]:
                return dict(client.get(f"{base}api/runs").json())

            until(lambda: [each["status"] for each in runs()["runs"]] == ["running"])
            assert runs()["scratch"] == f"plain:{lab.home}/paceline"
            run.record(step=3, loss=0.5)
            run.own()
            until(lambda: runs()["runs"][0]["step"] == 3)
            address = f"{base}api/runs/{run.folder.name}"
            assert (
                "not listed on this machine" in client.get(f"{base}api/cluster").json()["problem"]
            )
            lab.cut()
            lab.wait_until_empty()
            until(lambda: "no connection to plain since" in runs()["scratch"])
            origin = {"origin": base[: base.index("/", 8)]}
            refused = client.post(f"{address}/stop", headers=origin)
            assert (refused.status_code, "not logged in to plain" in refused.text) == (400, True)
            assert command.poll() is None
            laptop("login", "plain", check=True)
            until(lambda: runs()["scratch"] == f"plain:{lab.home}/paceline")
            assert (
                client.post(f"{address}/stop", headers=origin)
                .json()["message"]
                .endswith("saves and stops.")
            )
            assert command.wait(timeout=60) == -signal.SIGTERM
            assert (run.folder / "cancelled").exists()
            until(lambda: runs()["runs"][0]["status"] == "cancelled")
            again = client.post(f"{address}/stop", headers=origin)
            assert (again.status_code, "has already ended" in again.text) == (400, True)
        watcher.process.send_signal(signal.SIGINT)
        assert watcher.finish() == 0
    lab.wait_until_idle()


def test_a_job_is_followed_through_the_queue(
    slurm_node: Cluster, lab: Lab, laptop: Laptop, project: Path, run_there: Callable[..., RunThere]
) -> None:
    (project / "train.py").write_text("for number in range(3): print('line', number)\n")
    laptop("login", "slurm", check=True)
    try:
        submitted = (
            "submit",
            "--on",
            "slurm",
            "--cpu",
            "--nproc",
            "1",
            "-t",
            "5",
            "-J",
            "tiny",
            "train.py",
        )
        laptop(*submitted, check=True)
        done = laptop("logs", "-f", "--on", "slurm", "tiny", check=True, timeout=300)
        assert [line for line in done.stdout.splitlines() if "line" in line] == [
            "line 0",
            "line 1",
            "line 2",
        ]
        assert laptop("wait", "--on", "slurm", "tiny", timeout=300).returncode == 0
        assert "done" in laptop("show", "--on", "slurm", "tiny", check=True).stdout
        rows = laptop("ps", "--on", "slurm", "--json", check=True)
        assert [row["status"] for row in json.loads(rows.stdout)["runs"]] == ["done"]
    finally:
        slurm_node.clear()


@pytest.mark.parametrize(
    "number",
    [
        *(
            pytest.param(number, marks=pytest.mark.slow)
            for number in (signal.SIGINT, signal.SIGTERM)
        ),
        signal.SIGKILL,
    ],
)
def test_no_reader_stays_on_the_login_node(
    lab: Lab,
    laptop: Laptop,
    project: Path,
    run_there: Callable[..., RunThere],
    number: signal.Signals,
) -> None:
    run = run_there()
    run.print("one\n")
    laptop("login", "plain", check=True)
    following = Watcher(lab, project, "follow", "logs", "-f", "--on", "plain")
    viewing = Watcher(lab, project, "view", "ui", "--on", "plain")
    following.wait_for("one\n")
    viewing.wait_for("Press Ctrl-C")
    for watcher in (following, viewing):
        watcher.process.send_signal(number)
        watcher.finish()
    time.sleep(1)
    for _ in range(3):  # what nobody reads any more ends with its next line, at the latest
        run.print("more\n")
        time.sleep(1)
    lab.wait_until_idle()
