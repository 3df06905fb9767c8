"""Messages between a agent and its zygote: JSON with a length ahead of it, and descriptors alongside."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

_HEADER = struct.Struct("=II")  # bytes of JSON, descriptors
_DESCRIPTORS_AT_ONCE = 250  # the kernel passes at most 253 with one message


class Closed(Exception):
    """The other side is gone."""


class Wire:
    """One end of a socket pair. Reading is by whole messages; `fileno` is for select."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self._bytes = bytearray()
        self._descriptors: list[int] = []

    def fileno(self) -> int:
        return self.end.fileno()

    def send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Whole or not at all; raises `Closed`."""
        # ASCII escapes keep what is not UTF-8 (a file name, an argument) as Python's surrogates, byte for byte.
        body = json.dumps(message).encode()
        data = _HEADER.pack(len(body), len(descriptors)) + body
        try:
            self.end.setblocking(True)
            for start in range(0, len(descriptors), _DESCRIPTORS_AT_ONCE):
                batch = descriptors[start : start + _DESCRIPTORS_AT_ONCE]
                assert len(data) > 1, "each batch of descriptors rides on a byte"
                sent = socket.send_fds(self.end, [data[:1]], list(batch))
                data = data[sent:]
            self.end.sendall(data)
        except OSError as problem:
            raise Closed(str(problem)) from problem

    def receive(self, timeout: float | None = None) -> tuple[dict[str, Any], list[int]]:
        """The next message, waited for; raises `Closed` at the end and `TimeoutError`."""
        while (message := self._whole()) is None:
            self._fill(timeout)
        return message

    def waiting(self) -> list[tuple[dict[str, Any], list[int]]]:
        """All messages that have come, without waiting; raises `Closed` once they have all been read."""
        found = []
        try:
            while True:
                self._fill(0)
        except (TimeoutError, BlockingIOError):
            pass
        except Closed:
            if len(self._bytes) < _HEADER.size:
                raise
        while (message := self._whole()) is not None:
            found.append(message)
        return found

    def close(self) -> None:
        self.end.close()

    def _fill(self, timeout: float | None) -> None:
        self.end.settimeout(timeout)
        try:
            data, descriptors, _, _ = socket.recv_fds(self.end, 1 << 16, _DESCRIPTORS_AT_ONCE)
        except (TimeoutError, BlockingIOError):
            raise
        except OSError as problem:
            raise Closed(str(problem)) from problem
        self._descriptors += descriptors
        if not data:
            raise Closed("end of messages")
        self._bytes += data

    def _whole(self) -> tuple[dict[str, Any], list[int]] | None:
        if len(self._bytes) < _HEADER.size:
            return None
        length, count = _HEADER.unpack_from(self._bytes)
        if len(self._bytes) < _HEADER.size + length:
            return None
        message = json.loads(bytes(self._bytes[_HEADER.size : _HEADER.size + length]))
        del self._bytes[: _HEADER.size + length]
        # They ride on the first bytes of their message, so they are all here, ahead of a later message's.
        descriptors, self._descriptors = self._descriptors[:count], self._descriptors[count:]
        return message, descriptors
