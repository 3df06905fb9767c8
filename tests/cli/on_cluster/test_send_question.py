"""The question before something goes to a cluster."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.cli.on_cluster.send_question import ask_first, confirm
from paceline.contract.files.sent_code import SentCode
from paceline.launch.secrets.declared import NO_SECRETS
from paceline.spec.clusters import Cluster
from paceline.ssh.code_push.project_code import Parcel


@pytest.fixture
def nobody(guard: None, tmp_path: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path))
        patch.setattr(sys, "stdin", io.StringIO())
        yield


def test_it_is_known_whether_the_size_of_the_code_was_said(
    nobody: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parcel = Parcel(tmp_path, SentCode("project", {"train.py": ("file", 6_700_000, "0")}))
    cluster = Cluster("alps", "alps")
    assert ask_first(cluster, parcel, NO_SECRETS, code=True, yes=False)
    assert "1 file, 6.7 MB (train.py 6.7 MB)" in capsys.readouterr().err
    assert not ask_first(cluster, parcel, NO_SECRETS, code=True, yes=False)
    assert capsys.readouterr().err == ""


def test_ctrl_c_at_the_question_is_a_no(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal:
        def readline(self) -> str:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", Terminal())
    with pytest.raises(KeyboardInterrupt):
        confirm()
    assert capsys.readouterr().err == "Send it? [y/N] \npaceline: nothing was sent\n"
