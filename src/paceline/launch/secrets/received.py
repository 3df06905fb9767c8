"""Secrets that came over a connection with the command that this process carries out. They are in
memory only.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.launch.secrets.declared import Secrets

_received: list[Secrets] = []


def keep(values: Mapping[str, str], sources: Mapping[str, str]) -> None:
    _received[:] = [Secrets(dict(values), dict(sources))]


def received_secrets() -> Secrets | None:
    """Return the secrets that came with the command; None if it was typed on this machine."""
    return _received[0] if _received else None
