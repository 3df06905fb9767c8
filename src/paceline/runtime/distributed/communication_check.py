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
    """Sum a 1 from every rank over both groups at once. Raises RunError if the sum is not the
    world size.
    """
    if group.main is None:
        return
    limit = timeout or TIMEOUT
    backend = str(dist.get_backend(group.main))
    cpu = torch.device("cpu")
    started = [(backend, _start(group.main, cpu if backend == "gloo" else device))]
    if group.control is not None:
        started.append(("gloo", _start(group.control, cpu)))
    deadline = time.monotonic() + limit
    for name, reduction in started:
        try:
            total = _wait(reduction, deadline)
        except TimeoutError:
            raise communication_error(identity, name, f"no answer within {limit:g} s") from None
        except RuntimeError as error:
            raise communication_error(identity, name, error) from error
        if total != identity.world_size:
            reason = f"the sum of {identity.world_size} ones came out as {total:g}"
            raise communication_error(identity, name, reason)


def _start(group: Any, device: torch.device) -> tuple[torch.Tensor, Any] | RuntimeError:
    """Start a reduction, or return why it could not start."""
    try:
        one = torch.ones(1, device=device)
        return one, dist.all_reduce(one, group=group, async_op=True)
    except RuntimeError as error:
        return error


def _wait(reduction: tuple[torch.Tensor, Any] | RuntimeError, deadline: float) -> float:
    """Poll until the sum is there: waiting for NCCL would block this thread until NCCL ends the
    process.
    """
    if isinstance(reduction, RuntimeError):
        raise reduction
    total, work = reduction
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(POLL_INTERVAL)
    work.wait()  # raises what went wrong
    return total.item()


def communication_error(
    identity: Identity,
    backend: str,
    reason: str | BaseException,
    *,
    what: str = "the first all-reduce",
) -> RunError:
    """Return the error for a network that does not work, with what to try."""
    if isinstance(reason, BaseException):
        reason = (str(reason).strip().splitlines() or [type(reason).__name__])[0]
    name = _INTERFACE.get(backend)
    interface = f" Set {name} (--env) to the interface that the nodes share." if name else ""
    return RunError(
        f"Rank {identity.rank} on {socket.gethostname()}: {what} of {identity.world_size} ranks "
        f"over {backend} "
        f"failed: {reason.rstrip('.')}.",
        hint="Run with --debug (NCCL_DEBUG=INFO, TORCH_DISTRIBUTED_DEBUG=DETAIL) to see which "
        "ranks cannot reach each "
        f"other.{interface} To skip this check, use submit --no-check, or check = false in "
        "[launch].",
    )
