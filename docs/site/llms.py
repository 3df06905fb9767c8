"""Write llms.txt, an index of all pages for language models, with the titles and the order of the
site.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml without the Python objects that it names."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def make_text() -> str:
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader=_Loader)
    lines = ["# Paceline", "", f"> {settings['site_description']}", ""]
    lines += [
        "`paceline --help` lists the commands, `paceline COMMAND --help` the options of one.",
        "",
    ]
    for entry in settings["nav"]:
        ((title, pages),) = entry.items()
        listed = [f"- [{name}](docs/{page}): {about(page)}" for name, page in _walk(pages, title)]
        lines += [f"## {title}", "", *listed, ""]
    return "\n".join(lines)


def about(page: str) -> str:
    """Return the first sentence of a page."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    parts = [
        part
        for part in text.split("\n\n")
        if part.strip() and not part.startswith(("#", "<!--", "|", "!"))
    ]
    plain = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", " ".join(parts[0].replace("**", "").split()))
    return re.split(r"(?<=[.:])\s", plain)[0].rstrip(".:") + "."


def _walk(pages: Any, title: str) -> Iterator[tuple[str, str]]:
    if isinstance(pages, str):
        yield title, pages
        return
    for entry in pages:
        if isinstance(entry, str):
            yield title, entry
        else:
            ((name, below),) = entry.items()
            yield from _walk(below, name)


if __name__ == "__main__":
    (ROOT / "llms.txt").write_text(make_text(), encoding="utf-8")
