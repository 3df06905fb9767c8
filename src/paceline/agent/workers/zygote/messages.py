"""Messages between an agent and its zygote: JSON after its length, with file descriptors
alongside.
"""

from __future__ import annotations

import json
import select
import socket
import struct
from collections.abc import Sequence
from typing import Any

_LENGTH = struct.Struct("=I")  # bytes of JSON
_MAX_DESCRIPTORS = 250  # the kernel passes at most 253 with one message
_REST_TIMEOUT = 10.0  # seconds for the rest of a message whose first byte has arrived


class ConnectionClosed(Exception):
    """The other process has closed its end."""


class MessageSocket:
    """One end of a connection, read and written by whole messages."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end

    def fileno(self) -> int:
        return self.end.fileno()

    def send(
        self,
        message: dict[str, Any],
        descriptors: Sequence[int] = (),
        *,
        timeout: float | None = None,
    ) -> None:
        """Send a whole message; raises `ConnectionClosed`, also when the other process does not
        read it in time.
        """
        # ASCII escapes preserve arguments and file names that are not UTF-8 (Python's surrogates),
        # byte for byte.
        body = json.dumps(message).encode()
        data = _LENGTH.pack(len(body)) + body
        try:
            self.end.settimeout(timeout)
            for start in range(0, len(descriptors), _MAX_DESCRIPTORS):
                batch = descriptors[start : start + _MAX_DESCRIPTORS]
                assert len(data) > 1, "each batch of descriptors travels with a byte"
                data = data[socket.send_fds(self.end, [data[:1]], list(batch)) :]
            self.end.sendall(data)
        except OSError as error:
            raise ConnectionClosed(str(error)) from error

    def receive(self, timeout: float | None = None) -> tuple[dict[str, Any], list[int]]:
        """Wait for the next message; raises `ConnectionClosed` and `TimeoutError`."""
        if not select.select([self.end], [], [], timeout)[0]:
            raise TimeoutError
        descriptors: list[int] = []
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, descriptors))
        return json.loads(self._read(length, descriptors)), descriptors

    def receive_pending(self) -> list[tuple[dict[str, Any], list[int]]]:
        """Return all messages that have arrived, without waiting; raises `ConnectionClosed` after
        the last one.
        """
        messages: list[tuple[dict[str, Any], list[int]]] = []
        try:
            while select.select([self.end], [], [], 0)[0]:
                messages.append(self.receive())
        except ConnectionClosed:
            if not messages:
                raise
        return messages

    def close(self) -> None:
        self.end.close()

    def _read(self, size: int, descriptors: list[int]) -> bytes:
        """Read so many bytes, and not one more: another process may read the next message."""
        data = b""
        while len(data) < size:
            try:
                self.end.settimeout(_REST_TIMEOUT)
                part, passed, _, _ = socket.recv_fds(self.end, size - len(data), _MAX_DESCRIPTORS)
            except OSError as error:
                raise ConnectionClosed(str(error)) from error
            if not part:
                raise ConnectionClosed("end of messages")
            descriptors += passed
            data += part
        return data
