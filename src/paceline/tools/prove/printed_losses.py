"""Losses in the lines that a script prints, such as `epoch 3 lr 0.001 loss: 1.23e-2`."""

from __future__ import annotations

import re

from paceline.errors import RunError

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf(?:inity)?)\b"
# A name, such as "loss", and its number: `loss 0.5`, `loss=0.5`, `"loss": 0.5`, `loss: tensor(0.5)`. What follows the
# number must not make another one of it: 12/100 and 1,234 are no losses.
VALUE = (
    r"(?<![\w/.-]){name}['\"]?\s*(?:[:=]|->|\bis\b)?\s*(?:tensor\()?({number})(?![\w%]|[/:.,]\d)"
)
# Words before the name that make it another value: `val loss 0.5` is not the loss of training.
OTHERS = (
    "val",
    "valid",
    "validation",
    "test",
    "testing",
    "eval",
    "evaluation",
    "dev",
    "holdout",
    "best",
    "min",
    "max",
    "minimum",
    "lowest",
    "final",
    "last",
    "previous",
    "old",
    "mean",
    "avg",
    "average",
    "averaged",
    "running",
    "smoothed",
    "epoch",
    "aux",
    "auxiliary",
    "total",
)
LAST_WORD = re.compile(r"([A-Za-z]+)[\s_./-]*$")


def read_printed(text: str, name: str) -> dict[int, float]:
    """Return the values of a name, numbered in their order. Raises RunError if a line has several.

    The name may consist of several words, as in "val loss". Of a line that was drawn several times, as a progress bar
    is, the last state counts: how often it was drawn depends on the time.
    """
    pattern = _pattern(name)
    found: dict[int, float] = {}
    for line in text.split("\n"):
        shown = line.rstrip("\r").rsplit("\r", 1)[-1]
        values = [
            match[1]
            for match in pattern.finditer(shown)
            if not _is_other(shown[: match.start()], name)
        ]
        if len({float(value) for value in values}) > 1:
            raise RunError(
                f"A line that the script prints has several values of {name!r}: {shown.strip()[:200]}",
                hint="Name the right one in full, as in --metric 'train loss', or write JSON lines and name the file "
                "with --metrics FILE.",
            )
        if values:
            found[len(found) + 1] = float(values[0])
    return found


def _pattern(name: str) -> re.Pattern[str]:
    words = r"\s+".join(re.escape(word) for word in name.split())
    return re.compile(VALUE.replace("{name}", words).replace("{number}", NUMBER), re.IGNORECASE)


def _is_other(before: str, name: str) -> bool:
    """Return whether the words before a name make it another one."""
    word = LAST_WORD.search(before)
    return (
        word is not None
        and word[1].lower() in OTHERS
        and word[1].lower() not in name.lower().split()
    )
