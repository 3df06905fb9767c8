"""Completion in the shell, and the manual page."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from paceline.cli import dispatch
from paceline.cli.command_table import COMMANDS
from paceline.cli.reference import commands
from paceline.cli.reference.man import escape
from paceline.errors import UsageError
from paceline.spec.option_table import options_of


def printed(*args: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert dispatch(list(args)) == 0
    return out.getvalue()


@pytest.fixture(scope="module")
def script() -> str:
    return printed("completion", "bash")


def complete(script: str, *words: str, cwd: str = "/") -> list[str]:
    """Press Tab after these words in bash."""
    array = " ".join(f"'{word}'" for word in words)
    asked = f"COMP_WORDS=({array}); COMP_CWORD={len(words) - 1}; _paceline; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(
        ["bash", "-c", f"{script}\n{asked}"], cwd=cwd, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout.split("\n")[:-1]


def test_commands_subcommands_and_options_are_completed(script: str) -> None:
    assert complete(script, "paceline", "su") == ["submit"]
    assert complete(script, "paceline", "") == list(COMMANDS)
    assert complete(script, "paceline", "sandbox", "kill") == ["kill-node"]
    assert complete(script, "paceline", "sandbox", "up", "--gpu") == ["--gpu-type", "--gpus"]
    assert "--watch" in complete(script, "paceline", "sweep", "show", "--")
    shown = complete(script, "paceline", "submit", "--")
    assert {option.name for _, option in options_of("submit")} <= set(shown)
    assert "--no-requeue" in shown


def test_options_after_the_script_are_its_own(script: str, tmp_path: Path) -> None:
    (tmp_path / "my data").touch()
    assert complete(script, "paceline", "run", "train.py", "--") == [""]
    assert complete(script, "paceline", "run", "train.py", "m", cwd=str(tmp_path)) == ["my data"]


def test_zsh_reads_its_script() -> None:
    if shutil.which("zsh") is None:
        pytest.skip("no zsh")
    text = (
        "autoload -U +X compinit && compinit -u -D\n"
        + printed("completion", "zsh")
        + "print $+functions[_paceline]"
    )
    done = subprocess.run(["zsh", "-f", "-c", text], capture_output=True, text=True)
    assert done.stdout.strip() == "1", done.stderr


def test_fish_completes_the_same(tmp_path: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("no fish")
    (tmp_path / "paceline.fish").write_text(printed("completion", "fish"))
    lines = ("su", "sandbox kill", "sandbox up --gpu", "submit --no-req", "run train.py --gp")
    asked = "\n".join(
        ["source paceline.fish", *(f"echo '>'; complete -C 'paceline {line}'" for line in lines)]
    )
    done = subprocess.run(
        ["fish", "--no-config", "-c", asked],
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    found = [sorted(part.split()) for part in done.stdout.split(">\n")[1:]]
    assert found == [["submit"], ["kill-node"], ["--gpu-type", "--gpus"], ["--no-requeue"], []]


def test_other_shells_are_refused() -> None:
    with pytest.raises(UsageError, match="no completion for 'tcsh'"):
        dispatch(["completion", "tcsh"])


def test_the_manual_page_is_clean_and_has_every_command_and_option() -> None:
    roff = printed("reference", "--man")
    for name in COMMANDS:
        assert f"\\fB{name}\\fR" in roff
    for section in commands.make_page().sections:
        for entry in section.entries:
            assert f"\\fB{escape(entry.names[0])}\\fR" in roff
    if shutil.which("groff") is None:
        pytest.skip("no groff to check the page with")
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", "-z"], input=roff, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_text_cannot_become_a_request_of_roff() -> None:
    assert escape(".so /etc/passwd") == "\\&.so /etc/passwd"
    assert escape("a\\b") == "a\\eb"
