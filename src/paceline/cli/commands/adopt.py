"""`paceline adopt`: what to change in a script so that it trains on several ranks."""

from __future__ import annotations

import difflib
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import console
from paceline.contract.files import open_output
from paceline.errors import UsageError
from paceline.tools.adopt.script_changes import Advice, advise, broken_help
from paceline.tools.adopt.source_edits import Source, read_source

MAX_LINES = 8  # that are listed for a reason


def command(
    script: Annotated[
        Path,
        typer.Argument(metavar="SCRIPT", help="Your training script.", exists=True, dir_okay=False),
    ],
    *,
    write: Annotated[
        bool,
        typer.Option("--write", help="Change the script, and keep the old one as SCRIPT.orig."),
    ] = False,
) -> int:
    """Say what to change in a script so that it trains on several ranks, and why.

    It prints the few lines to change as a diff, the reason for each, and what you should look at yourself, with line
    numbers. A script that is distributed already works as it is. Your script changes only if you add --write, which
    first checks that its --help still runs; comments and layout stay as they are. With --write, the exit code is 1 if
    something is left that you must change yourself.

    \b
      paceline adopt train.py            print a diff and the reasons
      paceline adopt --write train.py    apply it; the old script stays as train.py.orig
      paceline inspect data train.py     then: see which samples each rank gets
      paceline prove train.py            then: check that two ranks train like one
    """
    source = read_source(script)
    advice = advise(source)
    _show(source, advice)
    if write and advice.edits and (problem := broken_help(source, advice)):
        raise UsageError(
            f"With these changes, `--help` of {script} fails, so it stays as it is: {problem}",
            hint="Make the changes above yourself, one by one.",
        )
    if write and advice.edits:
        kept = _write(script, advice.text.encode(source.encoding))
        print(
            f"wrote {console.printable(str(script))}; the old one, with these line numbers, is"
            f" {console.printable(str(kept))}"
        )
    elif advice.edits:
        print(f"to apply it: paceline adopt --write {console.printable(shlex.quote(str(script)))}")
    if advice.next_steps:
        print("then check it:" if advice.edits else "to try it:")
    for step in advice.next_steps:
        print(f"  {console.printable(step)}")
    return 1 if write and any(remark.must for remark in advice.remarks) else 0


def _show(source: Source, advice: Advice) -> None:
    """Print the diff, the reasons and the remarks, with the line numbers of the script as it was."""
    name = source.name.lstrip("/")
    before, after = _lines(source.text), _lines(advice.text)
    for line in difflib.unified_diff(before, after, f"a/{name}", f"b/{name}", lineterm=""):
        print(console.printable(line))
    print(console.paint(console.printable(advice.verdict), console.BOLD, sys.stdout))
    reasons: dict[str, dict[int, None]] = {}
    for edit in advice.edits:
        number = len(_lines(source.text[: edit.start] + "."))
        reasons.setdefault(edit.reason, {})[number] = None
    for reason, lines in reasons.items():
        listed = ", ".join(map(str, [*lines][:MAX_LINES])) + ", ..." * (len(lines) > MAX_LINES)
        print(f"  line{'s' * (len(lines) > 1)} {listed}: {console.printable(reason)}")
    for title, must in (("change these yourself:", True), ("look at these:", False)):
        remarks = [each for each in advice.remarks if each.must is must]
        if remarks:
            print(title)
        for remark in remarks:
            text = f"line {remark.line}: {remark.text}" if remark.line else remark.text
            print(f"  {console.printable(text)}")


def _lines(text: str) -> list[str]:
    return text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n").split("\n")


def _write(script: Path, content: bytes) -> Path:
    """Replace a script, and keep the old one next to it. Its permissions stay."""
    target = script.resolve()  # a link stays a link
    if not target.stat().st_mode & 0o222:
        raise UsageError(
            f"{script} is read-only, so it stays as it is.",
            hint=f"chmod u+w {shlex.quote(str(script))}",
        )
    suffixes = ("", *(f".{number}" for number in range(2, 1000)))
    names = (Path(f"{target}.orig{each}") for each in suffixes)
    kept = next(path for path in names if not os.path.lexists(path))
    shutil.copy2(target, kept)
    with open_output(target) as file:
        file.write(content)
    return kept
