"""Hide secrets in variables, command lines and parameters before people or files see them.

What a script itself prints stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

REDACTED = "***"
_SECRET_NAME = re.compile(r"(?i)(key|token|secret|password|passwd|credential)")
_SECRET_WORDS = {
    "password",
    "passwd",
    "passphrase",
    "secret",
    "credential",
    "credentials",
    "apikey",
}
_SECRET_ENDS = ("token", "password", "passwd", "apikey")  # of the last word: hftoken, dbpassword
# before `keys`: others are any (`--sort-keys`)
_KEYS = {"api", "access", "secret", "private", "auth"}
# Last words that have other meanings too: a value that is a number, a path or a switch is none.
_AMBIGUOUS_WORDS = {"pass", "pwd", "auth", "authorization"}
_PASSES = {
    "one",
    "two",
    "single",
    "multi",
    "first",
    "second",
    "last",
    "forward",
    "backward",
    "n",
    "num",
    "max",
    "per",
}
_HARMLESS_VALUE = re.compile(r"(?i)[-+]?[.\d]{1,3}|[.~]?/.*|\.|true|false|yes|no|on|off|none|basic")
_FILE_WORDS = {"file", "files", "path", "dir", "folder"}

# After a colon, also if it has an `@` or a slash itself; or alone before a web server's name, as
# tokens often are.
_PASSWORD_IN_ADDRESS = re.compile(
    r"://[^/@\s]*:[^/\s]+@|://[^/@\s:\[]*:(?!/|\d+(?:[/?#\s]|$))\S+?@|(?:(?<=http)|(?<=https))://[^/?#\s]+@",
    re.IGNORECASE,
)
_SECRET_IN_QUERY = re.compile(
    r"(?i)(?P<name>[?&][\w-]*(?:sig|signature|key|token|secret|password|passwd|credential|auth)=)[^&#\s\"']+"
)
_HEADER = re.compile(
    r"(?i)(?P<name>\bauthorization[\"']?\s*[:=]\s*[\"']?|\bbearer\s+(?=\S{16}))[^\s\"']+(?: "
    r"[^\s\"']+)?"
)
# `NAME=value`, `NAME: value`, `"name": "value"` and `--name value`, anywhere in a text.
_NAMED = re.compile(
    r"(?P<name>(?<![\w.$-])(?:(?P<option>--?)|\+{0,2})[A-Za-z_][\w.-]*)(?P<between>[\"']?(?:=|\s*:(?!/)\s*)|\s+)"
    r"(?P<value>\$\(|\"(?:[^\"\\]|\\.)*\"?|'[^']*'?|[^\s\"']+)"
)
_REFERENCE = re.compile(
    r"\"?\$(?:\(|\w+\"?;?$|\{\w+\}\"?;?$)"
)  # of a shell: to a variable, or to what a command prints
_ASSIGNMENT = re.compile(r"(?P<name>[-+]*[\w./-]+)=(?P<value>.*)", re.DOTALL)
_OPTION = re.compile(r"--[A-Za-z][\w.-]*(?:=.*)?|-[A-Za-z]\d*|-[a-z_-]+(?:=.*)?", re.DOTALL)


def redact(name: str, value: str) -> str:
    """Return a variable's value, unless its name marks it as a secret or it is an address with a
    password.
    """
    hidden = _SECRET_NAME.search(name) or _is_secret(name, value) or has_password(value)
    return REDACTED if hidden else value


def has_password(text: str) -> bool:
    """Return whether a text has an address such as http://ann:password@proxy:3128 or
    https://token@git.example.org.
    """
    return any(each.search(text) for each in (_PASSWORD_IN_ADDRESS, _SECRET_IN_QUERY, _HEADER))


def redact_text(text: str) -> str:
    """Hide secrets in lines of a shell, JSON or an address: in `export API_KEY=X`, `{"api_key":
    "X"}`, `?sig=X`.
    """
    text = _PASSWORD_IN_ADDRESS.sub(f"://{REDACTED}@", text)
    text = _SECRET_IN_QUERY.sub(rf"\g<name>{REDACTED}", text)
    text = _HEADER.sub(rf"\g<name>{REDACTED}", text)
    parts, position = [], 0
    while found := _NAMED.search(text, position):
        name, between, value = found["name"], found["between"], found["value"]
        position, start = found.end("name"), found.start()
        parts.append(text[found.pos : position])
        is_value = not between.isspace() or (found["option"] and not _OPTION.fullmatch(value))
        if is_value and _is_secret(name, value.strip("\"'")) and not _REFERENCE.match(value):
            quote = value[0] if value[0] in "\"'" else ""
            closing = quote if len(value) > 1 and value.endswith(quote) else ""
            parts.append(f"{between}{quote}{REDACTED}{closing}")
            position = found.end()
        assert position > start
    return "".join([*parts, text[position:]])


def redact_args(args: Sequence[str]) -> list[str]:
    """Hide secrets in a command line: in `--env API_KEY=X`, `--api-key X`, `--api-key=X`,
    `api_key=X` and texts.
    """
    shown = []
    for before, arg in zip(["", *args], args, strict=False):
        name, equals, value = arg.removeprefix("--env=").partition("=")
        start = arg[: len(arg) - len(value)]
        if equals and (before == "--env" or arg.startswith("--env=")):
            shown.append(start + redact(name, value))
        elif (
            before.startswith("-")
            and "=" not in before
            and not _OPTION.fullmatch(arg)
            and _is_secret(before, arg)
        ):
            shown.append(REDACTED)
        else:
            shown.append(_redact_assignment(arg))
    return shown


def _redact_assignment(arg: str) -> str:
    """Hide all that follows the name of a secret, also in `--param=api_key=X`."""
    found = _ASSIGNMENT.fullmatch(arg)
    if found is None:
        return redact_text(arg)
    name, value = found["name"], found["value"]
    return f"{name}={REDACTED if _is_secret(name, value) else _redact_assignment(value)}"


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


def holds_secret(name: str, value: Any) -> bool:
    """Return whether a parameter is a text, or a list of some, that must be hidden."""
    if isinstance(value, list):
        return any(holds_secret(name, each) for each in value)
    return isinstance(value, str) and (_is_secret(name, value) or has_password(value))


def _is_secret(name: str, value: str) -> bool:
    """Judge by whole words: a tokenizer or a number of tokens is no secret, and a bare key may be
    any (`key=len`).
    """
    words = re.findall(r"[a-z0-9]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", name).lower())
    if not words or not value or "=" in name or words[-1] in _FILE_WORDS:
        return False
    *others, last = words
    if last in _AMBIGUOUS_WORDS:
        return not (_PASSES & set(others) or _HARMLESS_VALUE.fullmatch(value))
    if not _SECRET_WORDS.isdisjoint(words) or last.endswith(_SECRET_ENDS):
        return True
    return bool(others) and (last == "key" or (last == "keys" and others[-1] in _KEYS))
