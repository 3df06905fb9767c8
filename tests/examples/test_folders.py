"""Every example has a script of readable length, valid settings and a page, and docs/examples.md names it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.spec.job import Program
from paceline.spec.load import load_job
from tests.examples.ranks import EXAMPLES

FOLDERS = sorted(path.parent for path in EXAMPLES.glob("*/paceline.toml"))
OVERVIEW = (EXAMPLES.parent / "docs" / "examples.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_settings_are_valid(folder: Path) -> None:
    job = load_job(Program("train.py"), cwd=folder)
    assert job.tables.project.name == folder.name
    assert job.tables.job.time, "a cluster asks for it"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_pages_name_what_is_there(folder: Path) -> None:
    assert f"(../examples/{folder.name}/train.py)" in OVERVIEW
    assert len((folder / "train.py").read_text(encoding="utf-8").splitlines()) <= 200
    page = folder / "README.md"
    for target in re.findall(
        r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8") if page.exists() else ""
    ):
        assert target.startswith("https:") or (folder / target).exists(), f"{page}: {target}"
