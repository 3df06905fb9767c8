"""Hooks of mkdocs: files of the project that pages link to are pages of the site too."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\(\.\./((?:examples|benchmarks)/[^)#]+)\)")
CHANGELOG = "changelog.md"
# reports for other projects are no pages
UPSTREAM = re.compile(r"\[([^\]]+)\]\(docs/upstream/[^)]+\)")
README = re.compile(r"\]\(\.\./README\.md[^)]*\)")  # what it says is on the pages of the site
INLINE = re.compile(r"(?<!<pre>)<code>[^<]+</code>")
FLAG = re.compile(r"(?<![^\s>(])--?[a-z][^\s<]{0,23}(?=[\s<])")
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".txt": "text"}


def on_files(files: Files, *, config: Any) -> Files:
    """Add a page for each file outside docs/ that a page links to."""
    for path in sorted({path for text in _texts(files) for path in LINK.findall(text)}):
        source = ROOT / path
        files.append(File.generated(config, f"{path}.md", content=_page(path, source)))
    changes = UPSTREAM.sub(r"\1", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")).replace(
        "](docs/", "]("
    )
    files.append(File.generated(config, CHANGELOG, content=changes))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    if page.parent is None:  # a tab of its own: the column with the section's pages would be empty
        page.meta["hide"] = ["navigation"]
    markdown = markdown.replace("](../CHANGELOG.md)", f"]({CHANGELOG})")
    return README.sub("](index.md)", LINK.sub(r"](\1.md)", markdown))


def on_page_content(html: str, **_: Any) -> str:
    """Keep flags whole, and show `\\|` of a table as a bar.

    Browsers break lines after each hyphen, also between the two of `--nodes`. Code hosts need the
    backslash.
    """
    return INLINE.sub(
        lambda match: FLAG.sub(r'<span class="flag">\g<0></span>', match[0].replace("\\|", "|")),
        html,
    )


def _texts(files: Files) -> Iterator[str]:
    for file in files.documentation_pages():
        yield file.content_string


def _page(path: str, source: Path) -> str:
    if source.suffix == ".md":
        return source.read_text(encoding="utf-8")
    code = source.read_text(encoding="utf-8")
    return (
        "---\nsearch:\n  exclude: true\n---\n\n# "
        f"{path}\n\n````{LANGUAGES[source.suffix]}\n{code}````\n"
    )
