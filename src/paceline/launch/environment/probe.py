"""Probes: run a command here as a job would run it, with the job's variables, modules, venv and `setup` lines."""

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

from paceline.contract import env
from paceline.launch.environment.container import FUNCTION
from paceline.launch.slurm_plan import SlurmPlan
from paceline.slurm.batch_script import ModuleSection, load_line
from paceline.spec.shell_text import quote

# seconds: module systems on a busy file system take their time, and so does a first import
TIMEOUT = 120.0

MODULE_COMMAND, MODULE, ACTIVATION, COMMAND = "module command", "load ", "activation", "command"


@dataclass(frozen=True)
class ProbeResult:
    """How a probe ended. `code` is None if it took too long; `failure` is what the script's own `fail` was given."""

    code: int | None
    out: str
    err: str
    step: str = ""
    failure: str | None = None

    @property
    def module(self) -> str | None:
        """The module that could not be loaded."""
        return (
            self.step.removeprefix(MODULE)
            if self.failure and self.step.startswith(MODULE)
            else None
        )

    @property
    def last_line(self) -> str:
        lines = [line for line in self.err.splitlines() if line.strip()]
        return lines[-1].strip()[-300:] if lines else f"exit code {self.code}"


def module_lines(modules: ModuleSection) -> list[str]:
    """Return the lines that load modules, each with a note of what it does."""
    loads = [
        f"{env.PROBE_STEP}={quote(MODULE + name)}\n{load_line(name)}" for name in modules.names
    ]
    return [f"{env.PROBE_STEP}={quote(MODULE_COMMAND)}", *modules.command, *modules.before, *loads]


def environment_lines(plan: SlurmPlan) -> list[str]:
    """Return the lines of a script that set up its environment, with the variables themselves."""
    section = plan.environment
    return [
        f"paceline_run={quote(str(plan.run_path.folder.path))}",
        f"paceline_python={quote(plan.launch_spec.python)}",
        plan.environment_file,
        *module_lines(section.modules),
        f"{env.PROBE_STEP}={ACTIVATION}",
        *section.activation,
        f"{env.PROBE_STEP}={COMMAND}",
        *section.setup,
        *section.container,
    ]


def probe(
    lines: Sequence[str], command: str, *args: str, environ: Mapping[str, str]
) -> ProbeResult:
    """Have bash run the lines, then a command, in an empty folder and just this environment; nothing stays behind.

    The command may use "$@", which are `args`.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-check-") as folder:
        out, err, report = Path(folder, "out"), Path(folder, "err"), Path(folder, "report")
        # the job starts in its run folder, where none of the project's files are
        cwd = Path(folder, "cwd")
        cwd.mkdir()
        head = [
            f"unset {env.PROBE_LINES}; export -n {env.PROBE_REPORT}; export {env.CHECK}=1",
            f'paceline_fail() {{ printf "%s\\n" "${env.PROBE_STEP}" "$*" >"${env.PROBE_REPORT}"; exit 1; }}',
        ]
        variables = {
            **environ,
            env.PROBE_LINES: "\n".join([*head, *lines, command]),
            env.PROBE_REPORT: str(report),
        }
        # Files, not pipes: a line of `setup` may leave something in the background that holds them open.
        with open(out, "wb") as out_file, open(err, "wb") as err_file:
            process = subprocess.Popen(
                ["bash", "-c", f'eval "${env.PROBE_LINES}"', "bash", *args],
                env=variables,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=out_file,
                stderr=err_file,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(TIMEOUT)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end_group(process)
        printed, errors = (
            path.read_text(encoding="utf-8", errors="replace") for path in (out, err)
        )
        if not report.exists():
            return ProbeResult(code, printed, errors)
        step, _, failure = report.read_text(encoding="utf-8", errors="replace").partition("\n")
        return ProbeResult(code, printed, errors, step, failure.strip())


def _end_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except OSError:
        pass
    process.wait()


def probe_python(plan: SlurmPlan, args: Sequence[str]) -> ProbeResult:
    """Run the job's own Python with these arguments: in its container, if it has one that bash can enter."""
    start = FUNCTION if plan.environment.container else "exec"
    return probe(
        environment_lines(plan), f'{start} "$paceline_python" "$@"', *args, environ=plan.submitter
    )


def module_hint(plan: SlurmPlan, name: str) -> str:
    """Return what to write instead of a module that cannot be loaded, as far as the module system knows."""
    # What is available depends on what was loaded before.
    lines = [plan.environment_file, *module_lines(plan.environment.modules.until(name))]
    known = available_names(probe(lines, "module -t avail 2>&1", environ=plan.submitter).out)
    if name in known:
        return f"It exists but cannot be loaded. Try it in a shell: module load {name}"
    stem = name.partition("/")[0]
    versions = [each for each in known if each.partition("/")[0] == stem and each != name]
    if versions:
        return f"Available versions: {', '.join(versions[:6])}."
    stems = {each.partition("/")[0] for each in known}
    close = difflib.get_close_matches(name, known if "/" in name else stems, n=1)
    if close:
        return f"Did you mean {close[0]!r}? `module avail` lists all modules."
    return (
        "`module avail` lists all modules; module_paths in [environment] adds folders of modules."
    )


def available_names(text: str) -> list[str]:
    """Return the names that `module -t avail` lists: headings end in a colon, marks follow names in brackets."""
    names = []
    for line in text.splitlines():
        name = re.sub(r"\s*[(<].*$", "", line.strip())
        if name and not name.endswith((":", "/")) and " " not in name:
            names.append(name)
    return list(dict.fromkeys(names))
