"""Watching runs of a cluster from the laptop, over a real sshd: the mirror is complete whatever happens to the link."""

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
from paceline.contract.files.log_times import format_mark
from tests.remote.lab import Lab
from tests.remote.relay import Relay
from tests.slurm.harness import Cluster

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
        wait_until(lambda: text in path.read_text() or self.process.poll() is not None)
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


def wait_until(condition: Callable[[], object], timeout: float = 90) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def test_a_log_is_followed_to_its_end_through_cuts(
    lab: Lab, laptop: Laptop, link: Relay, project: Path, run_there: Callable[..., RunThere]
) -> None:
    """Cut in the middle of a line, and in the middle of a frame: no line is lost, and none comes twice."""
    run = run_there()
    laptop("login", "link", check=True)
    watcher = Watcher(lab, project, "follow", "logs", "-f", "--on", "link", "last")
    expected = []

    def say(text: str, end: str = "\n") -> None:
        run.print(text + end)
        if end:
            expected.append(text)

    say("first")
    watcher.wait_for("first\n")
    run.print("half of ")  # a line that is cut
    time.sleep(1.5)
    link.cut()
    watcher.wait_for("no connection to link since", errors=True)
    lab.wait_until_empty()
    run_there("20260101-130000-bbbb").print("another run, which is the last one now\n")
    run.print("a line\n")
    expected.append("half of a line")
    link.restore()
    laptop("login", "link", check=True)
    watcher.wait_for("half of a line\n")
    link.delay = 0.02
    for number in range(2):  # much at once, which is cut on its way
        received = link.received
        for line in range(3000):
            say(f"{number} {line} {os.urandom(40).hex()}")
        wait_until(lambda start=received: link.received > start + 30_000)
        link.cut()
        lab.wait_until_empty()
        link.restore()
        laptop("login", "link", check=True)
    say("last")
    run.end()
    assert watcher.finish() == 0, watcher.errors.read_text()
    assert watcher.output.read_text().splitlines() == expected
    assert "the connection to link is back" in watcher.errors.read_text()
    lab.wait_until_idle()


def test_what_was_seen_is_shown_without_a_connection(
    lab: Lab, laptop: Laptop, project: Path, run_there: Callable[..., RunThere]
) -> None:
    run = run_there(name="digits")
    run.print("hello from there\n")
    for step in range(5):
        run.record(step=step, loss=1 / (1 + step))
    assert "not logged in to plain" in laptop("show", "--on", "plain").stderr
    laptop("login", "plain", check=True)
    shown = laptop("show", "--on", "plain", "digits", check=True)
    assert "running" in shown.stdout
    assert f"plain:{run.folder}" in shown.stdout
    assert f"paceline cancel {run.folder.name} --on plain" in shown.stdout
    report = laptop("report", "--on", "plain", "--light", "-o", "here.html", check=True)
    assert "hello from there" in (project / "here.html").read_text(), report.stderr
    numbers = laptop("show", "--on", "plain", "--openmetrics", check=True)
    assert "paceline_" in numbers.stdout
    laptop("logout", check=True)
    lab.wait_until_empty()
    for command in (
        ("show", "digits"),
        ("ps",),
        ("logs", "last"),
        ("report", "--light", "-o", "later.html"),
    ):
        done = laptop(*command, "--on", "plain", check=True)
        assert "no connection to plain; showing data received until" in done.stderr
    both = laptop("ps", "--on", "plain,closed")
    assert both.returncode == 1  # nobody was ever logged in to the other one
    assert re.search(r"plain:\n.*digits", both.stdout, re.DOTALL), both.stdout
    assert both.stdout.endswith("closed:\n")
    assert "no connection to plain; showing data received until" in both.stderr
    assert "not logged in to closed" in both.stderr
    assert "hello from there" in laptop("logs", "--on", "plain", "digits", check=True).stdout
    assert "hello from there" in (project / "later.html").read_text()
    assert "not logged in" in laptop("logs", "-f", "--on", "plain", "digits").stderr
    assert "not logged in" in laptop("wait", "--on", "plain", "digits").stderr


@pytest.mark.slow
def test_without_a_connection_each_run_is_as_old_as_its_own_copy(
    lab: Lab, laptop: Laptop, run_there: Callable[..., RunThere]
) -> None:
    older, newer, _ = (run_there(f"20260101-12000{number}-aaa{number}") for number in range(3))
    for run in (older, newer):
        run.record(step=1, loss=0.5)
    newer.own()
    laptop("login", "plain", check=True)
    laptop("show", "--on", "plain", older.folder.name, check=True)
    (table,) = (lab.folder / "laptop" / ".cache" / "paceline" / "mirror" / "plain").glob(
        "*/refreshed.json"
    )
    table.write_text(
        json.dumps({run: moment - 7200 for run, moment in json.loads(table.read_text()).items()})
    )
    laptop("show", "--on", "plain", newer.folder.name, check=True)
    laptop("logout", check=True)
    listed = laptop("ps", "--on", "plain", check=True)
    assert re.search(rf"{older.folder.name} +running 2h ago", listed.stdout), listed.stdout
    assert re.search(rf"{newer.folder.name} +running \d+ s ago", listed.stdout), listed.stdout
    assert "no step for" not in listed.stdout
    assert len(listed.stdout.splitlines()) == 3
    assert "only runs that you have watched from here are listed" in listed.stderr
    moments = [
        laptop("show", "--on", "plain", run.folder.name, check=True).stderr
        for run in (older, newer)
    ]
    assert moments[0] != moments[1]
    for run in (older, newer):
        run.end()
    laptop("login", "plain", check=True)
    # the third one is live
    assert "no such runs" not in laptop("ps", "--live", "--on", "plain", check=True).stderr
    laptop("logout", check=True)
    # nobody has watched it
    assert "no such runs" in laptop("ps", "--live", "--on", "plain", check=True).stderr


