"""Hooks of mkdocs: files of the project that pages link to are pages of the site too."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\(\.\./((?:examples|benchmarks)/[^)#]+)\)")
README = re.compile(r"\]\(\.\./README\.md[^)]*\)")  # what it says is on the pages of the site
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".txt": "text"}


def on_files(files: Files, *, config: Any) -> Files:
    """Add a page for each file outside docs/ that a page links to."""
    for path in sorted({path for text in _texts(files) for path in LINK.findall(text)}):
        source = ROOT / path
        files.append(File.generated(config, f"{path}.md", content=_page(path, source)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return README.sub("](index.md)", LINK.sub(r"](\1.md)", markdown))


def _texts(files: Files) -> Iterator[str]:
    for file in files.documentation_pages():
        yield file.content_string


def _page(path: str, source: Path) -> str:
    if source.suffix == ".md":
        return source.read_text(encoding="utf-8")
    code = source.read_text(encoding="utf-8")
    return f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n````{LANGUAGES[source.suffix]}\n{code}````\n"
