"""Messages from rank 0 to all ranks, with or without a session, through the store of the ranks'
rendezvous.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from paceline.errors import RunError
from paceline.runtime.distributed.identity import read_identity

FAILED, OK = "failed", "ok "  # a message is FAILED, or OK and its text

_store: Any = None
_count = 0  # messages so far: the same number on all ranks


def broadcast(make: Callable[[], str]) -> str:
    """Return on all ranks what `make` returns on rank 0. All ranks must call it."""
    identity = read_identity()
    if not identity.is_distributed:
        return make()
    if identity.rank:
        return receive()
    message = FAILED
    try:
        message = f"{OK}{make()}"
    finally:
        _set(message)
    return message.removeprefix(OK)


def send(text: str) -> None:
    """Send a message to all ranks. Rank 0 only."""
    _set(f"{OK}{text}")


def wait_until_received() -> None:
    """Wait until all ranks have received all messages: the store ends with rank 0. Rank 0 only."""
    expected = (read_identity().world_size - 1) * _count
    while _open_store().add("received", 0) < expected:
        time.sleep(0.02)


def receive() -> str:
    """Wait for rank 0's next message and return it."""
    global _count
    from paceline.runtime.distributed.process_group import wait_for_key

    _count += 1
    message = wait_for_key(_open_store(), f"message/{_count}")
    if message is None or message == FAILED:
        raise RunError(
            "Rank 0 failed while the other ranks waited for its message.",
            hint="See the error of rank 0.",
        )
    _open_store().add("received", 1)
    return message.removeprefix(OK)


def _set(message: str) -> None:
    global _count
    _count += 1
    _open_store().set(f"message/{_count}", message)


def _open_store() -> Any:
    global _store
    if _store is None:
        import torch.distributed as dist

        from paceline.runtime.distributed import process_group

        if dist.is_initialized():  # the script made the group, so the rendezvous address is in use
            _store = dist.distributed_c10d.PrefixStore(
                "paceline/messages", dist.distributed_c10d._get_default_store()
            )
        else:
            _store = process_group.open_store(read_identity(), timeout=None)
    return _store
