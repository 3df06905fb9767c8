"""What the code is, as git knows it."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CodeIdentity:
    commit: str | None = None
    branch: str | None = None
    changed: bool | None = None  # whether tracked files differ from the commit

    def __str__(self) -> str:
        if self.commit is None:
            return "no commit"
        return f"{self.commit[:10]}{' + changes' if self.changed else ''}"


def identify_code(folder: Path) -> CodeIdentity:
    """The commit, the branch and whether files differ; nothing where there is no git."""
    questions = (
        ["rev-parse", "--verify", "-q", "HEAD"],
        ["symbolic-ref", "-q", "--short", "HEAD"],
        ["diff", "--quiet", "HEAD"],
    )
    try:
        asked = [
            subprocess.Popen(
                ["git", "-C", str(folder), *question],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )
            for question in questions
        ]  # fmt: skip
    except OSError:
        return CodeIdentity()
    answers = [process.communicate()[0].strip() for process in asked]
    if asked[0].returncode != 0:
        return CodeIdentity()
    return CodeIdentity(answers[0], answers[1] or None, asked[2].returncode == 1)
