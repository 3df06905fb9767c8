"""Parse files of `NAME=value` lines strictly: what other programs may read differently is an error,
not a guess.

Errors never quote a line, because it may contain the secret.
"""

from __future__ import annotations

import re

from paceline.errors import SpecError

_BLANK = re.compile(r"(?:[ \t]*(?:#[^\n]*)?\n)+")
_NAME = re.compile(r"[ \t]*(?:export[ \t]+)?([A-Za-z_][A-Za-z0-9_]*)[ \t]*=[ \t]*")
_QUOTED = {"'": re.compile(r"'([^']*)'"), '"': re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)}
_BARE = re.compile(r"[^\n]*")
_REST = re.compile(r"[ \t]*(?:#[^\n]*)?\n")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", '"': '"', "$": "$", "`": "`", "\n": ""}
# Other parsers would expand these. They are allowed in single quotes, or escaped (`\$`) in double
# quotes.
_EXPANSION = re.compile(r"\$[({]|`")


def parse_dotenv(text: str, *, where: str) -> dict[str, str]:
    """Return the variables; later lines win. Comments, `export` and quotes (also multi-line) are
    allowed.

    In double quotes \\n, \\t, \\r, \\\\, \\", \\$ and \\` are escapes. Nothing is expanded:
    `${NAME}` is an error.
    """
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    if not text.endswith("\n"):
        text += "\n"
    found: dict[str, str] = {}
    position = 0
    while position < len(text):
        blank = _BLANK.match(text, position)
        if blank:
            position = blank.end()
            continue
        line = text.count("\n", 0, position) + 1
        name = _NAME.match(text, position)
        if name is None:
            raise _error(where, line, "is not of the form NAME=value")
        value, position = _value(text, name.end(), where=where, line=line)
        if "\0" in value:
            raise _error(where, line, "contains a NUL character")
        found[name[1]] = value
    return found


def _value(text: str, start: int, *, where: str, line: int) -> tuple[str, int]:
    """Return the value that begins at `start`, and the position of the next line."""
    quote = text[start]
    if quote in _QUOTED:
        quoted = _QUOTED[quote].match(text, start)
        if quoted is None:
            raise _error(where, line, f"opens a quote ({quote}) that is never closed")
        rest = _REST.match(text, quoted.end())
        if rest is None:
            raise _error(where, line, "continues after its closing quote")
        value = quoted[1]
        if quote == '"':
            if _EXPANSION.search(re.sub(r"\\.", "", value, flags=re.DOTALL)):
                raise _expansion_error(where, line)
            value = re.sub(
                r"\\(.)", lambda match: _ESCAPES.get(match[1], match[0]), value, flags=re.DOTALL
            )
        return value, rest.end()
    bare = _BARE.match(text, start)
    assert bare is not None, "the pattern also matches an empty string"
    value = re.split(r"(?:^|[ \t])#", bare[0], maxsplit=1)[0].strip()
    if _EXPANSION.search(value):
        raise _expansion_error(where, line)
    return value, bare.end() + 1


def _error(where: str, line: int, what: str) -> SpecError:
    return SpecError(
        f"Line {line} of {where} {what}.",
        hint="Write NAME=value, NAME='value' or # a comment. secret_files in [environment] lists "
        "the files to read.",
    )


def _expansion_error(where: str, line: int) -> SpecError:
    return SpecError(
        f"Line {line} of {where} contains ${{...}}, $(...) or a backquote, which Paceline does "
        "not expand.",
        hint="Put the value in single quotes to use it literally, or write out the expanded value.",
    )
