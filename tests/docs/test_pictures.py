"""The pictures in the docs are drawn by the tools themselves."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"


@pytest.mark.parametrize(
    ("name", "words"), [("show", ["training"]), ("ps", ["running", ";9m&", ";4h&"])]
)
def test_pictures_can_be_drawn_and_load_nothing(
    name: str, words: list[str], tmp_path: Path
) -> None:
    """Runs that train have time left."""
    out = tmp_path / f"{name}.svg"
    subprocess.run([sys.executable, str(PICTURES / f"{name}.py"), str(out)], check=True)
    for path in (out, PICTURES / f"{name}.svg"):
        text = path.read_text(encoding="utf-8")
        assert ElementTree.fromstring(text).tag.endswith("svg")
        assert "url(http" not in text
        assert all(word in text for word in words)
        assert str(tmp_path) not in text


@pytest.mark.slow  # tests/ui look at these pages
def test_pages_can_be_drawn_and_are_small(tmp_path: Path) -> None:
    pytest.importorskip("playwright")
    if shutil.which("chromium") is None:
        pytest.skip("no Chromium")
    subprocess.run([sys.executable, str(PICTURES / "pages.py"), str(tmp_path)], check=True)
    for name in ("run-page.png", "sweep-page.png"):
        for path in (tmp_path / name, PICTURES / name):
            content = path.read_bytes()
            assert content.startswith(b"\x89PNG")
            assert 20_000 < len(content) < 200_000


def test_pictures_of_launch_styles_are_what_the_script_draws(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(PICTURES / "launch_styles.py"), str(tmp_path)], check=True)
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert drawn == sorted(path.name for path in PICTURES.glob("style-*.svg"))
    for name in drawn:
        assert (tmp_path / name).read_bytes() == (PICTURES / name).read_bytes(), name
