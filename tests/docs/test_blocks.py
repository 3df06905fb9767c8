"""Every block of code on every page has a language that says how it is tested: nothing that a reader types is untested.

`text` and `diff` are output. `console` has commands after `$ `, and their output. `sh` has commands alone. `python`
runs, as it is or in the context that `tests/docs/fragments.py` gives it. `toml`, `json` and `dotenv` are read by the
code that does.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import tomllib

from paceline.cli.parser import make_app
from paceline.launch.secrets import parse_dotenv
from paceline.spec.load import read_file
from paceline.spec.settings import Site, Tables
from paceline.spec.sweep import load_sweep
from tests.docs.commands import ELSEWHERE, is_executed, split
from tests.docs.fragments import TESTED_ELSEWHERE, fragment_of
from tests.docs.pages import GENERATED, ROOT, Block, blocks, pages

LANGUAGES = {"text", "diff", "console", "sh", "python", "toml", "json", "dotenv"}
BLOCKS = [block for page in pages() for block in blocks(page)]
SEARCH = '[sweep]\nscript = "train.py"\nsampler = "tpe"\ncount = 2\nmetric = "loss"\n'


def of(*languages: str) -> list[Any]:
    return [pytest.param(block, id=str(block)) for block in BLOCKS if block.language in languages]


def test_every_block_says_what_it_is() -> None:
    unknown = [
        f"{block}: {block.language!r}" for block in BLOCKS if block.language not in LANGUAGES
    ]
    assert unknown == [], f"these blocks need a language of {sorted(LANGUAGES)}"
    assert len(BLOCKS) > 150


def test_console_blocks_begin_with_a_command() -> None:
    assert [
        str(block)
        for block in BLOCKS
        if block.language == "console" and not block.text.startswith("$ ")
    ] == []


def test_every_command_is_executed_by_a_test() -> None:
    missing = [
        f"{block}: {command}"
        for block in BLOCKS
        for command in block.commands
        if not is_executed(block, command) and not command.startswith(tuple(ELSEWHERE))
    ]
    assert missing == [], (
        "execute these in tests/docs/test_commands.py, or name the test that does in commands.py"
    )
    for start, (file, words) in ELSEWHERE.items():
        text = "".join(path.read_text(encoding="utf-8") for path in _files(file))
        assert words in text, f"{file} does not execute `{start}`"


EAGER = ("--help", "--version", "--install-completion", "--show-completion")


def _files(name: str) -> list[Path]:
    path = ROOT / name
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def test_commands_take_the_options_that_pages_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()  # `adopt` looks at the script
    monkeypatch.chdir(tmp_path)
    wrong, app = [], make_app()
    for block in BLOCKS:
        for command in block.commands:
            for words in split(command):
                if words[:1] == ["paceline"] and (problem := _parse(app, words[1:])):
                    wrong.append(f"{block}: {command}: {problem}")
    assert wrong == []


def _parse(command: Any, words: list[str]) -> str:
    if {*words} & {*EAGER}:
        return ""
    try:
        context = command.make_context("paceline", list(words))
        while hasattr(command, "resolve_command"):
            name, command, rest = command.resolve_command(
                context, [*context._protected_args, *context.args]
            )
            context = command.make_context(name, rest, parent=context)
    except Exception as error:
        return error.format_message() if hasattr(error, "format_message") else str(error)
    return ""


@pytest.mark.parametrize("block", of("toml"))
def test_toml_has_only_known_keys(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "paceline.toml"
    file.write_text(block.text, encoding="utf-8")
    values = tomllib.loads(block.text)
    if "sweep" in values or "space" in values:
        missing = {"sweep": SEARCH, "space": "[space]\nlr = [0.1, 0.01]\n"}
        rest = "\n".join(text for name, text in missing.items() if name not in values)
        file.write_text(f"{block.text}\n{rest}", encoding="utf-8")
        load_sweep(file)
        return
    if "limits" in values:  # /etc/paceline/site.toml
        Site.model_validate(values)
        return
    read = read_file(file)
    tables = list(read.pop("profiles", {}).values())
    own = {name: table for name, table in read.items() if name in Tables.model_fields}
    for each in (own, *tables):
        Tables.model_validate(
            {name: table for name, table in each.items() if isinstance(table, dict)}
        )
    hosts = [table for name, table in read.items() if name not in own]
    assert all(set(table) <= {"host", "python", "setup"} for table in hosts), (
        "not a table of clusters.toml"
    )


@pytest.mark.parametrize("block", of("json", "dotenv"))
def test_data_is_readable(block: Block) -> None:
    assert (
        json.loads(block.text)
        if block.language == "json"
        else parse_dotenv(block.text, where=str(block))
    )


def test_every_python_block_is_executed_by_a_test() -> None:
    for block in BLOCKS:
        if block.language != "python" or block.page.startswith(GENERATED):
            continue
        compile(block.text, str(block), "exec")
        known = fragment_of(block) or any(text in block.text for text in TESTED_ELSEWHERE)
        assert known or block.title, f"{block} is not executed: add it to tests/docs/fragments.py"


def test_files_that_readers_save_are_whole_programs() -> None:
    for block in BLOCKS:
        if block.title.endswith(".py"):
            assert "import" in block.text
            assert any(
                block.title in command for each in blocks(block.page) for command in each.commands
            ), block


EXTRA = re.compile(r"(?:paceline|\.)\[([\w,]+)\]")


def test_extras_of_pip_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for page in pages():
        for extras in EXTRA.findall(
            " ".join(shlex.join(each.split()) for each in _pip_lines(page))
        ):
            assert set(extras.split(",")) <= set(project["optional-dependencies"]), page


def _pip_lines(page: str) -> list[str]:
    return [
        line
        for line in (ROOT / page).read_text(encoding="utf-8").splitlines()
        if "pip install" in line
    ]
