"""What a cluster answers may be anything: it costs one error, and sends nothing that was not meant for it."""

from __future__ import annotations

import io
import json
import shlex
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
from paceline.ssh.data_push.sent_data import SentData
from paceline.ssh.fetch.remote_files import RemoteFiles

from paceline.cli.commands import data_push
from paceline.cli.on_cluster import cluster_race, on_cluster, submit_first
from paceline.cli.on_cluster.cluster_race import Contender
from paceline.cli.on_cluster.on_cluster import Forwarded
from paceline.contract.files.sent_code import SentCode
from paceline.errors import ConnectionProblem, EnvironmentProblem, PacelineError
from paceline.spec.clusters import Cluster
from paceline.ssh import conversation, forwarded_command
from paceline.ssh.cluster_race_record import ClusterRaceRecord
from paceline.ssh.code_push import delivery
from paceline.ssh.code_push.project_code import Parcel, describe_files
from paceline.ssh.connection import Connection
from paceline.ssh.conversation import Conversation
from paceline.ssh.fetch import frames
from paceline.ssh.installation import Installation
from paceline.ssh.remote.code_store import key_of
from paceline.ssh.request import Request

UNCLEAR = "alps gave an answer that Paceline does not understand"
STATE = {
    "decision": None,
    "waits": False,
    "over": False,
    "status": "queued",
    "detail": "",
    "reason": "",
}
RUN = "20260101-000000-abcd"


class Here(Connection):
    """A connection to this machine."""

    def command(self, script: str, *, terminal: bool = False) -> list[str]:
        return ["sh", "-c", script]

    def watched(self, *_: Any) -> Any:
        return nullcontext()

    def is_open(self) -> bool:
        return True


ALPS = Here(Cluster("alps", "login.alps"))


def says(*answers: object) -> str:
    """Return a script that reads a line and prints an answer, as often as there are answers."""
    texts = [each if isinstance(each, str) else json.dumps(each) for each in answers]
    return "".join(f"read -r line; printf '%s\\n' {shlex.quote(text)}\n" for text in texts)


class Answers(Installation):
    def command(self, *args: str) -> str:
        return f"{self.folder}cat >/dev/null\n"


@pytest.fixture
def parcel(guard: None, tmp_path: Path) -> Parcel:
    (tmp_path / "secret").write_text("hush")
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "train.py").write_text("pass\n")
    return Parcel(
        tmp_path / "project", SentCode("p", describe_files(tmp_path / "project", ["train.py"]))
    )


def deliver(parcel: Parcel, *answers: object) -> str | None:
    made = Answers("python", "/cache", says(*answers))
    request = Request(["ps"], ".", parcel.code)
    return delivery._deliver(ALPS, made, request, parcel, note=lambda _: None, heard=lambda _: None)


@pytest.mark.parametrize(
    "answer",
    [
        {"hello": 1},
        {"request": 1},
        {"request": None},
        {"missing": ["x"]},
        {"missing": "x"},
        {"missing": None},
        {"missing": {"x": "../../etc/passwd"}},
        {"missing": {"x": "../secret"}},
        {"missing": {"x": ["train.py"]}},
        {"missing": {"x": "train.py"}},
    ],
)
def test_the_answer_to_a_request(parcel: Parcel, answer: object) -> None:
    with pytest.raises(ConnectionProblem, match=UNCLEAR):
        deliver(parcel, answer)


def test_a_request_that_arrives(parcel: Parcel) -> None:
    key = key_of(parcel.code.files["train.py"])
    assert deliver(parcel, {"missing": {key: "train.py"}}, {"request": "request-1"}) == "request-1"


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        *(
            ({"target": "/data", "exists": False, "free": 9, "rsync": "rsync", **each}, UNCLEAR)
            for each in (
                {"free": "9"},
                {"free": None},
                {"free": True},
                {"target": 1},
                {"exists": "no"},
                {"rsync": ["rsync"]},
            )
        ),
        ({}, UNCLEAR),
        ([], UNCLEAR),
        ("x", UNCLEAR),
        ("[" * 50_000, UNCLEAR),
        ({"error": "No room."}, "No room."),
    ],
)
def test_the_answer_about_the_place_of_data(
    guard: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: object, text: str
) -> None:
    monkeypatch.setattr(
        on_cluster,
        "converse",
        lambda _: Conversation(ALPS, says(answer).removeprefix("read -r line; ")),
    )
    with pytest.raises(PacelineError, match=text) as caught:
        data_push._ask(
            Forwarded(["alps"], "data_push", [], {}),
            SentData(tmp_path, is_folder=True, name="data"),
        )
    assert isinstance(caught.value, EnvironmentProblem if "error" in answer else ConnectionProblem)  # type: ignore[operator]


