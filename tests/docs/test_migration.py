"""The migration tables name flags and commands that exist."""

from __future__ import annotations

import contextlib
import io
import re

import pytest

from paceline.cli import dispatch
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs/migration.md").read_text(encoding="utf-8")
SUBMITTER = (
    "--account",
    "--gpus",
    "--cpus",
    "--which-distributed",
    "--time",
    "--mem-per-gpu",
    "--gpu-type",
    "--exp-name",
    "--wandb-sweepid",
    "--num-nodes",
    "--data",
    "--singularity-container",
    "--configs",
)
FLAG = re.compile(r"(?<![\w-])(--[a-z][\w-]*)")


def help_of(*command: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        dispatch([*command, "--help"])
    return out.getvalue().replace("--[no-]", "--")


@pytest.fixture(scope="module")
def helps() -> dict[str, set[str]]:
    commands = ("submit", "sweep", "run", "wait", "logs", "cancel")
    return {name: set(FLAG.findall(help_of(name))) for name in commands}


def rows() -> list[list[str]]:
    """Return the cells of all rows: what one writes elsewhere, what one writes here, a note."""
    lines = [line for line in PAGE.splitlines() if line.startswith("|") and "---" not in line]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_every_flag_of_ours_is_in_the_help(helps: dict[str, set[str]]) -> None:
    everywhere = set().union(*helps.values())
    checked = 0
    for cells in rows():
        assert 2 <= len(cells) <= 3, cells
        command = re.search(r"`paceline (\w+)", cells[1])
        ours = [
            flag
            for text in re.findall(r"`([^`]+)`", cells[1])
            for flag in FLAG.findall(text.partition("=--")[0])
        ]
        for flag in ours:
            assert flag in helps[command[1] if command else "submit"], f"{flag} in {cells}"
            checked += 1
        for flag in FLAG.findall(
            " ".join(re.findall(r"`([^`]+)`", cells[2])) if len(cells) > 2 else ""
        ):
            assert flag in everywhere or flag.replace("--no-", "--") in everywhere, (
                f"{flag} in {cells}"
            )
        if command:
            assert command[1] in helps, cells
    assert checked > 60


def test_options_of_shell_submitters_are_all_there() -> None:
    section = PAGE.partition("## From a shell submitter")[2]
    listed = [match[1] for match in re.finditer(r"^\| `(--[\w-]+)`", section, re.MULTILINE)]
    assert set(SUBMITTER) <= set(listed)


def test_a_flag_that_does_not_exist_is_found(helps: dict[str, set[str]]) -> None:
    assert "--exp-name" not in helps["submit"]
    assert {"--gpus", "--nodes", "--sbatch-arg"} <= helps["submit"]
