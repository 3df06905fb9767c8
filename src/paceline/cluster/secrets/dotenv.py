"""Files of `NAME=value` lines, read strictly: what two programs might read differently is an error, not a guess.

No error tells what stands in a line: it may be the secret itself.
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
# What other readers would replace. Escaped in double quotes (`\$`), or in single ones, it stands for itself.
_EXPANSION = re.compile(r"\$[({]|`")


def parse_dotenv(text: str, *, where: str) -> dict[str, str]:
    """The variables; a later line wins. Comments, `export`, single and double quotes (over several lines, too).

    In double quotes \\n, \\t, \\r, \\\\, \\", \\$ and \\` are escapes. Nothing is expanded: `${NAME}` is an error.
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
            raise _wrong(where, line, "is no NAME=value")
        value, position = _value(text, name.end(), where=where, line=line)
        if "\0" in value:
            raise _wrong(where, line, "holds a NUL character")
        found[name[1]] = value
    return found


def _value(text: str, start: int, *, where: str, line: int) -> tuple[str, int]:
    """The value that begins here, and where the next line does."""
    mark = text[start]
    if mark in _QUOTED:
        quoted = _QUOTED[mark].match(text, start)
        if quoted is None:
            raise _wrong(where, line, f"opens a quote ({mark}) that is never closed")
        rest = _REST.match(text, quoted.end())
        if rest is None:
            raise _wrong(where, line, "goes on after its closing quote")
        value = quoted[1]
        if mark == '"':
            if _EXPANSION.search(re.sub(r"\\.", "", value, flags=re.DOTALL)):
                raise _expansion(where, line)
            value = re.sub(r"\\(.)", lambda each: _ESCAPES.get(each[1], each[0]), value, flags=re.DOTALL)
        return value, rest.end()
    bare = _BARE.match(text, start)
    assert bare is not None, "it matches nothing as well"
    value = re.split(r"(?:^|[ \t])#", bare[0], maxsplit=1)[0].strip()
    if _EXPANSION.search(value):
        raise _expansion(where, line)
    return value, bare.end() + 1


def _wrong(where: str, line: int, what: str) -> SpecError:
    return SpecError(
        f"{where}, line {line}: {what}",
        hint="write NAME=value, NAME='value' or # a comment; [environment] secret_files says which files are read",
    )


def _expansion(where: str, line: int) -> SpecError:
    return SpecError(
        f"{where}, line {line}: holds ${{...}}, $(...) or a backquote, and nothing is expanded here",
        hint="put the value in single quotes to mean it as it stands, or write out what it stands for",
    )
