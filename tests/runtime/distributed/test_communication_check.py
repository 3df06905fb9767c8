"""The communication check: it reports what it finds, and never waits forever."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from paceline.errors import RunError
from paceline.runtime.distributed import process_group as groups
from paceline.runtime.distributed.identity import read_identity
from tests.forked_ranks import Ranks
from tests.runtime.training.test_wrap import quiet


def init_groups() -> groups.ProcessGroups:
    identity = read_identity()
    store = groups.open_store(identity, timeout=60)
    return groups.init_process_groups(
        identity, torch.device("cpu"), store=store, backend="gloo", timeout=60
    )


def check(group: groups.ProcessGroups, *, timeout: float = 60) -> str:
    """Return the error of the check, or an empty string."""
    try:
        groups.check_communication(group, read_identity(), torch.device("cpu"), timeout=timeout)
    except RunError as error:
        group.abandon()
        return str(error)
    return ""


def check_passes() -> str:
    group = init_groups()
    message = check(group)
    group.close()
    return message


def test_a_working_network_passes(ranks: Ranks) -> None:
    assert ranks(check_passes, 3) == [""] * 3


def check_with_silent_peer(folder: str) -> str:
    """Rank 1 joins the groups and then does nothing until the others have given up."""
    group, done = init_groups(), Path(folder) / "done"
    if read_identity().rank == 0:
        message = check(group, timeout=1)
        done.touch()
        return message
    while not done.exists():
        time.sleep(0.05)
    group.abandon()
    return "silent"


def test_a_peer_that_does_not_answer_is_an_error(ranks: Ranks, tmp_path: Path) -> None:
    message, _ = ranks(check_with_silent_peer, 2, str(tmp_path))
    assert (
        f"Rank 0 on {os.uname().nodename}: the first all-reduce of 2 ranks over gloo failed"
        in message
    )
    assert "no answer within 1 s" in message
    assert "GLOO_SOCKET_IFNAME" in message
    assert "--debug" in message


def session_with_lost_peer() -> str:
    """Rank 1 leaves once the groups exist, and its process ends."""
    original = groups.check_communication

    def leave(*args: Any, **options: Any) -> None:
        if read_identity().rank == 1:
            raise RunError("gone")
        original(*args, **options)

    groups.check_communication = leave
    try:
        with quiet():
            return "never"
    except RunError as error:
        return str(error)


def test_a_session_that_lost_a_peer_ends_with_an_error(ranks: Ranks) -> None:
    message, gone = ranks(session_with_lost_peer, 2)
    assert gone == "gone"
    assert "Rank 0 on" in message
    assert "first all-reduce of 2 ranks over gloo failed" in message


def check_with_wrong_sum() -> str:
    group = init_groups()
    if read_identity().rank == 1:  # a rank that adds something else
        with_twos: Callable[..., torch.Tensor] = lambda *_, **__: torch.full((1,), 2.0)  # noqa: E731
        torch.ones = with_twos  # type: ignore[assignment]
    return check(group)


def test_a_wrong_sum_is_an_error(ranks: Ranks) -> None:
    for message in ranks(check_with_wrong_sum, 2):
        assert "the sum of 2 ones came out as 3" in message
