"""`paceline show RUN --diff`: compare the code of a run with the project as it is now."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.cli import console
from paceline.cluster.runs.diff import ADDED, CHANGED, REMOVED, Difference, compare_code
from paceline.cluster.runs.folder import run_path_of
from paceline.cluster.runs.prepare import run_folders_inside
from paceline.contract.run_folder import RunFolder
from paceline.errors import EnvironmentProblem
from paceline.watch.records import read_json

CYAN = "\033[36m"
MARKS = {ADDED: ("+", console.GREEN), REMOVED: ("-", console.RED), CHANGED: ("~", CYAN)}


def show_differences(folder: RunFolder, *, names_only: bool) -> int:
    """Print the differences, if any; return 0."""
    record = read_json(folder.run_json)
    code = _table(record, "code")
    project = Path(str(code.get("folder", "")))
    if not folder.code.is_dir():
        commit = code.get("commit")
        raise EnvironmentProblem(
            f"{folder.path.name} has no copy of its code: it runs, or ran, in place.",
            hint=f"It was started from commit {commit}: git -C {project} diff {commit}"
            if commit
            else "Start runs without --no-snapshot to keep a copy.",
        )
    if not project.is_dir():
        raise EnvironmentProblem(
            f"The project of {folder.path.name} is gone: there is no folder {project}.",
            hint=f"Its code is in {folder.code}.",
        )
    environment, settings = _table(record, "spec", "environment"), _table(record, "spec", "project")
    named = _texts(environment.get("secret_files"))
    found = compare_code(
        folder.code.resolve(),
        project,
        exclude=_texts(settings.get("exclude")),
        exclude_paths=[*run_folders_inside(project, run_path_of(folder)), *(project / name for name in named)],
    )
    workdir = settings.get("workdir")
    if record.get("backend") == "slurm" and workdir != "snapshot":
        console.say_note("this run imports its code from the copy, but reads other files from the project as it is now")
    for name in code.get("in_place") or ():
        console.say_note(f"this run uses the folder {name} of the project itself, also the code in it")
    if not found:
        print(f"{project} has not changed since {folder.path.name} was started")
    for each in found:
        if names_only or not each.lines:
            _print_name(each)
        if not names_only:
            _print_lines(each)
    return 0


def _print_name(each: Difference) -> None:
    mark, colour = MARKS[each.kind]
    counts = f"  +{each.added} -{each.removed}" if each.lines else ""
    note = f"  ({each.note})" if each.note else ""
    print(console.paint(f"{mark} {console.printable(each.name)}", colour, sys.stdout) + f"{counts}{note}")


def _print_lines(each: Difference) -> None:
    for number, line in enumerate(each.lines):
        colour = _colour(line) if number > 1 else console.BOLD
        text = console.printable(line)
        print(console.paint(text, colour, sys.stdout) if colour else text)


def _colour(line: str) -> str:
    starts = {"+": console.GREEN, "-": console.RED, "@": CYAN}
    return starts.get(line[:1], "")


def _table(record: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """Return a table inside a record; empty if there is none. The record may be anybody's."""
    for key in keys:
        value = record.get(key)
        record = value if isinstance(value, dict) else {}
    return record


def _texts(value: object) -> tuple[str, ...]:
    return tuple(each for each in value if isinstance(each, str)) if isinstance(value, list) else ()
