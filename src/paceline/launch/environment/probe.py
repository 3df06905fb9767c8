"""Probes: run a command here as a job would run it, with the job's variables, modules, venv and `setup` lines."""

from __future__ import annotations

import difflib
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.contract import env
from paceline.launch.environment.container import FUNCTION
from paceline.launch.slurm_plan import SlurmPlan
from paceline.spec.shell_text import quote

# seconds: module systems on a busy file system take their time, and so does a first import
TIMEOUT = 120.0


@dataclass(frozen=True)
class ProbeResult:
    """How a probe ended. `code` is None if it took too long; `failure` is what the script's own `fail` was given."""

    code: int | None
    out: str
    err: str
    failure: str | None = None

    @property
    def last_line(self) -> str:
        lines = self.err.strip().splitlines()
        return lines[-1].strip()[-300:] if lines else f"exit code {self.code}"


def environment_lines(plan: SlurmPlan) -> list[str]:
    """Return the lines of a script that set up its environment, with the variables themselves."""
    return [
        f"paceline_run={quote(str(plan.run_path.folder.path))}",
        f"paceline_python={quote(plan.launch_spec.python)}",
        plan.environment_file,
        *plan.environment.after_variables(),
    ]


def probe(
    lines: Sequence[str], command: str, *args: str, environ: Mapping[str, str]
) -> ProbeResult:
    """Have bash run the lines, then a command, in an empty folder and just this environment; nothing stays behind.

    The command may use "$@", which are `args`. The lines may have secrets: the folder is ours alone.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-check-") as folder:
        # the job starts in its run folder, where none of the project's files are
        script, out, err, report, cwd = (
            Path(folder, name) for name in ("script", "out", "err", "report", "cwd")
        )
        cwd.mkdir()
        head = [
            f"export {env.CHECK}=1",
            f'paceline_fail() {{ echo "$*" >{quote(str(report))}; exit 1; }}',
        ]
        script.write_text("\n".join([*head, *lines, command]), "utf-8", "surrogateescape")
        # Files, not pipes: a line of `setup` may leave something in the background that holds them open.
        with open(out, "wb") as out_file, open(err, "wb") as err_file:
            process = subprocess.Popen(
                ["bash", str(script), *args],
                env=environ,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=out_file,
                stderr=err_file,
                start_new_session=True,
            )
            code = None
            try:
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(TIMEOUT)
            finally:  # also after Ctrl-C, which does not reach a session of its own
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        printed, errors = (path.read_text("utf-8", "replace") for path in (out, err))
        failure = report.read_text("utf-8", "replace").strip() if report.exists() else None
        return ProbeResult(code, printed, errors, failure)


def probe_python(plan: SlurmPlan, args: Sequence[str]) -> ProbeResult:
    """Run the job's own Python with these arguments: in its container, if it has one that bash can enter."""
    start = FUNCTION if plan.environment.container else "exec"
    return probe(
        environment_lines(plan), f'{start} "$paceline_python" "$@"', *args, environ=plan.submitter
    )


def module_hint(plan: SlurmPlan, name: str) -> str:
    """Return what to write instead of a module that cannot be loaded, as far as the module system knows."""
    # What is available depends on what was loaded before.
    lines = [plan.environment_file, *plan.environment.modules.until(name).lines()]
    known = available_names(probe(lines, "module -t avail 2>&1", environ=plan.submitter).out)
    if name in known:
        return f"It exists but cannot be loaded. Try it in a shell: module load {name}"
    close = difflib.get_close_matches(name, known, n=6, cutoff=0.5)
    if close:
        return f"Available: {', '.join(sorted(close))}."
    return (
        "`module avail` lists all modules; module_paths in [environment] adds folders of modules."
    )


def available_names(text: str) -> list[str]:
    """Return the names that `module -t avail` lists: headings end in a colon, marks follow names in brackets."""
    names = (re.sub(r"\s*[(<].*$", "", line.strip()) for line in text.splitlines())
    return [name for name in names if re.fullmatch(r"[^\s]*[^\s:/]", name)]
