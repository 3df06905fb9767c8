"""Files about the project: CITATION.cff and llms.txt."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import tomllib
import yaml

from tests.docs.pages import ROOT


def test_the_citation_has_what_its_format_requires_and_the_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert citation["cff-version"] == "1.2.0"
    assert set(citation) <= {
        "cff-version",
        "message",
        "title",
        "abstract",
        "type",
        "authors",
        "version",
        "license",
        "keywords",
    }
    assert citation["type"] in ("software", "dataset")
    assert str(citation["version"]) == project["version"]
    assert citation["license"] == project["license"]
    assert [each["name"] for each in citation["authors"]] == [
        each["name"] for each in project["authors"]
    ]
    assert all(
        isinstance(citation[key], str) and citation[key] for key in ("message", "title", "abstract")
    )


def test_llms_txt_lists_every_page() -> None:
    text = (ROOT / "llms.txt").read_text(encoding="utf-8")
    made = runpy.run_path(str(ROOT / "docs/site/llms.py"))["make_text"]()
    # first sentences of pages may be those of yesterday
    titles = re.compile(r"^- \[[^\]]+\]\([^)]+\)", re.MULTILINE)
    assert titles.findall(text) == titles.findall(made), (
        "llms.txt is out of date: run `make docs` and commit it"
    )
    linked = set(re.findall(r"\]\(([^)]+)\)", text))
    assert all((ROOT / link).is_file() for link in linked)
    pages = {
        str(path.relative_to(ROOT))
        for path in Path(ROOT, "docs").rglob("*.md")
        if path.parent.name != "upstream"
    }
    assert linked == pages
