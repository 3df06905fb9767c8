"""The groups' first all-reduce: what it finds is named, and never waited for without end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from paceline.contract import env
from paceline.errors import RunError
from paceline.runtime.distributed import communication_check
from paceline.runtime.distributed import process_group as groups
from paceline.runtime.distributed.identity import read_identity
from tests.forked import Ranks
from tests.runtime.test_session import folder_with
from tests.runtime.test_wrap import quiet


def formed() -> groups.ProcessGroups:
    identity = read_identity()
    store = groups.open_store(identity, timeout=60)
    return groups.init_process_groups(identity, torch.device("cpu"), store=store, backend=None, timeout=60)


def tried(group: groups.ProcessGroups, *, timeout: float = 60) -> str:
    """The complaint; empty where there is none."""
    try:
        communication_check.check_communication(group, read_identity(), torch.device("cpu"), timeout=timeout)
    except RunError as error:
        group.abandon()
        return str(error)
    return ""


def agreeing() -> str:
    group = formed()
    said = tried(group)
    group.close()
    return said


def test_a_world_that_answers_is_fit(ranks: Ranks) -> None:
    assert ranks(agreeing, 3) == [""] * 3


def a_peer_is_silent(folder: str) -> str:
    """Rank 1 has met the others and then does nothing, until they have given up."""
    group, done = formed(), Path(folder) / "done"
    if read_identity().rank == 0:
        said = tried(group, timeout=1)
        done.touch()
        return said
    while not done.exists():
        time.sleep(0.05)
    group.abandon()
    return "silent"


def test_a_peer_that_does_not_answer_is_given_up(ranks: Ranks, tmp_path: Path) -> None:
    said, _ = ranks(a_peer_is_silent, 2, str(tmp_path))
    assert f"Rank 0 on {os.uname().nodename}: the first all-reduce of 2 ranks over gloo failed" in said
    assert "no answer within 1 s" in said
    assert "GLOO_SOCKET_IFNAME" in said
    assert "--debug" in said


def a_session_whose_peer_is_gone() -> str:
    """Rank 1 leaves once the groups are formed, and its process ends."""
    trying = communication_check.check_communication

    def leave(*args: Any, **options: Any) -> None:
        if read_identity().rank == 1:
            raise RunError("gone")
        trying(*args, **options)

    communication_check.check_communication = leave
    try:
        with quiet():
            return "never"
    except RunError as error:
        return str(error)


def test_a_session_whose_peer_is_gone_says_so_and_ends(ranks: Ranks) -> None:
    said, gone = ranks(a_session_whose_peer_is_gone, 2)
    assert gone == "gone"
    assert "Rank 0 on" in said
    assert "first all-reduce of 2 ranks over gloo failed" in said


def a_false_sum() -> str:
    group = formed()
    if read_identity().rank == 1:  # a rank that adds something else
        with_twos: Callable[..., torch.Tensor] = lambda *_, **__: torch.full((1,), 2.0)  # noqa: E731
        torch.ones = with_twos  # type: ignore[assignment]
    return tried(group)


def test_a_sum_that_is_not_the_world_is_an_error(ranks: Ranks) -> None:
    for said in ranks(a_false_sum, 2):
        assert "the sum of 2 ones came out as 3" in said


def sessions_calls(folder: str) -> list[Any]:
    """How often a session tries its groups, with and without an order that says not to."""
    counted: list[Any] = []
    communication_check.check_communication = lambda *_, **__: counted.append("tried")
    with quiet():
        pass
    os.environ[env.RUN] = folder
    with quiet():
        counted.append("quiet")
    return counted


def test_a_run_that_is_not_to_be_checked_is_not_tried(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(sessions_calls, 2, folder_with(tmp_path, nproc=2, check=False)) == [["tried", "quiet"]] * 2
