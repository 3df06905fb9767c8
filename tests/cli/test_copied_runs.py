"""What commands print about the copy of runs of a cluster: paths of the cluster, its time, and commands to type here."""

from __future__ import annotations

import io
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import run_command
from paceline.spec.shell_text import meant_for
from paceline.ui.web.app import read_cluster
from paceline.watch.details import type_again
from paceline.watch.origin import NEWS, ClusterCopy, show
from tests.cluster_copies import copy_of_run, say_state

RUN = "project/default/20260101-120000-aaaa"
HOUR = 3600.0


@pytest.fixture
def heard() -> float:
    """When the cluster was last heard of: ten minutes ago."""
    return time.time() - 600


@pytest.fixture
def copy(tmp_path: Path, heard: float) -> ClusterCopy:
    details = {
        "run_id": Path(RUN).name,
        "created": heard - 2 * HOUR,
        "cwd": "/home/me/.cache/paceline/code/1/project",
        "command": ["paceline", "submit", "--gpus", "2", "train.py", "--lr", "0.1"],
        "program": "train.py",
    }
    return copy_of_run(tmp_path, RUN, details, heard=heard)


def shown(copy: ClusterCopy, capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with show(copy):
        assert run_command(list(args)) == 0
    return capsys.readouterr().out


def values(copy: ClusterCopy, capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    return dict(json.loads(shown(copy, capsys, *args, "--json")))


def hear(copy: ClusterCopy, here: float, problem: str = "") -> None:
    news = {**copy.news(), "here": here, "problem": problem}
    (copy.base / NEWS).write_text(json.dumps(news))


def test_without_a_connection_a_run_has_the_status_and_the_age_of_the_last_word(
    copy: ClusterCopy, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = [line for line in shown(copy, capsys, "ps").splitlines() if "-aaaa" in line]
    assert "running 10m ago" in row
    assert " 2h " in row  # its age then, which does not grow
    assert "running 10m ago (n1)" in shown(copy, capsys, "show", "last")
    hear(copy, time.time())
    assert "running " in (found := shown(copy, capsys, "ps"))
    assert "ago" not in found


def test_the_clock_stands_still_without_a_connection(
    copy: ClusterCopy, capsys: pytest.CaptureFixture[str], heard: float
) -> None:
    hear(copy, time.time() - 30, "no connection to alps")
    found = values(copy, capsys, "ps")
    assert found["time"] == heard
    assert values(copy, capsys, "show", "last")["place"] == f"alps:/scratch/me/{RUN}"


def test_commands_are_those_to_type_on_the_laptop(
    copy: ClusterCopy, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = "paceline submit --on alps --gpus 2 train.py --lr 0.1"
    run = values(copy, capsys, "show", "last")
    assert run["command"] == run["commands"]["repeat"] == typed
    lines = [
        line.split(None, 1)
        for line in shown(copy, capsys, "show", "last").splitlines()
        if line.strip()
    ]
    assert [rest for name, *rest in lines if name in ("command", "repeat")] == [[typed], [typed]]


def test_a_run_that_somebody_started_on_the_login_node_cannot_be_repeated_from_here(
    copy: ClusterCopy, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copy.scratch / RUN / "run.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "command": ["paceline", "run", "train.py"]})
    )
    os.unlink(copy.scratch / RUN / "job")
    run = values(copy, capsys, "show", "last")
    assert run["command"] == "paceline run train.py"
    assert not {"repeat", "resume"} & {name for name, text in run["commands"].items() if text}


def test_a_recorded_command_names_a_cluster_only_if_the_user_is_elsewhere() -> None:
    command: dict[str, Any] = {"command": ["paceline", "submit", "train.py", "a b"]}
    assert type_again(command) == "paceline submit train.py 'a b'"
    with meant_for("my cluster"):
        assert type_again(command) == "paceline submit --on 'my cluster' train.py 'a b'"
        assert type_again({"command": ["python", "train.py"]}) == "python train.py"
        assert type_again({}) == type_again({"command": "paceline submit", "args": 3}) == ""


class Terminal(io.StringIO):
    """Tells when something is written to it."""

    def __init__(self, *, is_terminal: bool = True) -> None:
        super().__init__()
        self.written, self._is_terminal = threading.Event(), is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        self.written.set()
        return super().write(text)


def test_a_run_that_is_over_can_be_fetched(
    copy: ClusterCopy, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "paceline fetch" not in shown(copy, capsys, "show", "last")
    say_state(copy, "COMPLETED")
    fetch = f"paceline fetch {Path(RUN).name} --on alps"
    assert f"fetch      {fetch}\n" in shown(copy, capsys, "show", "last")
    assert values(copy, capsys, "show", "last")["commands"]["fetch"] == fetch


def test_the_cluster_of_a_copy_says_what_to_type(copy: ClusterCopy) -> None:
    with show(copy):
        cluster = read_cluster({})
    assert isinstance(cluster, dict)
    assert (cluster["cluster"], cluster["command"]) == ("alps", "paceline doctor --on alps")
