"""Free ports for servers whose port a test must know in advance."""

from __future__ import annotations

import random
import socket

# Below the kernel's ephemeral range, so that no outgoing connection takes one in between.
PORTS = range(12_000, 32_000)
chance = random.Random()  # a test may seed the shared one


def free_port() -> int:
    while True:
        port = chance.choice(PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
