"""Decides the verdict of an attempt, and which failure was its root cause."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from paceline.agent.rank_failures import Failure, RankExit, first_failure
from paceline.contract.verdict import DONE, FAILED, STOPPED


def decide_verdict(
    failures: Iterable[Failure], exits: Sequence[RankExit], *, stop_requested: bool
) -> tuple[str, Failure | None]:
    """Return the verdict of an attempt, and its root failure if it failed, from all ranks on all
    nodes.
    """
    # The exits of other agents hold failures whose own messages may not have arrived in time.
    known = [
        *failures,
        *(rank_exit.failure for rank_exit in exits if rank_exit.failure is not None),
    ]
    stops = [rank_exit for rank_exit in exits if rank_exit.is_stop]
    # a rank that stops closes its connections, which other ranks may notice first
    if stop_requested and stops:
        known = [failure for failure in known if not failure.is_consequence]
    failure = first_failure(known)
    if failure is not None:
        return FAILED, _explain_lost_connection(failure, exits)
    if not stop_requested and any(
        rank_exit.code and not rank_exit.says_saved for rank_exit in stops
    ):
        return FAILED, None
    return STOPPED if stops else DONE, None


def _explain_lost_connection(failure: Failure, exits: Sequence[RankExit]) -> Failure:
    """If no rank has crashed, a lost connection means that a rank has ended while another one
    still waited for it.
    """
    ended = [
        each.rank
        for each in exits
        if each.code == 0 and each.rank != failure.rank and not each.is_stop
    ]
    if not failure.is_consequence or not ended:
        return failure
    ranks = ", ".join(map(str, ended[:8]))
    who = f"Rank {ranks} has" if len(ended) == 1 else f"Ranks {ranks} have"
    note = (
        f"{who} exited normally without joining the collective that rank {failure.rank} is "
        "waiting in. No rank crashed."
    )
    return replace(failure, message=f"{note}\n{failure.message}", ended_ranks=tuple(ended))
