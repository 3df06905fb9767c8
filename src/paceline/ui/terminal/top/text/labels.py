"""Lines with a name at their left, and what follows of a long one indented."""

from __future__ import annotations

from rich.text import Text

from paceline.ui.terminal.top.text.words import plain

LABEL = 9  # columns of the names at the left
MAX_FOLDS = 20  # of a line that is too long


def label(name: str, text: str, style: str = "") -> Text:
    """Return a line with a name at its left. Longer lines are wrapped by the pane."""
    shown = plain(name)[: LABEL - 1]
    return Text.assemble((shown.ljust(LABEL), "dim"), (text, style))


def fold(line: Text, width: int) -> list[Text]:
    """Cut a line that is too long between two words, and indent what follows."""
    folded: list[Text] = []
    line.rstrip()
    while line.cell_len > width and len(folded) < MAX_FOLDS:
        fits = len(line.plain) if line.cell_len == len(line.plain) else width // 2
        at = line.plain.rfind(" ", LABEL + 1, min(fits, width) + 1)
        at = at if at > LABEL else min(fits, width)
        folded.append(line[:at])
        line = Text.assemble(" " * LABEL, line[at:] if line.plain[at] != " " else line[at + 1 :])
    return [*folded, line]
