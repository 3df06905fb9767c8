"""One answer of sinfo for all processes of a user."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import ClusterError
from paceline.slurm.answer_cache import AnswerCache
from paceline.watch import scheduler as node_answer
from paceline.watch.scheduler import query_node_use


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The questions so far. The answer is empty, or what the test puts in its place."""
    asked: list[str] = []

    def ask() -> str:
        asked.append("sinfo")
        return ""

    monkeypatch.setattr(
        AnswerCache, "here", classmethod(lambda cls: AnswerCache(tmp_path / "slurm-1.json"))
    )
    monkeypatch.setattr(node_answer, "ask_node_use", ask)
    return asked


def test_slurm_is_asked_once_a_minute(
    calls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        node_answer, "poll_interval", lambda: 1.0
    )  # asking more often for jobs does not ask more often for nodes
    assert query_node_use() == query_node_use() == []
    assert len(calls) == 1
    path = tmp_path / "slurm-1.nodes"
    path.write_text(path.read_text().replace('"asked": 1', '"asked": 0'))  # long ago
    query_node_use()
    assert len(calls) == 2
    assert path.stat().st_mode & 0o077 == 0


def test_a_broken_answer_is_replaced(calls: list[str], tmp_path: Path) -> None:
    for text in ("", "[]", '{"asked": "x"}', '{"asked": 1e99}', '{"asked": 1'):
        (tmp_path / "slurm-1.nodes").write_text(text)
        query_node_use()
    assert len(calls) == 5


def test_a_failure_is_shared_too(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        calls.append("sinfo")
        raise ClusterError("It is busy.")

    monkeypatch.setattr(node_answer, "ask_node_use", fail)
    for _ in range(3):
        with pytest.raises(ClusterError, match="busy"):
            query_node_use()
    assert len(calls) == 1
