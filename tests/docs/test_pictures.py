"""The pictures in the docs are drawn by the tools themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"


@pytest.mark.parametrize(("name", "word"), [("show", "training"), ("ps", "running")])
def test_pictures_can_be_drawn_and_load_nothing(name: str, word: str, tmp_path: Path) -> None:
    out = tmp_path / f"{name}.svg"
    subprocess.run([sys.executable, str(PICTURES / f"{name}.py"), str(out)], check=True)
    for path in (out, PICTURES / f"{name}.svg"):
        text = path.read_text(encoding="utf-8")
        assert ElementTree.fromstring(text).tag.endswith("svg")
        assert "url(http" not in text
        assert word in text
        assert str(tmp_path) not in text
