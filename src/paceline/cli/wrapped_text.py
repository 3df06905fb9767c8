"""Text that wraps at spaces, for terminals: a command still works if you copy all its lines."""

from __future__ import annotations

import re
import textwrap

# A word of a command, as `command_line` quotes it.
_WORD = re.compile(r"""(?:\$'(?:\\.|[^'\\])*'|'[^']*'|"[^"]*"|\S)+""")


def wrap_text(text: str, width: int) -> str:
    """Break long lines at spaces. A word that is longer than a line stays whole."""
    return "\n".join(
        "\n".join(textwrap.wrap(line, max(1, width), break_long_words=False, break_on_hyphens=False))
        for line in text.splitlines()
    )


def wrap_command(text: str, width: int) -> str:
    """Break the lines of commands between arguments, with a backslash at the end of a line that goes on."""
    return "\n".join(_wrap_words(_WORD.findall(line), width) for line in text.splitlines())


def _wrap_words(words: list[str], width: int) -> str:
    lines = words[:1]
    for word, last in zip(words[1:], [*[False] * (len(words) - 2), True], strict=False):
        longer = f"{lines[-1]} {word}"
        if len(longer) <= (width if last else width - 2):  # room for a backslash
            lines[-1] = longer
        else:
            lines.append(word)
    return " \\\n".join(lines)
