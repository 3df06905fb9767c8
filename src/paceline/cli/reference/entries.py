"""One entry of the reference, and a page of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

ROW = (("", ""),)  # the facts of an entry that has none, and is a row of a table


@dataclass(frozen=True)
class Entry:
    """Something that one can look up: a key, a flag, a method."""

    names: tuple[str, ...]  # what one may type to find it; the first is the one to show
    text: str  # what it is, in Markdown
    facts: tuple[tuple[str, str], ...] = ()  # such as its type and its default


@dataclass(frozen=True)
class Section:
    """A heading with an introduction and entries. Those with facts are rows of one table, the others have headings."""

    title: str
    names: tuple[str, ...] = ()
    intro: str = ""
    example: str = ""  # a block of code
    language: str = "toml"
    entries: Sequence[Entry] = field(default_factory=tuple)

    def to_markdown(self) -> str:
        parts = [f"## {self.title}", self.intro]
        if self.example:
            parts.append(f"```{self.language}\n{self.example.rstrip()}\n```")
        tabular = [entry for entry in self.entries if entry.facts]
        if tabular:
            parts.append(_table(tabular))
        parts += [
            f"### `{entry.names[0]}`\n\n{entry.text}" for entry in self.entries if not entry.facts
        ]
        return "\n\n".join(part for part in parts if part)


@dataclass(frozen=True)
class Page:
    file: str
    title: str
    intro: str
    sections: Sequence[Section]

    def to_markdown(self) -> str:
        note = "<!-- Generated from the code: do not edit. `make docs` writes this page. -->"
        contents = " · ".join(
            f"[{_plain(each.title)}](#{anchor(each.title)})" for each in self.sections
        )
        body = "\n\n".join(section.to_markdown() for section in self.sections)
        return f"# {self.title}\n\n{note}\n\n{self.intro}\n\n{contents}\n\n{body}\n"


def find(pages: Sequence[Page], name: str) -> Iterator[tuple[Page, Section, Entry | None]]:
    """Yield what a name means: entries, and sections (with None)."""
    for page in pages:
        for section in page.sections:
            if name in section.names:
                yield page, section, None
            for entry in section.entries:
                if name in entry.names:
                    yield page, section, entry


def anchor(title: str) -> str:
    """Return the fragment that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")


def _plain(title: str) -> str:
    return title.replace("[", "\\[").replace("]", "\\]")


def _table(entries: Sequence[Entry]) -> str:
    heads = ["name", *(name for name, _ in entries[0].facts if name), "meaning"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for entry in entries:
        cells = [f"`{entry.names[0]}`", *(text for name, text in entry.facts if name), entry.text]
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)
