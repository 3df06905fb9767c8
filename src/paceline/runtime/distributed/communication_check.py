"""The communication check: a first all-reduce that finds a broken network before the first training
step.

It makes the connections that the first step would make anyway. All ranks have already met at the
store, so none is still importing: a rank that does not answer soon will not answer at all.
"""

from __future__ import annotations

import socket
import time
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import RunError
from paceline.runtime.distributed.identity import Identity
from paceline.runtime.distributed.process_group import ProcessGroups

# seconds, unless the session sets one: in large worlds, adapters may take minutes to connect
TIMEOUT = 300.0
POLL_INTERVAL = 0.0005

_INTERFACE = {"nccl": "NCCL_SOCKET_IFNAME", "gloo": "GLOO_SOCKET_IFNAME"}


def check_communication(
    group: ProcessGroups, identity: Identity, device: torch.device, *, timeout: float | None
) -> None:
    """Sum a 1 from every rank over each group. Raises RunError if the sum is not the world size."""
    if group.main is None:
        return
    for each in (group.main, group.control):
        backend = str(dist.get_backend(each))
        place = torch.device("cpu") if backend == "gloo" else device
        try:
            total = _sum_of_ones(each, place, timeout or TIMEOUT)
        except (RuntimeError, TimeoutError) as error:
            raise communication_error(identity, backend, str(error)) from error
        if total != identity.world_size:
            reason = f"the sum of {identity.world_size} ones came out as {total:g}"
            raise communication_error(identity, backend, reason)


def _sum_of_ones(group: Any, device: torch.device, limit: float) -> float:
    """Poll until the sum is there: waiting for NCCL would block this thread until NCCL ends the
    process.
    """
    total = torch.ones(1, device=device)
    work = dist.all_reduce(total, group=group, async_op=True)
    deadline = time.monotonic() + limit
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no answer within {limit:g} s")
        time.sleep(POLL_INTERVAL)
    work.wait()  # raises what went wrong
    return total.item()


def communication_error(
    identity: Identity, backend: str, reason: str, *, what: str = "the first all-reduce"
) -> RunError:
    """Return the error for a network that does not work, with what to try."""
    name = _INTERFACE.get(backend)
    interface = f" Set {name} (--env) to the interface that the nodes share." if name else ""
    return RunError(
        f"Rank {identity.rank} on {socket.gethostname()}: {what} of {identity.world_size} ranks "
        f"over {backend} failed: {reason.strip().partition(chr(10))[0].rstrip('.')}.",
        hint="Run with --debug (NCCL_DEBUG=INFO, TORCH_DISTRIBUTED_DEBUG=DETAIL) to see which "
        f"ranks cannot reach each other.{interface} To skip this check, use submit --no-check, or "
        "check = false in [launch].",
    )
