"""Messages between an agent and its zygote: JSON after a length header, with file descriptors
alongside.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

_HEADER = struct.Struct("=II")  # bytes of JSON, descriptors
_MAX_DESCRIPTORS = 250  # the kernel passes at most 253 with one message


class ConnectionClosed(Exception):
    """The other process has closed its end."""


class MessageSocket:
    """One end of a connection, read and written by whole messages."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self._buffer = bytearray()
        self._descriptors: list[int] = []

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
        data = _HEADER.pack(len(body), len(descriptors)) + body
        try:
            self.end.settimeout(timeout)
            for start in range(0, len(descriptors), _MAX_DESCRIPTORS):
                batch = descriptors[start : start + _MAX_DESCRIPTORS]
                assert len(data) > 1, "each batch of descriptors travels with a byte"
                sent = socket.send_fds(self.end, [data[:1]], list(batch))
                data = data[sent:]
            self.end.sendall(data)
        except OSError as error:
            raise ConnectionClosed(str(error)) from error

    def receive(self, timeout: float | None = None) -> tuple[dict[str, Any], list[int]]:
        """Wait for the next message; raises `ConnectionClosed` and `TimeoutError`."""
        while (message := self._next_message()) is None:
            # no more: another process may read the next message
            self._read(timeout, self._missing())
        return message

    def receive_pending(self) -> list[tuple[dict[str, Any], list[int]]]:
        """Return all messages that have arrived, without waiting; raises `ConnectionClosed` after
        the last one.
        """
        messages = []
        try:
            while True:
                self._read(0)
        except (TimeoutError, BlockingIOError):
            pass
        except ConnectionClosed:
            if len(self._buffer) < _HEADER.size:
                raise
        while (message := self._next_message()) is not None:
            messages.append(message)
        return messages

    def close(self) -> None:
        self.end.close()

    def _missing(self) -> int:
        """Return how many bytes the header lacks, or else the message."""
        length = len(self._buffer)
        return (
            _HEADER.size
            - length
            + (_HEADER.unpack_from(self._buffer)[0] if length >= _HEADER.size else 0)
        )

    def _read(self, timeout: float | None, size: int = 1 << 16) -> None:
        self.end.settimeout(timeout)
        try:
            data, descriptors, _, _ = socket.recv_fds(self.end, size, _MAX_DESCRIPTORS)
        except (TimeoutError, BlockingIOError):
            raise
        except OSError as error:
            raise ConnectionClosed(str(error)) from error
        self._descriptors += descriptors
        if not data:
            raise ConnectionClosed("end of messages")
        self._buffer += data

    def _next_message(self) -> tuple[dict[str, Any], list[int]] | None:
        if len(self._buffer) < _HEADER.size:
            return None
        length, count = _HEADER.unpack_from(self._buffer)
        if len(self._buffer) < _HEADER.size + length:
            return None
        message = json.loads(bytes(self._buffer[_HEADER.size : _HEADER.size + length]))
        del self._buffer[: _HEADER.size + length]
        # Descriptors travel with the first bytes of their message: all are here, ahead of the next
        # message's.
        descriptors, self._descriptors = self._descriptors[:count], self._descriptors[count:]
        return message, descriptors
