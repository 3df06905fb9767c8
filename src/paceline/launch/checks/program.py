"""Check the program before queueing: does the job's Python run, does the script compile, are its
imports there?

The check probes the job's own Python, after the modules, the environment and the `setup` lines of
its batch script.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from paceline.contract.env import ON_CLUSTER
from paceline.launch.checks.access import describe_closed, find_closed, hint_for
from paceline.launch.environment.container import NO_ENGINE, image_path, is_fetched
from paceline.launch.environment.probe import MODULE_COMMAND, ProbeResult, module_hint, probe_python
from paceline.launch.slurm_plan import SlurmPlan
from paceline.spec.findings import GOOD, PROBLEM, WARNING, Finding
from paceline.spec.job import Job
from paceline.spec.shell_text import to_type

# Runs on the job's own interpreter. Imports that a script guards (in a try, a function, an if) are
# not checked.
_PROBE = """
import ast, importlib.util, json, os, sys, tokenize
name, is_module, cwd = sys.argv[1], sys.argv[2] == "module", sys.argv[3]
sys.path[0] = cwd if is_module else os.path.dirname(name)
answer = {"version": sys.version.split()[0]}
def spec(name):
    try:
        return importlib.util.find_spec(name)
    except Exception:
        return None
if is_module:
    found = spec(name) or spec(name + ".__main__")
    path = found.origin if found else None
    answer["missing_module"] = found is None
else:
    path = name
