"""What is free on the cluster: one answer of sinfo for all pages, for a minute."""

from __future__ import annotations

import pytest

from paceline.errors import ClusterError
from paceline.watch import scheduler
from paceline.watch.scheduler import query_node_use


@pytest.mark.parametrize("fails", [False, True])
def test_slurm_is_asked_once_a_minute(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def ask() -> str:
        calls.append("sinfo")
        if fails:
            raise ClusterError("It is busy.")
        return ""

    def look() -> object:
        try:
            return query_node_use()
        except ClusterError as error:
            return error.message

    monkeypatch.setattr(scheduler, "ask_node_use", ask)
    # asking more often for jobs does not ask more often for nodes
    monkeypatch.setattr(scheduler, "poll_interval", lambda: 1.0)
    monkeypatch.setattr(scheduler, "_node_use", (0.0, []))
    assert look() == look() == ("It is busy." if fails else [])
    assert len(calls) == 1
    asked, answer = scheduler._node_use
    monkeypatch.setattr(scheduler, "_node_use", (asked - 61, answer))
    look()
    assert len(calls) == 2