def test_only_what_views_need_comes_here(
    lab: Lab, laptop: Laptop, run_there: Callable[..., RunThere]
) -> None:
    run = run_there()
    (run.folder / "work").mkdir()
    (run.folder / "work" / "weights.bin").write_bytes(bytes(100))
    (run.folder / "attempt-1" / "rank-1.log").symlink_to("/etc/passwd")
    os.mkfifo(run.folder / "attempt-1" / "rank-2.log")
    checkpoint = run.folder / "checkpoints" / "step-00000010"
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes(bytes(100))
    (checkpoint / "complete.json").write_text("{}")
    run.own()
    laptop("login", "plain", check=True)
    laptop("show", "--on", "plain", check=True)
    (mirror,) = (lab.folder / "laptop" / ".cache" / "paceline" / "mirror" / "plain").iterdir()
    here = mirror / "runs" / "project" / "default" / run.folder.name
    found = {
        str(path.relative_to(here))
        for path in mirror.joinpath("runs").rglob("*")
        if not path.is_dir()
    }
    wanted = {
        "run.json",
        "claims/1",
        f"job-starts/{START}/process",
        "attempt-1/start",
        "attempt-1/rank-0.log",
        "attempt-1/rank-0.times",
        "checkpoints/step-00000010/complete.json",
    }
    assert found == wanted
    assert mirror.stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_two_watchers_share_one_reader_and_the_second_takes_over(
    lab: Lab, laptop: Laptop, project: Path, run_there: Callable[..., RunThere]
) -> None:
    run = run_there()
    run.print("one\n")
    laptop("login", "plain", check=True)
    watchers = [
        Watcher(lab, project, name, "logs", "-f", "--on", "plain", "last") for name in ("a", "b")
    ]
    for watcher in watchers:
        watcher.wait_for("one\n")
    run.print("two\n")
    for watcher in watchers:
        watcher.wait_for("two\n")
    wait_until(lambda: sum(" run request-" in line for line in lab.processes()) == 1)
    reader = next(line for line in lab.processes() if " run request-" in line)
    os.kill(int(reader.split()[0]), signal.SIGKILL)  # the one that follows begins again
    run.print("three\n")
    for watcher in watchers:
        watcher.wait_for("three\n")
    holder = next(each for each in watchers if "no connection" in each.errors.read_text())
    other = next(each for each in watchers if each is not holder)
    holder.process.kill()
    holder.process.wait()
    run.print("four\n")
    other.wait_for("four\n")
    run.end()
    assert other.finish() == 0
    assert other.output.read_text() == "one\ntwo\nthree\nfour\n"
    lab.wait_until_idle()


