"""What commands print about the mirror of a cluster: paths of the cluster, its time, and commands to type here."""

from __future__ import annotations

import io
import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import console, run_command
from paceline.cli.on_cluster import mirrored
from paceline.cli.on_cluster.on_cluster import Forwarded
from paceline.contract.typed_command import meant_for, type_again
from paceline.errors import ConnectionProblem, EnvironmentProblem
from paceline.spec.clusters import Cluster
from paceline.ssh.mirror.frames import CLAIM, FOUND, JOBS, PASS, RECORD, Frame
from paceline.ssh.mirror.mirror_folder import Mirror
from paceline.ui.web.api import Answers
from paceline.watch.viewpoint import Viewpoint, look_at

RUN = "project/default/20260101-120000-aaaa"
HOUR = 3600.0


@pytest.fixture
def heard() -> float:
    """When the cluster was last heard of: ten minutes ago."""
    return time.time() - 600


@pytest.fixture
def mirror(tmp_path: Path, heard: float) -> Mirror:
    made = Mirror(tmp_path / "mirror")
    made.create()
    details = {
        "run_id": Path(RUN).name,
        "created": heard - 2 * HOUR,
        "cwd": "/home/me/.cache/paceline/code/1/project",
        "command": ["paceline", "submit", "--gpus", "2", "train.py", "--lr", "0.1"],
        "program": "train.py",
    }
    row = ["7", "RUNNING", "", "n1", "", "2:00:00", ""]
    about = {"run": RUN, "modified": int(heard * 1e9)}
    for frame in (
        Frame(FOUND, {"scratch": "/scratch/me", "names": {}, "runs": [RUN], "time": heard}),
        Frame(RECORD, {**about, "path": "run.json"}, json.dumps(details).encode()),
        Frame(RECORD, {**about, "path": "job"}, b"7"),
        Frame(CLAIM, {"run": RUN, "number": 1, "name": "7-0"}),
        Frame(JOBS, {"jobs": {"7": row}, "problem": "", "hint": ""}),
        Frame(PASS, {"time": heard}),
    ):
        made.apply(frame)
    table = json.loads((made.base / "heard.json").read_text())
    (made.base / "heard.json").write_text(json.dumps({**table, "here": heard}))
    return made


def view(mirror: Mirror, status: str) -> Viewpoint:
    return Viewpoint("alps", mirror, lambda verb, run: "", status=lambda: status)


def shown(
    mirror: Mirror, capsys: pytest.CaptureFixture[str], *args: str, status: str = "no connection"
) -> str:
    with look_at(view(mirror, status)):
        assert run_command(args[0], list(args[1:])) == 0
    return capsys.readouterr().out


