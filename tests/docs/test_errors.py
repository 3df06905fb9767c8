"""The index of errors quotes what Paceline prints."""

from __future__ import annotations

import ast
import re

import pytest

from tests.docs.pages import ROOT

PAGE = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
QUOTED = re.findall(r"^\| `(.+?)` \| ", PAGE, re.MULTILINE)


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """All texts in the source, with … for what they fill in."""
    found = []
    for path in (ROOT / "src/paceline").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    each.value if isinstance(each, ast.Constant) else "…" for each in node.values
                ]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


@pytest.mark.parametrize("quoted", QUOTED)
def test_the_source_has_the_text(quoted: str, printed: list[str]) -> None:
    pattern = re.compile(
        r"(?s:.*)".join(re.escape(part) for part in quoted.rstrip("….").split("…"))
    )
    assert any(pattern.search(text) for text in printed), quoted


def test_the_index_is_long_and_finds_what_is_wrong(printed: list[str]) -> None:
    assert len(QUOTED) >= 30
    assert not any("There is no such error text" in text for text in printed)
