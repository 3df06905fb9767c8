"""The beat file of a node, and what is left of it when its agent was killed."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.agent.health.heartbeat import Beats, read_step, say_ready
from paceline.contract.heartbeat_file import READY


def test_a_slot_each() -> None:
    beats = Beats(3)
    try:
        beats.begin(2)
        say_ready(str(beats.path), 1)
        assert [beats.read(each).state for each in range(3)] == [0, READY, 0]
        assert beats.read(1).pid == os.getpid()
        assert read_step(str(beats.path), 1) == 0
    finally:
        beats.remove()
    assert not beats.path.exists()


def test_what_a_killed_launcher_left_is_removed_and_nothing_else() -> None:
    living = Beats(1)
    abandoned = Path(f"{living.path}-abandoned")
    abandoned.touch()
    try:
        for path in (living.path, abandoned):
            os.utime(path, (0, 0))
        Beats(1).remove()
        assert living.path.exists()
        assert not abandoned.exists()
    finally:
        living.remove()
        abandoned.unlink(missing_ok=True)
