"""The pages that people read, and their blocks of code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# signatures and examples of keys, compared with the code by tests/docs/test_reference.py
GENERATED = "docs/reference/"
FENCE = re.compile(r"^( *)(```+)([^\n]*)\n(.*?)^\1\2[ \t]*$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    page: str  # relative to the project
    line: int
    language: str
    title: str  # the file that a reader saves it as, if the page says so
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """What a reader types: lines after `$ ` of a console block, all lines of a shell block."""
        lines = self.text.splitlines()
        if self.language == "console":
            return [line[2:] for line in lines if line.startswith("$ ")]
        return (
            [line for line in lines if line.strip() and not line.startswith("#")]
            if self.language == "sh"
            else []
        )

    def dialogue(self) -> Iterator[tuple[str, list[str]]]:
        """Yield each command of a console block with the output that the page shows."""
        command, shown = "", list[str]()
        for line in self.text.splitlines():
            if line.startswith("$ "):
                if command:
                    yield command, shown
                command, shown = line[2:], []
            else:
                shown.append(line)
        if command:
            yield command, shown


def pages() -> list[str]:
    found = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    return ["README.md", "CONTRIBUTING.md", *sorted(str(path.relative_to(ROOT)) for path in found)]


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        language, _, rest = match[3].strip().partition(" ")
        title = re.search(r'title="([^"]+)"', rest)
        indent = match[1]
        content = "".join(line.removeprefix(indent) for line in match[4].splitlines(keepends=True))
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(page, line, language, title[1] if title else "", content))
    return found
