"""Type the tutorial into a terminal, line by line, with a real Slurm on two nodes."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.tools.sandbox import packages
from paceline.tools.sandbox.settings import Settings
from tests.docs.pages import ROOT, Block, blocks
from tests.docs.terminal import Terminal, first_missing

PAGE = "docs/tutorial.md"
INSTALL = "pip install"  # the environment of these tests has it


@pytest.fixture
def folder() -> Iterator[Path]:
    """A home folder whose name is short enough for the sockets of a sandbox."""
    with tempfile.TemporaryDirectory(prefix="paceline-ann-") as name:
        yield Path(name)


def environment(home: Path) -> dict[str, str]:
    known = {
        name: os.environ[name]
        for name in ("PACELINE_TEST_TOKEN", "LANG", "TERM")
        if name in os.environ
    }
    return {
        **known,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(home),
        "PYTHONPATH": str(ROOT / "tests" / "light_torch"),
        "TERM": "xterm",
        "LC_ALL": "C.UTF-8",
    }


@pytest.mark.slurm
@pytest.mark.timeout(600)
@pytest.mark.slow  # test_readme.py types commands of each kind
def test_every_line_of_the_tutorial_works_and_prints_what_it_shows(folder: Path) -> None:
    if missing := packages.missing_packages(Settings()):
        pytest.skip(f"the tutorial needs Slurm: {' '.join(missing)}")
    terminal, cwd = Terminal(folder, environment(folder)), folder
    try:
        for block in blocks(PAGE):
            if block.title:
                (cwd / block.title).write_text(block.text, encoding="utf-8")
            for command, shown in block.dialogue() if block.language == "console" else ():
                type_and_compare(terminal, block, command, shown)
                cwd = Path(terminal.type("pwd")[0].strip())
    finally:
        terminal.type("paceline sandbox down")
        terminal.close()


def type_and_compare(terminal: Terminal, block: Block, command: str, shown: list[str]) -> None:
    interrupt_after = shown[shown.index("^C") - 1] if "^C" in shown else ""
    shown = [line for line in shown if line != "^C"]
    output, code = terminal.type(command, interrupt_after=interrupt_after)
    missing = first_missing(shown, output)
    assert missing is None, f"{block}: `{command}` does not print {missing!r}:\n{output}"
    assert code == 0 or interrupt_after, f"{block}: `{command}` exits with {code}:\n{output}"


def test_the_tutorial_has_what_it_promises() -> None:
    typed = "\n".join(command for block in blocks(PAGE) for command in block.commands)
    for part in (
        "paceline run",
        "--resume last",
        "sandbox up",
        "paceline submit",
        "paceline logs",
        "paceline show",
        "paceline report",
        "sandbox down",
    ):
        assert part in typed
    script = next(block.text for block in blocks(PAGE) if block.title == "train.py")
    assert len([line for line in script.splitlines() if line.strip()]) <= 35
    assert all(block.language in ("console", "text", "sh") or block.title for block in blocks(PAGE))
    assert [
        command
        for block in blocks(PAGE)
        if block.language == "sh"
        for command in block.commands
        if not command.startswith(INSTALL)
    ] == []
