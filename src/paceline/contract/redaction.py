"""Hide secrets in variables, command lines and parameters before people or files see them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

REDACTED = "***"
_SECRET_NAME = re.compile(r"(?i)(key|token|secret|password|passwd|credential)")
_SECRET_WORDS = {"password", "passwd", "passphrase", "secret", "credential", "credentials", "apikey"}
# After a colon; or alone before a web server's name, as tokens often are.
_PASSWORD_IN_ADDRESS = re.compile(r"://[^/@\s]*:[^/@\s]+@|(?:(?<=http)|(?<=https))://[^/?#@\s]+@", re.IGNORECASE)


def redact(name: str, value: str) -> str:
    """Return a variable's value, unless its name marks it as a secret or it is an address with a password."""
    return REDACTED if _SECRET_NAME.search(name) or has_password(value) else value


def has_password(text: str) -> bool:
    """Return whether a text has an address such as http://ann:password@proxy:3128 or https://token@git.example.org."""
    return _PASSWORD_IN_ADDRESS.search(text) is not None


def redact_args(args: Sequence[str]) -> list[str]:
    """Hide secrets in a command line: in `--env API_KEY=X`, `--api-key X`, `--api-key=X` and `api_key=X`."""
    shown = []
    for before, arg in zip(["", *args], args, strict=False):
        name, equals, value = arg.removeprefix("--env=").partition("=")
        start = arg[: len(arg) - len(value)]
        if equals and (before == "--env" or arg.startswith("--env=")):
            shown.append(start + redact(name, value))
        elif equals and _is_secret_option(name):
            shown.append(start + REDACTED)
        elif before.startswith("-") and not arg.startswith("-") and _is_secret_option(before):
            shown.append(REDACTED)
        else:
            shown.append(_PASSWORD_IN_ADDRESS.sub(f"://{REDACTED}@", arg))
    return shown


def redact_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Hide the texts of parameters whose name marks them as secrets."""
    shown: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            shown[name] = redact_values(value)
        else:
            shown[name] = REDACTED if isinstance(value, str) and _is_secret_option(name) else value
    return shown


def holds_secret(name: str, value: Any) -> bool:
    """Return whether a parameter is a text, or a list of some, that must be hidden."""
    if isinstance(value, list):
        return any(holds_secret(name, each) for each in value)
    return isinstance(value, str) and (_is_secret_option(name) or has_password(value))


def _is_secret_option(name: str) -> bool:
    """Judge by whole words: a tokenizer or a number of tokens is no secret, and a bare key may be any (`key=len`)."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", name).lower())
    if not words or "=" in name:
        return False
    return not _SECRET_WORDS.isdisjoint(words) or words[-1] == "token" or (words[-1] == "key" and len(words) > 1)
