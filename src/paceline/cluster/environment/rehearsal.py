"""Run a command here as a job would run it: in the job's environment, with its modules, venv and set-up lines."""

from __future__ import annotations

import difflib
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.plan.environment.rehearsal import (
    LINES,
    REFUSED,
    STARTER,
    lines_until,
    python_command,
    rehearsal,
    rehearsal_of,
)
from paceline.plan.slurm.plan import SlurmPlan
from paceline.plan.slurm.shell import environment_section

PATIENCE = 120.0  # seconds: module systems on a busy file system take their time, and so does a first import


@dataclass(frozen=True)
class Tried:
    """How it ended. `code` is None when it took too long."""

    code: int | None
    out: str
    err: str

    @property
    def refusal(self) -> str | None:
        """What the script's own `fail` said, if it was that which ended it."""
        said = re.findall(r"^paceline: (.*)$", self.err, re.MULTILINE)
        return said[-1] if self.code == REFUSED and said else None

    @property
    def last_words(self) -> str:
        lines = [line for line in self.err.splitlines() if line.strip()]
        return lines[-1].strip()[-300:] if lines else f"exit code {self.code}"


def try_lines(text: str, words: Sequence[str] = (), *, environ: Mapping[str, str]) -> Tried:
    """Have bash evaluate the lines, in an empty folder, in just this environment; nothing of it stays behind."""
    with tempfile.TemporaryDirectory(prefix="paceline-check-") as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        cwd = Path(folder, "cwd")  # the job starts in its run folder, where none of the project's files are
        cwd.mkdir()
        # Files, not pipes: a line of `setup` may leave something in the background that holds them open.
        with open(out, "wb") as out_file, open(err, "wb") as err_file:
            process = subprocess.Popen(
                ["bash", "-c", STARTER, "bash", *words], env={**environ, LINES: text}, cwd=cwd,
                stdin=subprocess.DEVNULL, stdout=out_file, stderr=err_file, start_new_session=True,
            )  # fmt: skip
            try:
                code: int | None = process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end_group(process)
        read = [path.read_text(encoding="utf-8", errors="replace") for path in (out, err)]
    return Tried(code, read[0], read[1])


def _end_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except OSError:
        pass
    process.wait()


def try_command(plan: SlurmPlan, words: Sequence[str]) -> Tried:
    """The job's own Python, with these arguments, in the job's surroundings."""
    return try_lines(rehearsal(plan, python_command(plan)), words, environ=plan.submitter)


def module_hint(plan: SlurmPlan, name: str) -> str:
    """What to write instead of a module that cannot be loaded, as far as the module system knows."""
    source = next(line for line in plan.script.splitlines() if line.startswith("source "))
    section = environment_section(plan.script).replace(source, plan.environment).splitlines()
    asked = rehearsal_of(lines_until(section, name), "module -t avail 2>&1")
    tried = try_lines(asked, environ=plan.submitter)
    known = available_names(tried.out)
    if name in known:
        return f"it is there, and cannot be loaded: try it in a shell: module load {name}"
    stem = name.partition("/")[0]
    versions = [each for each in known if each.partition("/")[0] == stem and each != name]
    if versions:
        return f"there is {', '.join(versions[:6])}"
    stems = {each.partition("/")[0] for each in known}
    close = difflib.get_close_matches(name, known if "/" in name else stems, n=1)
    if close:
        return f"did you mean {close[0]!r}? (module avail)"
    return "`module avail` shows what there is; module_paths in [environment] adds folders of modules"


def available_names(text: str) -> list[str]:
    """The names in what `module -t avail` prints: headings end in a colon, marks stand in brackets behind names."""
    names = []
    for line in text.splitlines():
        word = re.sub(r"\s*[(<].*$", "", line.strip())
        if word and not word.endswith((":", "/")) and " " not in word:
            names.append(word)
    return list(dict.fromkeys(names))
