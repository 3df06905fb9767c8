"""`submit --on` and its answer: what the laptop does before and after it has arrived."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.contract.files.sent_code import SentCode
from paceline.errors import ConnectionProblem
from paceline.spec.clusters import Cluster
from paceline.ssh import forwarded_command
from paceline.ssh.code_push.project_code import Parcel
from paceline.ssh.connection import Answer
from paceline.ssh.installation import Installation
from paceline.ssh.request import FOLLOW, WAIT, Request

RUN = "/scratch/p/default/20260101-000000-abcd"
LOST = 255


class Login:
    """A login node that answers as `codes` say; `requests` are those that have reached it."""

    cluster = Cluster("alps", "alps")

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.codes: list[int] = []
        self.is_up = True

    def is_open(self) -> bool:
        return self.is_up

    def call(self, script: str, **_: Any) -> Answer:
        return Answer(0, json.dumps({"folder": RUN, "job": "7"}).encode(), "")

    def deliver(self, _: Any, request: Request, *__: Any, **___: Any) -> tuple[Installation, str]:
        self.requests.append(request)
        return Installation("python", "/cache", "/cache/0", ""), "request-0"

    def carry_out(self, *_: Any) -> int:
        code = self.codes.pop(0)
        self.is_up = code != LOST
        return code

    def submit(self, awaits: str = "") -> int:
        self.is_up = True
        code = SentCode("p", {})
        args = ["submit", *([f"--{awaits}"] if awaits else []), "train.py"]
        request = Request(args, ".", code, {"A": "b"}, {"KEY": "hush"}, submits=True, awaits=awaits)
        return forwarded_command.forward(self, request, Parcel(Path(), code), note=lambda _: None)  # type: ignore[arg-type]


@pytest.fixture
def login(guard: None, tmp_path: Path) -> Iterator[Login]:
    made = Login()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        patch.setattr(forwarded_command, "deliver", made.deliver)
        patch.setattr(forwarded_command, "_carry_out", made.carry_out)
        patch.setattr(forwarded_command, "_has_ended", lambda *_: made.is_up)
        patch.setattr(
            forwarded_command,
            "recorded_installation",
            lambda _: Installation("python", "/cache", "/cache/0", ""),
        )
        yield made


@pytest.mark.parametrize(("awaits", "more"), [(WAIT, []), (FOLLOW, ["--follow"])])
def test_the_exit_code_is_that_of_the_run(login: Login, awaits: str, more: list[str]) -> None:
    """Once it is submitted, a second request waits for it, without secrets."""
    login.codes = [0, 75]
    assert login.submit(awaits) == 75
    submitted, waited = login.requests
    assert submitted.submission
    assert list(waited.args) == ["submit", f"--await={RUN}", *more]
    assert (waited.submission, waited.submits, dict(waited.secrets)) == ("", False, {})
    assert dict(waited.variables) == {"A": "b"}


def test_a_repeat_waits_for_the_run_that_was_submitted_earlier(login: Login) -> None:
    login.codes = [LOST]
    with pytest.raises(ConnectionProblem, match="so the job may or may not be in the queue"):
        login.submit(WAIT)
    login.codes = [0, 1]  # it was submitted, and has failed
    assert login.submit(WAIT) == 1
    first, again, _ = login.requests
    assert first.submission == again.submission


@pytest.mark.parametrize(("awaits", "command"), [(WAIT, "wait"), (FOLLOW, "logs -f")])
def test_a_link_that_is_lost_during_the_wait(login: Login, awaits: str, command: str) -> None:
    """The job is known to be there, so the error says how to wait for it, and a repeat is one more job."""
    login.codes = [0, LOST]
    with pytest.raises(ConnectionProblem) as caught:
        login.submit(awaits)
    assert "may or may not be in the queue" not in caught.value.message
    assert (
        "20260101-000000-abcd is submitted and continues without this command."
        in caught.value.message
    )
    assert (
        caught.value.hint
        == f"Type: paceline login alps; then: paceline {command} 20260101-000000-abcd --on alps"
    )
    login.codes = [0, 0]
    assert login.submit(awaits) == 0
    assert login.requests[0].submission != login.requests[2].submission


def test_nobody_waits_for_a_job_that_was_refused(
    login: Login, capsys: pytest.CaptureFixture[str]
) -> None:
    login.codes = [2]
    assert login.submit(WAIT) == 2
    assert len(login.requests) == 1


def test_the_other_side_does_not_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from paceline.launch.confirmation import submission

    assert not submission.is_carried_out_here()
    monkeypatch.setattr(submission, "_descriptor", [])
    monkeypatch.setattr(submission, "_begun", [])
    assert submission.begin_submission(tmp_path / "a1") is None
    submission.note_job(submission.RunFolder(Path(RUN)), "7")
    assert submission.is_carried_out_here()
    assert submission.read_run((tmp_path / "a1").read_bytes()) == Path(RUN)
