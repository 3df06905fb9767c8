"""The question before something goes to a cluster."""

from __future__ import annotations

import sys

import pytest

from paceline.cli.travel_question import confirm


def test_ctrl_c_at_the_question_is_a_no(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Terminal:
        def readline(self) -> str:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", Terminal())
    with pytest.raises(KeyboardInterrupt):
        confirm()
    assert capsys.readouterr().err == "Send it? [y/N] \npaceline: nothing was sent\n"