def values(mirror: Mirror, capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    return dict(json.loads(shown(mirror, capsys, *args, "--json")))


def test_without_a_connection_a_run_has_the_status_and_the_age_of_the_last_word(
    mirror: Mirror, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = [line for line in shown(mirror, capsys, "ps").splitlines() if "-aaaa" in line]
    assert "running 10m ago" in row
    assert " 2h " in row  # its age then, which does not grow
    assert "running 10m ago (n1)" in shown(mirror, capsys, "show", "last")
    assert "running " in (found := shown(mirror, capsys, "ps", status=""))
    assert "ago" not in found


def test_an_older_run_is_never_the_younger_one(
    mirror: Mirror, capsys: pytest.CaptureFixture[str], heard: float
) -> None:
    """Whenever each of them was last heard of."""
    other = "project/default/20260101-130000-bbbb"
    mirror.apply(
        Frame(
            RECORD,
            {"run": other, "modified": 1, "path": "run.json"},
            json.dumps({"run_id": Path(other).name, "created": heard - HOUR}).encode(),
        )
    )
    (mirror.base / "refreshed.json").write_text(json.dumps({RUN: heard - 1.5 * HOUR, other: heard}))
    rows = [line for line in shown(mirror, capsys, "ps").splitlines() if "20260101" in line]
    assert [rows[0].split()[0][-5:], rows[0].split()[-1]] == ["-bbbb", "1h"]
    assert "running 1h ago" in rows[1]
    assert " 2h " in rows[1]


def test_the_last_word_was_just_now(mirror: Mirror, capsys: pytest.CaptureFixture[str]) -> None:
    """The clock stands still also then."""
    table = json.loads((mirror.base / "heard.json").read_text())
    (mirror.base / "heard.json").write_text(json.dumps({**table, "here": time.time() - 30}))
    assert values(mirror, capsys, "ps")["time"] == table["there"]


def test_json_has_the_time_and_the_paths_of_the_cluster(
    mirror: Mirror, capsys: pytest.CaptureFixture[str], heard: float
) -> None:
    found = values(mirror, capsys, "ps")
    assert (found["scratch"], found["time"]) == ("/scratch/me", heard)
    assert [row["path"] for row in found["runs"]] == [f"/scratch/me/{RUN}"]
    run = values(mirror, capsys, "show", "last")
    assert run["overview"]["path"] == f"/scratch/me/{RUN}"
    assert run["place"] == f"alps:/scratch/me/{RUN}"
    assert str(mirror.base) not in json.dumps(run)


def test_commands_are_those_to_type_on_the_laptop(
    mirror: Mirror, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = "paceline submit --on alps --gpus 2 train.py --lr 0.1"
    run = values(mirror, capsys, "show", "last")
    assert run["command"] == run["commands"]["repeat"] == typed
    lines = [
        line.split(None, 1)
        for line in shown(mirror, capsys, "show", "last").splitlines()
        if line.strip()
    ]
    assert [rest for name, *rest in lines if name in ("command", "repeat")] == [[typed], [typed]]


def test_a_run_that_somebody_started_on_the_login_node_cannot_be_repeated_from_here(
    mirror: Mirror, capsys: pytest.CaptureFixture[str]
) -> None:
    path = mirror.folder / RUN / "run.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "command": ["paceline", "run", "train.py"]})
    )
    os.unlink(mirror.folder / RUN / "job")
    run = values(mirror, capsys, "show", "last")
    assert run["command"] == "paceline run train.py"
    assert not {"repeat", "resume"} & {name for name, text in run["commands"].items() if text}


def test_a_recorded_command_names_a_cluster_only_if_the_user_is_elsewhere() -> None:
    command: dict[str, Any] = {"command": ["paceline", "submit", "train.py", "a b"]}
    assert type_again(command) == "paceline submit train.py 'a b'"
    with meant_for("my cluster"):
        assert type_again(command) == "paceline submit --on 'my cluster' train.py 'a b'"
        assert type_again({"command": ["python", "train.py"]}) == "python train.py"
        assert type_again({}) == type_again({"command": "paceline submit", "args": 3}) == ""


def test_a_command_of_one_cluster_has_no_option_for_several() -> None:
    """The script may have one of the same name."""
    words = ["--first", "--gpus", "2", "--first-timeout", "5m", "--first-timeout=5m", "train.py"]
    args = ["--first", "--first-timeout", "1"]
    with meant_for("alps"):
        typed = type_again({"command": ["paceline", "submit", *words, *args], "args": args})
        assert typed == "paceline submit --on alps --gpus 2 train.py --first --first-timeout 1"
        assert (
            type_again({"command": ["paceline", "submit"], "args": args})
            == "paceline submit --on alps"
        )


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


def test_a_slow_answer_is_announced_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirrored, "PATIENCE", 0.01)
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with monkeypatch.context() as patch:
        patch.setenv("TERM", "xterm")
        with mirrored.sign_of_life("alps"):
            assert terminal.written.wait(60)
    assert "waiting for alps ..." in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")  # the answer takes its place
    assert "\n" not in terminal.getvalue()


def test_a_line_for_the_time_being_is_replaced_by_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with monkeypatch.context() as patch:
        for name, value in {"TERM": "xterm", "NO_COLOR": "1", "COLUMNS": "30"}.items():
            patch.setenv(name, value)
        console.say_for_now("waiting for a cluster with a long name ...")
        console.say_note("installing")
        console.wipe()
    assert (
        terminal.getvalue()
        == "paceline: waiting for a cluste\r\x1b[Kpaceline: installing\n".replace("cluste", "clust")
    )


@pytest.mark.parametrize(("patience", "is_terminal"), [(600.0, True), (0.0, False)])
def test_nothing_is_said_about_a_quick_answer_nor_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, patience: float, is_terminal: bool
) -> None:
    monkeypatch.setattr(mirrored, "PATIENCE", patience)
    stream = Terminal(is_terminal=is_terminal)
    monkeypatch.setattr("sys.stderr", stream)
    before = threading.active_count()
    with mirrored.sign_of_life("alps"):
        assert threading.active_count() == before + is_terminal
    assert threading.active_count() == before
    assert not stream.getvalue()


