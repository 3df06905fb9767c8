"""The git commit and branch of the code."""

from __future__ import annotations

import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from paceline.contract.files.sent_code import read_sent_code


@dataclass(frozen=True)
class CodeIdentity:
    commit: str | None = None
    branch: str | None = None
    changed: bool | None = None  # whether the code differs from the commit

    def __str__(self) -> str:
        if self.commit is None:
            return "no commit"
        return f"{self.commit[:10]}{' + changes' if self.changed else ''}"


def identify_code(folder: Path, names: Collection[str] = ()) -> CodeIdentity:
    """Return the commit, the branch and whether the code differs; all None without git.

    `names` are the files that are copied: those that git does not track are changes, too.
    """
    sent = read_sent_code(folder)
    if sent is not None:
        return CodeIdentity(sent.commit, sent.branch, sent.changed)
    queries = (
        ["rev-parse", "--verify", "-q", "HEAD"],
        ["symbolic-ref", "-q", "--short", "HEAD"],
        ["diff", "--quiet", "HEAD"],
        ["ls-files", "-z", "--others", "--exclude-standard"],
    )
    try:
        processes = [
            subprocess.Popen(
                ["git", "-C", str(folder), *query],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                errors="surrogateescape",
            )
            for query in queries
        ]
    except OSError:
        return CodeIdentity()
    commit, branch, _, listed = (process.communicate()[0].strip() for process in processes)
    if processes[0].returncode != 0:
        return CodeIdentity()
    new = {name for name in listed.split("\0") if name}
    folders = tuple(name for name in new if name.endswith("/"))  # repositories inside this one
    has_new = not new.isdisjoint(names) or any(name.startswith(folders) for name in names)
    return CodeIdentity(commit, branch or None, processes[2].returncode == 1 or has_new)
