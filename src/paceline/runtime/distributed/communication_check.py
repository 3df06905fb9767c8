"""The groups' first all-reduce: a network that cannot carry gradients is found here, and named, before the first step.

The connections that it makes are those that the first step would have made. By now all ranks have met over the
store, so that none is still importing: who does not answer soon does not answer at all.
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

WITHIN = (
    300.0  # seconds, unless the session says: adapters of a large world may take minutes to find each other
)
LOOK_EVERY = 0.0005

_INTERFACE = {"nccl": "NCCL_SOCKET_IFNAME", "gloo": "GLOO_SOCKET_IFNAME"}


def check_communication(
    group: ProcessGroups, identity: Identity, device: torch.device, *, timeout: float | None
) -> None:
    """Every rank contributes 1 to both groups, at once; the sum must be the world. Otherwise a `RunError`."""
    if group.main is None:
        return
    limit = timeout or WITHIN
    backend = str(dist.get_backend(group.main))
    cpu = torch.device("cpu")
    under_way = [(backend, _start(group.main, cpu if backend == "gloo" else device))]
    if group.control is not None:
        under_way.append(("gloo", _start(group.control, cpu)))
    deadline = time.monotonic() + limit
    for name, begun in under_way:
        try:
            answered = _sum(begun, deadline)
        except TimeoutError:
            raise problem(identity, name, f"there was no answer within {limit:g} s") from None
        except RuntimeError as error:
            raise problem(identity, name, error) from error
        if answered != identity.world_size:
            raise problem(identity, name, f"the sum of {identity.world_size} ones came out as {answered:g}")


def _start(group: Any, device: torch.device) -> tuple[torch.Tensor, Any] | RuntimeError:
    """A sum under way, or why there is none."""
    try:
        one = torch.ones(1, device=device)
        return one, dist.all_reduce(one, group=group, async_op=True)
    except RuntimeError as error:
        return error


def _sum(begun: tuple[torch.Tensor, Any] | RuntimeError, deadline: float) -> float:
    """Asked for again and again: waiting for NCCL would hold this thread until NCCL ends the process."""
    if isinstance(begun, RuntimeError):
        raise begun
    one, work = begun
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(LOOK_EVERY)
    work.wait()  # raises what went wrong
    return one.item()


def problem(
    identity: Identity, backend: str, why: str | BaseException, *, what: str = "the first all-reduce"
) -> RunError:
    """In words for a person who has not seen this network before."""
    if isinstance(why, BaseException):
        why = (str(why).strip().splitlines() or [type(why).__name__])[0]
    name = _INTERFACE.get(backend)
    look = f"set {name} (--env) to the interface that the nodes share; " if name else ""
    return RunError(
        f"rank {identity.rank} on {socket.gethostname()}: {what} of {identity.world_size} ranks over {backend} "
        f"failed: {why}",
        hint="With --debug (NCCL_DEBUG=INFO, TORCH_DISTRIBUTED_DEBUG=DETAIL) the ranks say who cannot reach whom; "
        f"{look}check = false in [launch] (submit: --no-check) goes on without it.",
    )