if path and path.endswith(".py"):
    try:
        with tokenize.open(path) as file:
            tree = ast.parse(file.read(), path)
    except (SyntaxError, UnicodeDecodeError, ValueError) as error:
        line = getattr(error, "lineno", 0)
        text = getattr(error, "text", "") or ""
        answer["syntax"] = [line, getattr(error, "msg", str(error)), text.strip()]
    else:
        imports = []
        for node in tree.body:
            if isinstance(node, ast.Import):
                imports += [alias.name.split(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                imports.append(node.module.split(".")[0])
        known = {"paceline", *sys.modules}
        imports += ["torch"] if "paceline" in imports else []
        unknown = {each for each in imports if each not in known}
        answer["missing"] = sorted(each for each in unknown if spec(each) is None)
        named = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        paths = [node for node in named if node.attr == "path"]
        answer["own_path"] = any(getattr(node.value, "id", "") == "sys" for node in paths)
print(json.dumps(answer))
"""


def check_program(job: Job, plan: SlurmPlan) -> list[Finding]:
    """Check that the interpreter runs, the script compiles, and its imports are there."""
    python = plan.launch_spec.python
    found = []
    if job.environment.kind == "container":
        found.append(check_image(job))
        if found[0].level == PROBLEM or not can_probe(job):
            return [*found, *_compile_here(job)]
    answer = _probe(job, plan)
    if isinstance(answer, Finding):
        return [*found, answer, *(_compile_here(job) if found else [])]
    found.append(Finding("python", GOOD, f"{python} ({answer['version']})"))
    if job.environment.modules:
        found.insert(0, Finding("modules", GOOD, " ".join(job.environment.modules)))
    if answer.get("missing_module"):
        return [
            *found,
            Finding(
                "module",
                PROBLEM,
                f"{python} does not find the module {job.program.name!r}.",
                _install(),
            ),
        ]
    if "syntax" in answer:
        return [*found, _syntax(job, *answer["syntax"])]
    found.append(Finding("script", GOOD, f"{job.program.name} compiles"))
    if missing := answer.get("missing"):
        text = f"{job.program.name} imports {', '.join(missing)}, which {python} does not have."
        if answer["own_path"]:  # only the script knows what it adds
            return [
                *found,
                Finding(
                    "imports",
                    WARNING,
                    text,
                    "The script changes sys.path; check that it finds them there.",
                ),
            ]
        modules = [job.program.module_with(each, job.cwd) for each in missing]
        hint = (
            _install()
            if None in modules
            else f"Use -m {modules[0]}, so that it finds what is in {job.cwd}."
        )
        return [*found, Finding("imports", PROBLEM, text, hint)]
    return [*found, Finding("imports", GOOD, "all found")]


_FIX = {
    "venv": "Correct the path, or build a venv: paceline env build",
    "conda": "Correct the path; `conda env list` shows the folders.",
}


def _install() -> str:
    table = (
        f"profiles.{name}.environment" if (name := os.environ.get(ON_CLUSTER)) else "environment"
    )
    build = f"build an environment with `{to_type('env build')}`"
    return f"Install it there, {build}, or set kind and path in [{table}]."


def _probe(job: Job, plan: SlurmPlan) -> dict[str, Any] | Finding:
    program = job.program
    name = program.name if program.is_module else str(job.cwd / program.name)
    kind = "module" if program.is_module else "script"
    result = probe_python(plan, ["-c", _PROBE, name, kind, str(job.cwd)])
    try:
        # The last line: modules and lines of `setup` may print too.
        answer: dict[str, Any] = json.loads(result.out.strip().splitlines()[-1])
        return answer
    except (ValueError, IndexError):
        return _explain(job, plan, result)


def _explain(job: Job, plan: SlurmPlan, result: ProbeResult) -> Finding:
    """Return why the job's Python could not be run, or printed nothing."""
    python = plan.launch_spec.python
    if result.failure is not None:
        if result.module is not None:
            hint = module_hint(plan, result.module)
            return Finding("modules", PROBLEM, _with_source(job, "modules", result.failure), hint)
        if result.step == MODULE_COMMAND:
            hint = "Remove modules from [environment], or submit where there is a module system."
            return Finding("modules", PROBLEM, _with_source(job, "modules", result.failure), hint)
        return _closed(job, python) or Finding(
            "python", PROBLEM, _with_source(job, "path", result.failure), _FIX["venv"]
        )
    if job.environment.kind == "container":
        return explain_container(job, python, result)
    if result.code in (126, 127):
        if (closed := _closed(job, python)) is not None:
            return closed
        key = _key(job)
        reason = result.last_line.rpartition(": ")[2]
        text = _with_source(job, key, f"{python} cannot be run here: {reason}.")
        return Finding("python", PROBLEM, text, _FIX.get(job.environment.kind, "Correct the path."))
    reason = "it took too long" if result.code is None else result.last_line
    if job.environment.setup:
        text = (
            f"{python} gave no answer after the lines of {job.source('environment.setup')}: "
            f"{reason}"
        )
        return Finding("setup", WARNING, text, "The script's imports are not checked.")
    return Finding("python", WARNING, f"{python} gave no answer: {reason}")


def _key(job: Job) -> str:
    """Return the key of [environment] that sets the job's Python."""
    return "python" if job.environment.python else "path" if job.environment.path else "kind"


def _closed(job: Job, python: str) -> Finding | None:
    """Return the finding about an environment that this user may not read, if that is the
    reason.
    """
    key, wanted = _key(job), Path(python)
    if not wanted.is_absolute():
        return None
    candidates = (
        [wanted.with_name("activate"), wanted] if job.environment.kind == "venv" else [wanted]
    )
    closed = next((found for each in candidates if (found := find_closed(each)) is not None), None)
    if closed is None:
        return None
    shown = wanted.parent.parent if key == "path" else wanted
    text = describe_closed(closed, shown, job.source(f"environment.{key}"))
    return Finding("python", PROBLEM, text, hint_for(key, "environment"))


def _with_source(job: Job, key: str, text: str) -> str:
    return f"{text.removesuffix('.')} ({job.source(f'environment.{key}')})."


def _syntax(job: Job, line: int, message: str, text: str) -> Finding:
    return Finding(
        "script",
        PROBLEM,
        f"{job.program.name} does not compile: line {line}: {message}.",
        f"line {line}: {text}",
    )


def _compile_here(job: Job) -> list[Finding]:
    """Compile the script with our own Python, where the container's cannot be probed: they hardly
    differ.
    """
    if job.program.is_module:
        return []
    path = job.cwd / job.program.name
    try:
        compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        return [_syntax(job, error.lineno or 0, error.msg, (error.text or "").strip())]
    except (OSError, ValueError) as error:
        return [Finding("script", PROBLEM, f"Cannot read {job.program.name}: {error}")]
    return [Finding("script", GOOD, f"{job.program.name} compiles")]


def check_image(job: Job) -> Finding:
    image = image_path(job)
    if is_fetched(job):
        if job.environment.engine == "pyxis":
            return Finding("image", GOOD, f"{image} (fetched by pyxis)")
        return Finding(
            "image",
            WARNING,
            f"Every node fetches {image} when the job starts: can they reach it?",
            "Fetch it once: paceline env build",
        )
    if (closed := find_closed(Path(image))) is not None:
        text = describe_closed(closed, image, job.source("environment.image"))
        return Finding("image", PROBLEM, text, hint_for("image", "environment"))
    if not Path(image).exists():
        return Finding(
            "image",
            PROBLEM,
            f"There is no image {image}.",
            f"Check {job.source('environment.image')}.",
        )
    return Finding("image", GOOD, image)


def can_probe(job: Job) -> bool:
    """Return whether the image can be entered here: it is a file, and its engine is not part of
    srun.
    """
    return job.environment.engine != "pyxis" and not is_fetched(job)


def explain_container(job: Job, python: str, result: ProbeResult) -> Finding:
    """Return why the container's Python could not be run, or printed nothing."""
    image = image_path(job)
    reason = "it took too long" if result.code is None else result.last_line
    if result.code == NO_ENGINE:
        return Finding(
            "container",
            WARNING,
            "There is neither apptainer nor singularity here, so the image is not checked.",
            "If a module provides it, add that to modules in [environment].",
        )
    if re.search(
        rf'"{re.escape(python)}".*not found|stat {re.escape(python)}: no such file', reason
    ):
        return Finding(
            "python",
            PROBLEM,
            f"{image} has no {python}.",
            "Name its Python: python in [environment]",
        )
    if "image format not recognized" in reason:
        return Finding(
            "image",
            PROBLEM,
            f"{image} is not an image.",
            f"Check {job.source('environment.image')}.",
        )
    return Finding("container", WARNING, f"{python} in {image} gave no answer: {reason}")
