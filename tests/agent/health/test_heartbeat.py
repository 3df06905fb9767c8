"""The heartbeat file of a node, and what happens to it when its agent is killed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.agent.health import heartbeat
from paceline.agent.health.heartbeat import Heartbeats, mark_ready, read_step
from paceline.contract.heartbeat_file import READY
from paceline.runtime.step_boundary.heartbeat import Heartbeat as RankHeartbeat
from tests.small_disk import fill, mount_small_disk


def test_each_rank_has_a_slot() -> None:
    heartbeats = Heartbeats(3)
    try:
        heartbeats.reset(2)
        mark_ready(str(heartbeats.path), 1)
        assert [each.state for each in heartbeats.read_all()] == [0, READY, 0]
        assert heartbeats.read(1).pid == os.getpid()
        assert read_step(str(heartbeats.path), 1) == 0
        rank = RankHeartbeat(str(heartbeats.path), 1)
        rank.mark_unsaved(7)
        rank.mark_session()
        rank.close()
        assert [each.in_session for each in heartbeats.read_all()] == [0, 1, 0]
        assert [each.unsaved_step for each in heartbeats.read_all()] == [0, 8, 0]
    finally:
        heartbeats.remove()
    assert not heartbeats.path.exists()


def test_only_the_files_of_killed_agents_are_removed() -> None:
    living = Heartbeats(1)
    abandoned = Path(f"{living.path}-abandoned")
    abandoned.touch()
    try:
        for path in (living.path, abandoned):
            os.utime(path, (0, 0))
        Heartbeats(1).remove()
        assert living.path.exists()
        assert not abandoned.exists()
    finally:
        living.remove()
        abandoned.unlink(missing_ok=True)


def test_full_memory_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mount_small_disk(tmp_path / "memory", "64k") as memory:
        memory.chmod(0o1777)
        fill(memory)
        monkeypatch.setattr(heartbeat, "MEMORY", str(memory))
        heartbeats = Heartbeats(2)
        try:
            heartbeats.reset(1)
            assert memory not in heartbeats.path.parents
        finally:
            heartbeats.remove()
