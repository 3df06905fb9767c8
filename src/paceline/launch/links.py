"""What a run's working directory links to: the files and folders of the project that its snapshot
leaves out.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import EnvironmentProblem, UsageError

BYTECODE = "__pycache__"
MAX_LINKS = 1_000  # in one folder; with more, the folder itself is linked
MAX_TOTAL = 5_000
MAX_SIBLINGS = 200
# A folder that has no other code is one for data or results.
PLACEHOLDERS = (".gitkeep", ".gitignore", ".keep", "README", "README.*")


@dataclass
class Links:
    # relative to the project; "../x" for what lies next to it
    names: list[str] = field(default_factory=list)
    # folders with code that are linked for their many other files
    in_place: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # for the user


def find_links(project: Path, code: Iterable[str], *, run_folders: Iterable[Path]) -> Links:
    """Find what to link. `code` are the files in the snapshot. Folders with runs hold such links,
    and get none.
    """
    finder = _Finder(project, code, [path.resolve() for path in run_folders])
    finder.scan("")
    found = finder.found
    if len(found.names) > MAX_TOTAL:
        raise EnvironmentProblem(
            f"More than {MAX_TOTAL:,} files and folders of {project} are not in the code "
            "snapshot, and a job would need"
            " a link to each.",
            hint="Move them into a folder of their own, or pass --workdir project.",
        )
    found.names += finder.siblings()
    return found


class _Finder:
    def __init__(self, project: Path, code: Iterable[str], run_folders: list[Path]) -> None:
        self.project, self.run_folders = project, run_folders
        self.found = Links()
        # folder, such as "a/b/" -> its files and folders
        self.children: dict[str, set[str]] = defaultdict(set)
        self.with_code: set[str] = set()  # folders that have more than placeholders
        for name in code:
            *folders, base = name.split("/")
            parents = ["", *("/".join(folders[: end + 1]) + "/" for end in range(len(folders)))]
            for parent, child in zip(parents, (*folders, base), strict=True):
                self.children[parent].add(child)
            if not any(fnmatch.fnmatchcase(base, pattern) for pattern in PLACEHOLDERS):
                self.with_code.update(parents)

    def scan(self, parent: str) -> None:
        """Find the links of one folder and of those below it. `parent` is empty, or ends with a
        slash.
        """
        found, code = self.found, self.children.get(parent, set())
        can_link = bool(parent) and not self._has_runs(self.project / parent)
        left_out, on_the_way = self._left_out(parent, code, limit=MAX_LINKS if can_link else None)
        if len(left_out) > MAX_LINKS and can_link:
            found.names.append(parent[:-1])
            found.in_place.append(parent[:-1])
            found.notes.append(
                f"{parent[:-1]} has more than {MAX_LINKS:,} files that are not in the code "
                "snapshot: the job uses this"
                " folder of your project directly, including the code in it"
            )
            return
        if len(left_out) > MAX_LINKS:
            left_out = [name for name in left_out if (self.project / name).is_dir()]
            folder = self.project / parent
            found.notes.append(
                f"{folder} has more than {MAX_LINKS:,} files that are not in the code snapshot: "
                "the job has"
                " its folders, but not these files"
            )
        found.names += left_out
        for name in (*sorted(f"{parent}{child}/" for child in code), *on_the_way):
            is_folder = name in self.children or name in on_the_way
            if is_folder and (name in self.with_code or self._has_runs(self.project / name)):
                self.scan(name)
            elif is_folder:
                found.names.append(name[:-1])

    def _has_runs(self, path: Path) -> bool:
        return any(runs.is_relative_to(path.resolve()) for runs in self.run_folders)

    def _is_free_of_runs(self, path: Path) -> bool:
        """Return whether to link a path. A link to a whole disk is the user's own choice, even if
        runs are there.
        """
        if path.is_symlink():
            return path.resolve() not in self.run_folders
        return not any(runs.is_relative_to(path) for runs in self.run_folders)

    def _left_out(
        self, parent: str, code: set[str], *, limit: int | None
    ) -> tuple[list[str], list[str]]:
        """Return what the snapshot lacks in a folder, and separately the folders that have runs
        further down.
        """
        left_out: list[str] = []
        on_the_way: list[str] = []
        folder = (self.project / parent).resolve()
        try:
            entries = os.scandir(self.project / parent)
        except OSError:
            return [], []
        with entries:
            for entry in entries:
                if entry.name in code or entry.name == BYTECODE:
                    continue
                if self._is_free_of_runs(folder / entry.name):
                    left_out.append(f"{parent}{entry.name}")
                    if limit is not None and len(left_out) > limit:
                        break
                elif folder / entry.name not in self.run_folders and not entry.is_symlink():
                    on_the_way.append(f"{parent}{entry.name}/")
        return sorted(left_out), sorted(on_the_way)

    def siblings(self) -> list[str]:
        """Return what lies next to the project, unless that is too much: scripts read "../data",
        and ask git.
        """
        parent = self.project.resolve().parent
        hidden = re.compile(r"\.(?!git$)")
        try:
            names = [
                name
                for name in os.listdir(parent)
                if not hidden.match(name) and name != self.project.name
            ]
        except OSError:
            return []
        if len(names) > MAX_SIBLINGS:
            self.found.notes.append(
                f"{parent} has more than {MAX_SIBLINGS} files and folders: the job cannot find "
                "files next to your"
                " project under ../x, so use full paths for them"
            )
            return []
        kept = [name for name in names if self._is_free_of_runs(parent / name)]
        return [f"../{name}" for name in sorted(kept)]


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
            parts = name.split("/")
            above = {"/".join(parts[: end + 1]) for end in range(len(parts))}
            if (
                name in (".", "..")
                or above & known
                or any(each.startswith(f"{name}/") for each in known)
            ):
                continue
            raise UsageError(
                f"The job will not find {text}: its working directory is a copy of {project}, "
                "without this path.",
                hint=f"Write the path in full, {os.path.normpath(cwd / text)}, or pass --workdir "
                "project.",
            )
