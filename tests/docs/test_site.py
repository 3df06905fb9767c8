"""The documentation site builds without a warning, has every page, and loads nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT

SECTIONS = (
    "Tutorial",
    "How-to guides",
    "Reference",
    "Explanation",
    "Migration",
    "Troubleshooting",
    "For administrators",
)
LOADED = re.compile(r'<(?:script|img|link|iframe)[^>]+?(?:src|href)="?([^" >]+)')


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder


def test_every_page_is_in_the_site(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        if page.parent.name == "upstream":  # reports for other projects
            continue
        assert (site / page.relative_to(ROOT / "docs")).with_suffix(".html").is_file(), page
    home = (site / "index.html").read_text(encoding="utf-8")
    for section in SECTIONS:
        assert re.search(rf"md-tabs__link[^>]*>\s*{section}\s*<", home), section
    assert not list(site.rglob("*.py"))


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        for address in LOADED.findall(page.read_text(encoding="utf-8")):
            assert not address.startswith(("http", "//")), f"{page.name} loads {address}"
    for style in site.rglob("*.css"):
        assert not re.search(
            r"url\(['\"]?(https?:)?//|@import", style.read_text(encoding="utf-8")
        ), style


def test_flags_stay_whole_and_pages_of_their_own_have_no_empty_column(site: Path) -> None:
    page = (site / "migration.html").read_text(encoding="utf-8")
    assert '<code><span class="flag">--nodes</span> 2' in page
    assert "<code>echo nvidia-smi | paceline" in (site / "slurm.html").read_text(encoding="utf-8")
    assert re.search(r'data-md-type="?navigation"?[^>]* hidden', page)
    assert not re.search(
        r'data-md-type="?navigation"?[^>]* hidden',
        (site / "slurm.html").read_text(encoding="utf-8"),
    )


def test_links_to_examples_lead_to_pages_with_their_source(site: Path) -> None:
    assert "examples/bare/train.py.html" in (site / "frameworks.html").read_text(encoding="utf-8")
    assert "init_process_group" in (site / "examples/bare/train.py.html").read_text(
        encoding="utf-8"
    )


PHONE, SCREEN = {"width": 390, "height": 844}, {"width": 1280, "height": 900}
# What sticks out of the window, unless it is within something that scrolls by itself.
STICKS_OUT = """[...document.querySelectorAll('.md-content *')]
    .filter(each => each.getBoundingClientRect().right > innerWidth + 1)
    .filter(each => !each.closest('.md-typeset__scrollwrap, pre'))
    .map(each => each.tagName + ' ' + each.textContent.slice(0, 60))"""


# Pages with the widest tables and code, the longest one, and one that shows the source of an example.
WIDE = (
    "index",
    "tutorial",
    "migration",
    "errors",
    "monitor",
    "reference/commands",
    "examples/text/model.py",
)


@pytest.mark.parametrize(
    ("scheme", "pages"),
    [
        ("dark", WIDE),
        pytest.param("light", (), marks=pytest.mark.slow),
        pytest.param("dark", (), marks=pytest.mark.slow),
    ],
)
def test_pages_fit_on_a_phone_in_both_schemes(
    site: Path, chromium: Any, scheme: str, pages: tuple[str, ...]
) -> None:
    context = chromium.new_context(viewport=PHONE, color_scheme=scheme)
    page = context.new_page()
    for file in [site / f"{name}.html" for name in pages] or sorted(site.rglob("*.html")):
        page.goto(file.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], file.name
        assert page.evaluate(STICKS_OUT) == [], file.name
        expected = "slate" if scheme == "dark" else "default"
        assert (
            file.name == "404.html"
            or page.get_attribute("body", "data-md-color-scheme") == expected
        )
    context.close()


def test_the_search_works_on_files_without_a_server(site: Path, chromium: Any) -> None:
    page = chromium.new_page(viewport=SCREEN)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto((site / "index.html").as_uri())
    page.fill("input.md-search__input", "preemption")
    page.wait_for_selector(".md-search-result__item", timeout=60_000)
    assert "Survive a preemption" in page.inner_text(".md-search-result__list")
    assert [url for url in asked if not url.startswith("file:")] == []
    page.close()


COPIED = """code => {
    code.setAttribute('data-md-copying', '')  // as the copy button does
    return code.innerText
}"""


def test_columns_fit_on_a_screen_and_buttons_copy_only_commands(site: Path, chromium: Any) -> None:
    page = chromium.new_page(viewport=SCREEN)
    page.goto((site / "reference/configuration.html").as_uri())
    fits = "cell => cell.getBoundingClientRect().right <= cell.closest('.md-content').getBoundingClientRect().right"
    assert page.locator("th:text-is('meaning')").first.evaluate(fits)
    page.goto((site / "tutorial.html").as_uri())
    console = page.locator(".language-console code", has_text="paceline show").first
    assert console.evaluate(COPIED).split("\n") == ["paceline ps", "paceline show", ""]
    page.close()
