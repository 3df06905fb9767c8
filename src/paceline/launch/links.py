"""What a run's working directory links to: the files and folders of the project that its snapshot
leaves out.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import accumulate, islice
from pathlib import Path

from paceline.errors import EnvironmentProblem, UsageError
from paceline.launch.code_snapshot import BYTECODE

MAX_LINKS = 5_000
MAX_SIBLINGS = 200
# A folder that has no other code is one for data or results.
PLACEHOLDERS = (".gitkeep", ".gitignore", ".keep", "README", "README.*")


def find_links(project: Path, code: Iterable[str], *, run_folders: Iterable[Path]) -> list[str]:
    """Find what to link, relative to the project; `../x` lies next to it.

    `code` are the files in the snapshot. Folders with runs hold such links, and get none.
    """
    children: dict[str, set[str]] = defaultdict(set)  # folder, such as "a/b/" -> its code
    with_code: set[str] = set()  # folders that have more than placeholders
    for name in code:
        *folders, base = name.split("/")
        parents = ["", *accumulate(f"{folder}/" for folder in folders)]
        for parent, child in zip(parents, (*folders, base), strict=True):
            children[parent].add(child)
        if not any(fnmatch.fnmatchcase(base, pattern) for pattern in PLACEHOLDERS):
            with_code.update(parents)
    runs = [path.resolve() for path in run_folders]

    def has_runs(path: Path) -> bool:
        # A link to a whole disk is the user's own choice, even if runs are there.
        if path.is_symlink():
            return path.resolve() in runs
        return any(each.is_relative_to(path) for each in runs)

    def scan(parent: str) -> Iterator[str]:
        folder = (project / parent).resolve()
        for entry in os.scandir(folder):
            name, path = f"{parent}{entry.name}", folder / entry.name
            is_folder = entry.is_dir(follow_symlinks=False)
            if entry.name == BYTECODE or (entry.name in children[parent] and not is_folder):
                continue
            if not has_runs(path) and f"{name}/" not in with_code:
                yield name
            elif is_folder and path not in runs:
                yield from scan(f"{name}/")

    found = sorted(islice(scan(""), MAX_LINKS + 1))
    if len(found) > MAX_LINKS:
        raise EnvironmentProblem(
            f"More than {MAX_LINKS:,} files and folders of {project} are not in the code snapshot, "
            "and a job would need a link to each.",
            hint="Move them into a folder of their own, or pass --workdir project.",
        )
    # Scripts read "../data", and ask git.
    above, hidden = project.resolve().parent, re.compile(r"\.(?!git$)")
    beside = [
        name
        for name in sorted(os.listdir(above) if os.access(above, os.R_OK) else ())
        if not hidden.match(name) and name != project.name and not has_runs(above / name)
    ]
    return found + [f"../{name}" for name in beside if len(beside) <= MAX_SIBLINGS]


def check_args(
    args: Iterable[str], *, cwd: Path, project: Path, code: Iterable[str], links: Iterable[str]
) -> None:
    """Raise an error for an argument that names a file which the working directory will not
    have.
    """
    known = {*code, *links}
    for arg in args:
        for text in (arg, arg.partition("=")[2]):
            if "/" not in text or os.path.isabs(text) or not os.path.exists(cwd / text):
                continue
            name = os.path.relpath(cwd / text, project)
            is_known = name in known or any(
                each.startswith(f"{name}/") or name.startswith(f"{each}/") for each in known
            )
            if name not in (".", "..") and not is_known:
                raise UsageError(
                    f"The job will not find {text}: its working directory is a copy of {project}, "
                    "without this path.",
                    hint=f"Write the path in full, {os.path.normpath(cwd / text)}, or pass "
                    "--workdir project.",
                )