@pytest.mark.parametrize("is_connected", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_following_a_run_that_was_removed_ends(
    laptop: Laptop,
    link: Relay,
    watch: Callable[..., Watcher],
    run_there: Callable[..., RunThere],
    is_connected: bool,
) -> None:
    """What had arrived is printed, also a line without an end."""
    run = run_there()
    run.print("one\nhalf of a line")
    laptop("login", "link", check=True)
    lab, watchers = (
        run.lab,
        [watch("logs", "-f", "--on", "link", "last"), watch("wait", "--on", "link", "last")],
    )
    watchers[0].wait_for("one\n")
    mirrors = lab.folder / "laptop" / ".cache" / "paceline" / "mirror" / "link"
    wait_until(lambda: len(list(mirrors.glob("*/following-*.json"))) == 2)  # both have the run
    if not is_connected:
        link.cut()
        watchers[0].wait_for("no connection to link since", errors=True)
        lab.wait_until_empty()
    shutil.rmtree(run.folder)
    if not is_connected:
        link.restore()
        laptop("login", "link", check=True)
    for watcher in watchers:
        assert watcher.finish() == 1, watcher.errors.read_text()
        errors = watcher.errors.read_text()
        assert re.search(rf"paceline: error: link: .*{run.folder}.*\n  .*paceline ps", errors), (
            errors
        )
    assert watchers[0].output.read_text() == "one\nhalf of a line\n"
    lab.wait_until_idle()


def test_a_link_that_falls_silent_is_noticed_on_both_sides(
    laptop: Laptop, link: Relay, watch: Callable[..., Watcher], run_there: Callable[..., RunThere]
) -> None:
    """ssh notices nothing here: its own time is longer."""
    run = run_there()
    run.print("one\n")
    laptop("login", "link", check=True)
    watcher = watch("logs", "-f", "--on", "link", "last", PACELINE_SILENCE="5")
    watcher.wait_for("one\n")
    link.stall()
    run.print("two\n")
    watcher.wait_for("no connection to link since", errors=True)
    wait_until(lambda: not any(" run request-" in line for line in run.lab.processes()))
    link.resume()
    watcher.wait_for("two\n")
    run.print("three\n")
    run.end()
    assert watcher.finish() == 0, watcher.errors.read_text()
    assert watcher.output.read_text() == "one\ntwo\nthree\n"
    run.lab.wait_until_idle()


def test_waiting_returns_how_the_run_ended(
    lab: Lab, laptop: Laptop, project: Path, run_there: Callable[..., RunThere]
) -> None:
    run = run_there(name="digits")
    laptop("login", "plain", check=True)
    watcher = Watcher(lab, project, "wait", "wait", "--on", "plain", "digits")
    wait_until(lambda: any(" run request-" in line for line in lab.processes()))
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
        watcher = Watcher(
            lab, project, "ui", "ui", "--on", "plain", "--no-browser", "--allow-actions"
        )
        watcher.wait_for("Press Ctrl-C")
        link = re.search(r"http://127.0.0.1:\d+\S+", watcher.output.read_text())
        assert link is not None
        with httpx.Client(trust_env=False, timeout=60, follow_redirects=True) as client:
            client.get(link[0])
            base = link[0].partition("?")[0]

            def runs() -> dict[str, Any]:
                return dict(client.get(f"{base}api/runs").json())

            wait_until(lambda: [each["status"] for each in runs()["runs"]] == ["running"])
            assert runs()["scratch"] == f"plain:{lab.home}/paceline"
            run.record(step=3, loss=0.5)
            run.own()
            wait_until(lambda: runs()["runs"][0]["step"] == 3)
            address = f"{base}api/runs/{run.folder.name}"
            assert (
                "not listed on this machine" in client.get(f"{base}api/cluster").json()["problem"]
            )
            lab.cut()
            lab.wait_until_empty()
            wait_until(lambda: "no connection to plain since" in runs()["scratch"])
            origin = {"origin": base[: base.index("/", 8)]}
            refused = client.post(f"{address}/stop", headers=origin)
            assert (refused.status_code, "not logged in to plain" in refused.text) == (400, True)
            assert command.poll() is None
            laptop("login", "plain", check=True)
            wait_until(lambda: runs()["scratch"] == f"plain:{lab.home}/paceline")
            assert (
                client.post(f"{address}/stop", headers=origin)
                .json()["message"]
                .endswith("saves and stops.")
            )
            assert command.wait(timeout=60) == -signal.SIGTERM
            assert (run.folder / "cancelled").exists()
            wait_until(lambda: runs()["runs"][0]["status"] == "cancelled")
            again = client.post(f"{address}/stop", headers=origin)
            assert (again.status_code, "has already ended" in again.text) == (400, True)
        watcher.process.send_signal(signal.SIGINT)
        assert watcher.finish() == 0
    lab.wait_until_idle()


def test_all_watchers_together_ask_slurm_once_a_minute(
    lab: Lab, laptop: Laptop, project: Path, run_there: Callable[..., RunThere]
) -> None:
    """Also if it does not answer."""
    with (project / "paceline.toml").open("a") as file:
        file.write('[profiles.mute]\nhost = "plain"\nsetup = "PATH=$HOME/mute:$PATH"\n')
    (lab.home / "mute").mkdir()
    (lab.home / "mute" / "squeue").write_text(
        "#!/bin/sh\necho asked >>~/asked\necho down >&2\nexit 1\n"
    )
    (lab.home / "mute" / "squeue").chmod(0o755)
    runs = [run_there(f"20260101-12000{number}-aaa{number}") for number in range(2)]
    laptop("login", "plain", check=True)
    try:
        for number, run in enumerate(runs):
            (run.folder / "job").write_text(str(number + 1))
            run.print("one\n")
            run.own()
        names = [run.folder.name for run in runs]
        watchers = [
            Watcher(lab, project, name, "logs", "-f", "--on", "mute", name) for name in names
        ]
        shown = laptop("show", "--on", "mute", names[0], check=True).stdout
        assert "unknown" in shown
        for watcher, run in zip(watchers, runs, strict=True):
            watcher.wait_for("one\n")
            run.print("two\n")
            watcher.wait_for("two\n")
        assert (lab.home / "asked").read_text() == "asked\n"
        for watcher, run in zip(watchers, runs, strict=True):
            run.end()
            assert watcher.finish() == 0
    finally:
        shutil.rmtree(lab.home / "mute")
        (lab.home / "asked").unlink(missing_ok=True)
        shutil.rmtree(f"/dev/shm/paceline-{pwd.getpwnam(lab.user).pw_uid}", ignore_errors=True)
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
        laptop("logout", check=True)
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
    watcher = Watcher(lab, project, "follow", "logs", "-f", "--on", "plain")
    watcher.wait_for("one\n")
    watcher.process.send_signal(number)
    watcher.finish()
    lab.wait_until_idle()
