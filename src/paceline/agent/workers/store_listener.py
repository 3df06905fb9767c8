"""Handle ranks that connect to rank 0's store before it listens.

Torch's client is then refused and retries only after 0.3 s, doubling the delay each time: that
would be most of a warm start.
"""

from __future__ import annotations

import errno
import functools
import time
from collections.abc import Mapping
from typing import Any

from paceline.agent.rendezvous.network import bind_port

TIMEOUT = 60.0  # seconds; after that, torch's client waits as it always does
_PAUSES = (0.001, 0.05)  # seconds: the first and the longest


def wait_for_store(distributed: Any, environ: Mapping[str, str]) -> None:
    """Have this rank connect to rank 0's store once it listens. Takes the module
    `torch.distributed`.

    Only on rank 0's own node: a listener elsewhere cannot be seen without connecting to it.
    """
    store, port = getattr(distributed, "TCPStore", None), environ.get("MASTER_PORT")
    if store is None or not port or environ.get("GROUP_RANK") != "0" or environ.get("RANK") == "0":
        return
    construct = store.__init__

    @functools.wraps(construct)
    def wait_and_construct(self: Any, *args: Any, **kwargs: Any) -> None:
        wanted = args[1] if len(args) > 1 else kwargs.get("port")
        serves = args[3] if len(args) > 3 else kwargs.get("is_master", False)
        if str(wanted) == port and not serves:
            await_listener(int(port))
        construct(self, *args, **kwargs)

    store.__init__ = wait_and_construct


def await_listener(port: int, timeout: float = TIMEOUT) -> bool:
    """Wait until a process of this machine listens on the port. Returns whether one does."""
    deadline, pause = time.monotonic() + timeout, _PAUSES[0]
    while not _is_listening(port):
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(1.5 * pause, _PAUSES[1])
    return True


def _is_listening(port: int) -> bool:
    """Find it out without a connection: a port that the agent has only reserved can still be
    bound.
    """
    try:
        bind_port(port).close()
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False