def old(
    mirror: Mirror, monkeypatch: pytest.MonkeyPatch, *line: str, is_open: bool = False, **typed: Any
) -> int:
    """Show what a mirror has, without an answer of the cluster."""
    monkeypatch.setattr("paceline.ssh.connection.Connection.is_open", lambda self: is_open)
    asked = Forwarded(["alps"], line[0], list(line), typed)
    problem = ConnectionProblem(
        "alps does not answer." if is_open else "You are not logged in to alps."
    )
    return mirrored._Show(asked, Cluster("alps", "login.alps"), mirror).show_old(problem)


@pytest.mark.parametrize(
    "typed", [("show", "run"), ("report", "name"), ("logs", "run"), ("ps", "sweep")]
)
def test_without_a_connection_a_run_that_was_never_watched_is_not_called_missing(
    mirror: Mirror,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    typed: tuple[str, str],
) -> None:
    command, option = typed
    with pytest.raises(ConnectionProblem) as raised:
        old(mirror, monkeypatch, command, "other", **{option: "other"})
    assert (
        raised.value.message
        == "You have not watched 'other' from here, and there is no connection to alps."
    )
    assert raised.value.hint == "Type: paceline login alps"
    assert not capsys.readouterr().err
    with pytest.raises(ConnectionProblem, match="alps does not answer"):
        old(mirror, monkeypatch, command, "other", is_open=True, **{option: "other"})
    assert old(mirror, monkeypatch, "show", "last") == 0
    shutil.rmtree(mirror.folder / RUN)
    with pytest.raises(ConnectionProblem, match="You have not watched any run from here"):
        old(mirror, monkeypatch, "show")


def test_a_run_that_is_over_can_be_fetched(
    mirror: Mirror, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "paceline fetch" not in shown(mirror, capsys, "show", "last")
    row = ["7", "COMPLETED", "", "n1", "", "2:00:00", ""]
    mirror.apply(Frame(JOBS, {"jobs": {"7": row}, "problem": "", "hint": ""}))
    fetch = f"paceline fetch {Path(RUN).name} --on alps"
    assert f"fetch      {fetch}\n" in shown(mirror, capsys, "show", "last")
    assert values(mirror, capsys, "show", "last")["commands"]["fetch"] == fetch


def test_what_is_not_mirrored_says_what_to_type(mirror: Mirror) -> None:
    answers = Answers(mirror.folder)
    with look_at(view(mirror, "")):
        code, cluster = answers.difference(Path(RUN).name), answers.find("api/cluster")
        with pytest.raises(EnvironmentProblem, match="The code is on alps"):
            run_command("show", ["--diff", "last"])
    fetch = f"paceline fetch {Path(RUN).name} --all --on alps"
    assert code == {
        "diff": "",
        "note": f"The code is on alps. To compare it here, fetch it: {fetch}",
    }
    assert isinstance(cluster, dict)
    assert (cluster["cluster"], cluster["command"]) == ("alps", "paceline doctor --on alps")
