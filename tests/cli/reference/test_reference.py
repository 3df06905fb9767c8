"""The reference: complete, up to date in docs/, and found from the terminal and from errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import paceline
from paceline.cli import dispatch
from paceline.cli.command_table import COMMANDS
from paceline.cli.commands.reference import make_pages
from paceline.cli.reference.entries import Page, find
from paceline.errors import PacelineError
from paceline.spec.option_table import TABLE
from paceline.spec.sweep import MODIFIERS, RANGES, SweepTable
from paceline.spec.types_and_defaults import Tables

DOCS = Path(__file__).parents[3] / "docs"
PAGES = make_pages()


def is_known(name: str) -> bool:
    return any(True for _ in find(PAGES, name))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.file)
def test_the_pages_in_docs_are_up_to_date(page: Page) -> None:
    committed = (DOCS / "reference" / page.file).read_text(encoding="utf-8")
    assert committed == page.to_markdown(), (
        f"docs/reference/{page.file} is out of date: run `make docs` and commit it"
    )


def test_every_key_and_every_flag_has_an_entry() -> None:
    keys = [
        f"{table}.{key}"
        for table, field in Tables.model_fields.items()
        for key in getattr(field.annotation, "model_fields", ())
    ]
    keys += [f"sweep.{key}" for key in SweepTable.model_fields] + [
        f"space.{key}" for key in (*RANGES, *MODIFIERS)
    ]
    keys += [flag for group in TABLE.values() for option in group for flag in option.all_flags]
    keys += [
        "params",
        "profiles",
        "--param",
        "--resume",
        "--dry-run",
        "--config",
        "--follow",
        "sweep show",
        "sandbox up",
    ]
    assert [key for key in keys if not is_known(key)] == []
    first = ("build", "stage", "data", "up")  # a command of each group
    unknown = [
        name
        for name in COMMANDS
        if not any(map(is_known, (name, *(f"{name} {each}" for each in first))))
    ]
    assert unknown == []


def test_every_attribute_and_method_of_a_run_has_an_entry() -> None:
    with paceline.session(cpu=True, report=False) as run:
        public = [name for name in dir(run) if not name.startswith("_")]
    assert [name for name in public if not is_known(f"run.{name}")] == []
    assert [
        name
        for name in paceline.__all__
        if name not in ("PacelineError", "wandb", "__version__") and not is_known(name)
    ] == []


def test_every_entry_means_something() -> None:
    empty = [
        entry.names[0]
        for page in PAGES
        for section in page.sections
        for entry in section.entries
        if not re.search(r"\w{3,}", re.sub(r"```.*?```", "", entry.text, flags=re.DOTALL))
    ]
    assert empty == []
    page = PAGES[0].to_markdown()
    assert '| `snapshot_limit` | size: `"32G"` | `"200M"` | `--snapshot-limit` |' in page
    assert '| `direction` | `"minimize"` or `"maximize"` | `"minimize"` |' in page
    assert "Annotated" not in page


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (["job.nodes"], "flag: `--nodes`"),
        (["--nodes"], "commands: run, submit, sweep"),
        (["job"], "gpus_per_node"),
        (["run.wrap"], 'mode="auto"'),
        (["sandbox", "up"], "paceline sandbox up"),
        (["ranks_per_node"], "nproc\n  Ranks per node"),
        (["--walltime"], "time\n  Time limit"),
        ([], "sweep.toml"),
    ],
)
def test_entries_are_printed_in_the_terminal(
    name: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dispatch(["reference", *name]) == 0
    assert text in capsys.readouterr().out


def test_settings_of_several_commands_come_before_options_of_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert dispatch(["reference", "--gpus"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("--gpus, --gpus-per-node N\n")
    assert printed.index("commands: submit") < printed.index("paceline reference sandbox up")


def test_unknown_names_suggest_others() -> None:
    with pytest.raises(PacelineError, match=r"no entry 'job\.nods'") as caught:
        dispatch(["reference", "job.nods"])
    assert "job.nodes" in caught.value.hint
    with pytest.raises(PacelineError, match="no entry 'lr'") as caught:
        dispatch(["reference", "lr"])
    assert "run.params.lr" in caught.value.hint
    for part in ("hang", "ang-time"):
        with pytest.raises(PacelineError) as caught:
            dispatch(["reference", part])
        assert caught.value.hint.startswith("Did you mean hang_timeout"), caught.value.hint
    with pytest.raises(PacelineError) as caught:
        dispatch(["reference", "blah"])
    assert "Did you mean" not in caught.value.hint


@pytest.mark.parametrize(
    ("text", "args", "command"),
    [
        ("[job]\nnods = 2\n", ["submit", "train.py"], "paceline reference job"),
        ("[profiles.a.job]\nnods = 2\n", ["submit", "train.py"], "paceline reference job"),
        ("[jobs]\n", ["submit", "train.py"], "paceline reference"),
        ("", ["submit", "--nods", "2", "train.py"], "paceline reference submit"),
        ("[sweep]\nmetrik = 1\n", ["sweep", "paceline.toml"], "paceline reference sweep.toml"),
        (
            "[space]\nx = { unifrom = [1, 2] }\n",
            ["sweep", "paceline.toml"],
            "paceline reference space",
        ),
    ],
)
def test_errors_name_the_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, args: list[str], command: str
) -> None:
    (tmp_path / "paceline.toml").write_text(text)
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PacelineError) as caught:
        dispatch(args)
    assert f"`{command}`" in caught.value.hint
    name = command.removeprefix("paceline reference").strip()
    assert not name or is_known(name)
