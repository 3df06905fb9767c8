"""Text that wraps at spaces, for terminals."""

from __future__ import annotations

import textwrap


def wrap_text(text: str, width: int) -> str:
    """Break long lines at spaces. A word that is longer than a line stays whole."""
    return "\n".join(
        "\n".join(
            textwrap.wrap(line, max(1, width), break_long_words=False, break_on_hyphens=False)
        )
        for line in text.splitlines()
    )