@pytest.fixture
def record(guard: None, tmp_path: Path) -> Iterator[ClusterRaceRecord]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        yield ClusterRaceRecord.begin(None)


@pytest.mark.parametrize(
    "answer",
    [
        {},
        [],
        "x",
        *(
            {**STATE, **each}
            for each in ({"waits": 1}, {"status": None}, {"decision": 1}, {"detail": []})
        ),
        *({key: value for key, value in STATE.items() if key != left} for left in STATE),
    ],
)
def test_the_answers_of_a_contest(
    record: ClusterRaceRecord,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    answer: object,
) -> None:
    monkeypatch.setattr(cluster_race, "converse", lambda *_: Conversation(ALPS, says(answer)))
    contender = Contender("alps", RUN, "", None)
    contender._say(contender._exchange("state"))
    contender.close()
    assert (
        capsys.readouterr().err
        == "alps: gave no usable answer; without permission it does not train\n"
    )


def test_a_state_that_is_understood(
    record: ClusterRaceRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_race, "converse", lambda *_: Conversation(ALPS, says(STATE)))
    contender = Contender("alps", RUN, "", None)
    assert contender._exchange("state") == STATE
    contender.close()


@pytest.mark.parametrize(
    "answer",
    [
        {},
        [],
        {"run": RUN},
        {"run": 1, "job": "7"},
        {"run": "\x1b]0;x\x07", "job": "7"},
        {"run": "$(x)"},
    ],
)
def test_the_answer_to_a_submission_of_a_contest(
    record: ClusterRaceRecord,
    parcel: Parcel,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    answer: object,
) -> None:
    said = says("first line", answer).replace("read -r line; ", "")
    monkeypatch.setattr(forwarded_command, "converse", lambda *_, **__: Conversation(ALPS, said))
    request = Request(["submit", "train.py"], ".", parcel.code, submits=True)
    problem = submit_first._submit(ALPS, request, parcel, record)
    assert problem is not None
    assert problem.message == "alps gave no usable answer."
    assert "\x1b" not in "".join(capsys.readouterr())


@pytest.mark.parametrize("answer", [{}, {"run": 1}, {"run": "../../x"}])
def test_the_answer_about_a_submission(
    guard: None, monkeypatch: pytest.MonkeyPatch, answer: object
) -> None:
    said = says(answer).replace("read -r line; ", "")
    monkeypatch.setattr(cluster_race, "converse", lambda *_: Conversation(ALPS, said))
    with pytest.raises(ValueError, match="names no run"):
        cluster_race.ask_outcome("alps", "1", None)


def test_a_line_without_end_is_an_error(guard: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert min(conversation.MAX_LINE, frames.MAX_LINE) >= 64 << 20
    with Conversation(ALPS, "echo first; yes | tr -d '\\n'\n") as talk:
        assert talk.read_line() == b"first\n"
        with pytest.raises(
            ConnectionProblem, match="The answer of alps is too long: more than 1 MB"
        ):
            talk.read_line(1 << 20)
    for module in (frames, "paceline.ssh.fetch.remote_files"):
        name = module if isinstance(module, str) else module.__name__
        monkeypatch.setattr(f"{name}.MAX_LINE", 1 << 20)
    with Conversation(ALPS, "read -r line; yes | tr -d '\\n'\n") as talk:
        with pytest.raises(
            ConnectionProblem, match="The answer of alps is too long: more than 1 MB"
        ):
            RemoteFiles(talk).list("records")
    with pytest.raises(EOFError):
        frames.read_line(cast(Any, io.BytesIO(b"[" * 100_000)))
