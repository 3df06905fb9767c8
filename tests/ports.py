"""A free port for servers that a test starts, and whose port it must know before."""

from __future__ import annotations

import random
import socket

# Below the ports that the kernel gives to others by itself, so that none of them takes this one in between.
PORTS = range(12_000, 32_000)
chance = random.Random()  # a test may seed the shared one


def free_port() -> int:
    while True:
        port = chance.choice(PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
