"""How two agents prove to each other that they know the run's token, before either reads anything
else.

Every part has a fixed size, so a stranger can make an agent read no more than that:

    challenge, head agent to member:  "paceline 2 ", nonce (32 hex digits), newline
    response, member to head agent:   nonce (32), index (8 hex digits), proof (64), newline
    proof, head agent to member:      proof (64), newline

Neither proof reveals the token, and neither is valid for another connection, index or direction.
"""

from __future__ import annotations

import hmac
import re
import secrets
import socket
import time

_GREETING = "paceline 2 "
_CHALLENGE = re.compile(rf"{_GREETING}([0-9a-f]{{32}})\n".encode())
_RESPONSE = re.compile(rb"([0-9a-f]{32})([0-9a-f]{8})([0-9a-f]{64})\n")
_PROOF = re.compile(rb"([0-9a-f]{64})\n")
CHALLENGE_SIZE = len(_GREETING) + 33
RESPONSE_SIZE = 105
PROOF_SIZE = 65
HANDSHAKE_TIMEOUT = 5.0  # seconds for one connection

STRANGER = "the peer is not a Paceline agent"


def _prove(token: str, role: str, nonces: tuple[str, str], index: int) -> str:
    return hmac.new(
        token.encode(), f"{role} {nonces[0]} {nonces[1]} {index}".encode(), "sha256"
    ).hexdigest()


class HeadHandshake:
    """The head agent's side: send `challenge`, pass what comes back to `check`, then send
    `proof`.
    """

    def __init__(self, token: str) -> None:
        self._token = token
        self._nonce = secrets.token_hex(16)
        self.challenge = f"{_GREETING}{self._nonce}\n".encode()
        self.index = -1
        self.proof = b""

    def check(self, response: bytes) -> bool:
        """Return whether the response proves that its sender knows the token, and set `index` and
        `proof`.
        """
        match = _RESPONSE.fullmatch(response)
        if match is None:
            return False
        nonces, index = (self._nonce, match[1].decode()), int(match[2], 16)
        if not hmac.compare_digest(match[3].decode(), _prove(self._token, "member", nonces, index)):
            return False
        self.index = index
        self.proof = f"{_prove(self._token, 'head', nonces, index)}\n".encode()
        return True


def greet_head(sock: socket.socket, *, token: str, index: int, deadline: float) -> None:
    """Prove to the head agent that this agent knows the token, and make sure that it does too.

    Raises ConnectionError if the peer is not an agent, PermissionError if it belongs to another
    run.
    """
    challenge = _CHALLENGE.fullmatch(read_exactly(sock, CHALLENGE_SIZE, deadline))
    if challenge is None:
        raise ConnectionError(STRANGER)
    nonces = (challenge[1].decode(), secrets.token_hex(16))
    sock.sendall(f"{nonces[1]}{index:08x}{_prove(token, 'member', nonces, index)}\n".encode())
    proof = _PROOF.fullmatch(read_exactly(sock, PROOF_SIZE, deadline))
    if proof is None:
        raise ConnectionError(STRANGER)
    if not hmac.compare_digest(proof[1].decode(), _prove(token, "head", nonces, index)):
        raise PermissionError("it does not know the token, so it belongs to another run")


def read_exactly(sock: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        sock.settimeout(left)
        chunk = sock.recv(size - len(data))
        if not chunk:
            raise ConnectionError("the connection was closed")
        data += chunk
    return data
