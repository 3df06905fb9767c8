"""Hide secrets in variables, command lines and parameters before people or files see them.

What a script itself prints stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

REDACTED = "***"
_SECRET_VARIABLE = re.compile(r"(?i)key|token|secret|password|passwd|credential")
# Names of options and parameters, as words in lower case with underscores. A tokenizer or a number
# of tokens is no secret, and a bare key may be any (`key=len`).
_SECRET_NAME = re.compile(
    r"(?!.*_(?:files?|path|dir|folder)$)(?:"
    r"(?:.*_)?(?:password|passwd|passphrase|secret|credentials?|apikey)(?:_.*)?"
    r"|.*(?:token|password|passwd|apikey)|.+_key|(?:.*_)?(?:api|access|secret|private|auth)_keys)"
)
# Names that have other meanings too: a value that is a number, a path or a switch is no secret.
_AMBIGUOUS_NAME = re.compile(
    r"(?!(?:.*_)?(?:one|two|single|multi|first|second|last|forward|backward|num|max|per)_)"
    r"(?:.*_)?(?:pass|pwd|auth|authorization)"
)
_HARMLESS_VALUE = re.compile(r"(?i)[-+]?[.\d]{1,3}|[.~]?/.*|\.|true|false|yes|no|on|off|none|basic")

# Secrets that no name of ours marks, and what a text shows of them.
_HIDDEN_PARTS = (
    # in an address: after a colon, also if the password has an `@` or a slash itself; or alone
    # before a web server's name, as tokens often are
    (
        re.compile(
            r"(?i)://[^/@\s]*:[^/\s]+@|://[^/@\s:\[]*:(?!/|\d+(?:[/?#\s]|$))\S+?@"
            r"|(?:(?<=http)|(?<=https))://[^/?#\s]+@"
        ),
        f"://{REDACTED}@",
    ),
    # in the query of an address
    (
        re.compile(
            r"(?i)([?&][\w-]*(?:sig|signature|key|token|secret|password|passwd|credential|auth)=)"
            r"[^&#\s\"']+"
        ),
        rf"\1{REDACTED}",
    ),
    # in a header
    (
        re.compile(
            r"(?i)(\bauthorization[\"']?\s*[:=]\s*[\"']?|\bbearer\s+(?=\S{16}))"
            r"[^\s\"']+(?: [^\s\"']+)?"
        ),
        rf"\1{REDACTED}",
    ),
)
# `NAME=value`, `NAME: value`, `"name": "value"` and `--name value`, anywhere in a text. A match
# ends after the name, because the value may have names too.
_NAMED = re.compile(
    r"(?<![\w.$-])(?P<name>(?P<option>-)?-?\+{0,2}[A-Za-z_][\w.-]*)"
    r"(?=(?:[\"']?(?:=|\s*:(?!/)\s*)|(?(option)\s+(?!-)|(?!)))[\"']?"
    r"(?P<value>(?<=\")(?:[^\"\\]|\\.)+|(?<=')[^']+|[^\s\"']+))"
)
# of a shell: to a variable, or to what a command prints; in single quotes it is none
_REFERENCE = re.compile(r"(?<!')\$(?:\(.*|\w+;?|\{\w+\};?)", re.DOTALL)
_ASSIGNED_NAME = re.compile(r"[-+]*[\w./-]+")
_OPTION = re.compile(r"--[A-Za-z][\w.-]*(?:=.*)?|-[A-Za-z]\d*|-[a-z_-]+(?:=.*)?", re.DOTALL)


def redact(name: str, value: str) -> str:
    """Return a variable's value, unless its name marks it as a secret or it is an address with a
    password.
    """
    hidden = _SECRET_VARIABLE.search(name) or _is_secret(name, value) or has_password(value)
    return REDACTED if hidden else value


def has_password(text: str) -> bool:
    """Return whether a text has an address such as http://ann:password@proxy:3128 or
    https://token@git.example.org.
    """
    return any(pattern.search(text) for pattern, _ in _HIDDEN_PARTS)


def redact_text(text: str) -> str:
    """Hide secrets in lines of a shell, JSON or an address: in `export API_KEY=X`, `{"api_key":
    "X"}`, `?sig=X`.
    """
    for pattern, shown in _HIDDEN_PARTS:
        text = pattern.sub(shown, text)
    parts, position = [], 0
    for found in _NAMED.finditer(text):
        if (
            found.start() >= position
            and _is_secret(found["name"], found["value"])
            and not _REFERENCE.fullmatch(text, *found.span("value"))
        ):
            parts += [text[position : found.start("value")], REDACTED]
            position = found.end("value")
    return "".join([*parts, text[position:]])


def redact_args(args: Sequence[str]) -> list[str]:
    """Hide secrets in a command line: in `--env API_KEY=X`, `--api-key X`, `--api-key=X`,
    `api_key=X` and texts.
    """
    shown = []
    for before, arg in zip(["", *args], args, strict=False):
        is_value = before.startswith("-") and not _OPTION.fullmatch(arg)
        name, equals, value = arg.removeprefix("--env=").partition("=")
        if equals and (before == "--env" or arg.startswith("--env=")):
            shown.append(arg[: len(arg) - len(value)] + redact(name, value))
        else:
            shown.append(REDACTED if is_value and _is_secret(before, arg) else _redact_arg(arg))
    return shown


def _redact_arg(arg: str) -> str:
    """Hide all that follows the name of a secret, also in `--param=api_key=X`."""
    name, equals, value = arg.partition("=")
    if not equals or not _ASSIGNED_NAME.fullmatch(name):
        return redact_text(arg)
    return f"{name}={REDACTED if _is_secret(name, value) else _redact_arg(value)}"


def redact_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Hide the texts of parameters whose name marks them as secrets, and secrets in other texts."""
    return {name: _redact_value(name, value) for name, value in values.items()}


def _redact_value(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        hides_all = _is_secret(name, REDACTED)
        return {key: _redact_value(name if hides_all else key, each) for key, each in value.items()}
    if isinstance(value, list):
        return [_redact_value(name, each) for each in value]
    if not isinstance(value, str):
        return value
    return REDACTED if _is_secret(name, value) else redact_text(value)


def _is_secret(name: str, value: str) -> bool:
    if not value or "=" in name:
        return False
    words = re.findall(r"[a-z0-9]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", name).lower())
    if _AMBIGUOUS_NAME.fullmatch("_".join(words)):
        return not _HARMLESS_VALUE.fullmatch(value)
    return _SECRET_NAME.fullmatch("_".join(words)) is not None
