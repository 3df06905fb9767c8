"""The reference in docs/ and the manual page: up to date, complete, and clean."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

import paceline
from tests.docs.pages import ROOT

REFERENCE = ROOT / "docs" / "reference"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs" / "site"))
        return importlib.import_module("reference")


def test_the_reference_is_up_to_date(generator: ModuleType) -> None:
    for file, text in generator.make_files().items():
        assert (REFERENCE / file).read_text(encoding="utf-8") == text, (
            f"docs/reference/{file} is out of date: run `make docs` and commit it"
        )


def test_every_attribute_and_method_of_a_run_has_an_entry() -> None:
    text = (REFERENCE / "api.md").read_text(encoding="utf-8")
    with paceline.session(cpu=True, report=False) as run:
        public = [name for name in dir(run) if not name.startswith("_")]
    assert [name for name in public if f"`run.{name}`" not in text] == []


def test_every_entry_means_something(generator: ModuleType) -> None:
    assert [name for name, text in generator.every_entry() if not re.search(r"\w{3,}", text)] == []
    assert "Annotated" not in Path(REFERENCE / "configuration.md").read_text(encoding="utf-8")


def test_the_manual_page_is_clean(generator: ModuleType) -> None:
    assert generator.escape(".so /etc/passwd") == "\\&.so /etc/passwd"
    if shutil.which("groff") is None:
        pytest.skip("no groff to check the page with")
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", "-z", REFERENCE / "paceline.1"],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
