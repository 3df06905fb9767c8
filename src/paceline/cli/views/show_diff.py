"""`paceline show RUN --diff`: compare the code of a run with the project as it is now."""

from __future__ import annotations

import sys

from paceline.cli import console
from paceline.contract.run_folder import RunFolder
from paceline.launch.diff import ADDED, CHANGED, REMOVED, Difference, compare_run

CYAN = "\033[36m"
MARKS = {ADDED: ("+", console.GREEN), REMOVED: ("-", console.RED), CHANGED: ("~", CYAN)}


def show_differences(folder: RunFolder, *, names_only: bool) -> int:
    """Print the differences, if any; return 0."""
    found = compare_run(folder)
    for note in found.notes:
        console.say_note(note)
    if not found.files:
        print(f"{found.project} has not changed since {folder.key} was started")
    for each in found.files:
        if names_only or not each.lines:
            _print_name(each)
        if not names_only:
            _print_lines(each)
    return 0


def _print_name(each: Difference) -> None:
    mark, colour = MARKS[each.kind]
    counts = f"  +{each.added} -{each.removed}" if each.lines else ""
    note = f"  ({each.note})" if each.note else ""
    print(
        console.paint(f"{mark} {console.printable(each.name)}", colour, sys.stdout)
        + f"{counts}{note}"
    )


def _print_lines(each: Difference) -> None:
    for number, line in enumerate(each.lines):
        colour = _colour(line) if number > 1 else console.BOLD
        text = console.printable(line)
        print(console.paint(text, colour, sys.stdout) if colour else text)


def _colour(line: str) -> str:
    starts = {"+": console.GREEN, "-": console.RED, "@": CYAN}
    return starts.get(line[:1], "")
