"""`paceline reference`: look up a key, a flag, a command or a method, even offline."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import console
from paceline.cli.help import GroupedCommand
from paceline.cli.reference import api, commands, configuration, run_folder
from paceline.cli.reference.entries import ROW, Entry, Page, Section, find
from paceline.cli.reference.man import to_roff
from paceline.contract.run_folder import write_atomically
from paceline.errors import UsageError
from paceline.spec.synonyms import find_key, is_of_script
from paceline.spec.validation_errors import OF_SCRIPT

MIN_PART = 3  # letters of a name that are enough to suggest it

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


# NAME may be a flag
@app.command(cls=GroupedCommand, context_settings={"ignore_unknown_options": True})
def command(
    name: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]", help="A key, a table, a flag, a command, or an attribute of `run`."
        ),
    ] = None,
    *,
    man: Annotated[
        bool, typer.Option("--man", help="Print all commands and options as a manual page.")
    ] = False,
    write: Annotated[
        Path | None, typer.Option("--write", metavar="DIR", help="Write the pages.", hidden=True)
    ] = None,
) -> int:
    """Look up a key of paceline.toml or sweep.toml, a flag, a command, or an attribute or method of `run`.

    \b
      paceline reference job            all keys of [job]
      paceline reference job.nodes      one key
      paceline reference --nodes        a flag
      paceline reference submit         a command and its own options
      paceline reference run.wrap       a method of the runtime
    """
    if man:
        print(to_roff(commands.make_page()), end="")
        return 0
    pages = make_pages()
    if write is not None:
        for page in pages:
            write_atomically(write / page.file, page.to_markdown())
        return 0
    if not name:
        print("\n".join(_contents(pages)))
        return 0
    wanted = " ".join(name)
    # A flag that several commands take comes before options of the same name that a single command has.
    found = sorted(
        find(pages, wanted), key=lambda each: each[2] is not None and each[2].facts == ROW
    )
    if not found and (key := find_key(wanted)):
        table, _, own = key.partition(".")
        console.say_note(f"{wanted} is `{own}` in [{table}]")
        found = list(find(pages, key))
    if not found:
        raise _unknown(pages, wanted)
    print("\n\n".join(_text(section, entry) for _, section, entry in found))
    return 0


def make_pages() -> list[Page]:
    return [
        configuration.make_page(),
        commands.make_page(),
        api.make_page(),
        run_folder.make_page(),
    ]


def _contents(pages: Sequence[Page]) -> list[str]:
    lines = ["Type `paceline reference NAME` for one of these, or for anything in them.", ""]
    for page in pages:
        names = [section.names[0] for section in page.sections if section.names]
        lines += [page.title.replace("`", ""), *(f"  {name}" for name in names), ""]
    return lines[:-1]


def _text(section: Section, entry: Entry | None) -> str:
    """Return an entry, or a whole section, for a terminal."""
    if entry is not None:
        facts = [f"  {name}: {_plain(text)}" for name, text in entry.facts if text]
        where = [f"  see also: paceline reference {section.names[0]}"] if section.names else []
        return "\n".join(
            [
                entry.names[0],
                *(f"  {line}" for line in _plain(entry.text).splitlines()),
                *facts,
                *where,
            ]
        )
    lines = [section.title, *([_plain(section.intro)] if section.intro else [])]
    lines += (
        ["", *(f"  {line}" for line in section.example.splitlines())] if section.example else []
    )
    for each in section.entries:
        about = ", ".join(f"{name} {_plain(text)}" for name, text in each.facts if text)
        lines += ["", each.names[0] + (f"  ({about})" if about else "")]
        lines += [f"  {line}" for line in _plain(each.text).splitlines()]
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Return Markdown as one reads it in a terminal: names of links alone, and blocks of code without fences."""
    text = re.sub(
        r"\[([^\]]+)\]\([^)]+\)", r"\1", text.replace("```python\n", "").replace("\n```", "")
    )
    return console.printable(text)


def _unknown(pages: Sequence[Page], name: str) -> UsageError:
    known = list(
        {each: None for page in pages for section in page.sections for each in _names(section)}
    )
    if is_of_script(name):
        return UsageError(
            f"The reference has no entry {name!r}.", hint=OF_SCRIPT.format(key=name.lstrip("-"))
        )
    close = _parts(name, known) or difflib.get_close_matches(name, known, n=3, cutoff=0.7)
    hint = f"Did you mean {' or '.join(close)}?" if close else "List everything: paceline reference"
    return UsageError(f"The reference has no entry {name!r}.", hint=hint)


def _parts(name: str, known: Sequence[str]) -> list[str]:
    """Return the names that a name is a part of, those that begin with it first: `hang` is for `hang_timeout`."""
    part = name.lstrip("-").lower().replace("-", "_")
    found = (
        [each for each in known if part in each.lower().replace("-", "_")]
        if len(part) >= MIN_PART
        else []
    )
    return sorted(found, key=lambda each: (not each.lower().startswith(part), len(each)))[:3]


def _names(section: Section) -> list[str]:
    return [*section.names, *(name for entry in section.entries for name in entry.names)]
