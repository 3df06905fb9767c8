"""Check the program before queueing: does the job's Python run, does the script compile, are its
imports there?

The check probes the job's own Python, after the modules, the environment and the `setup` lines of
its batch script.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.contract.env import ON_CLUSTER
from paceline.launch.environment.activation import (
    FUNCTION,
    NO_ENGINE,
    ProbeResult,
    image_path,
    is_fetched,
    probe,
)
from paceline.spec.findings import GOOD, PROBLEM, WARNING, Finding
from paceline.spec.job import Job
from paceline.spec.shell_text import quote, to_type

if TYPE_CHECKING:
    from paceline.launch.slurm_job import SlurmPlan

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

_FIX = {
    "venv": "Correct the path, ask its owner for access, or build a venv: paceline env build",
    "conda": "Correct the path; `conda env list` shows the folders.",
}


def check_program(job: Job, plan: SlurmPlan) -> list[Finding]:
    """Check that the interpreter runs, the script compiles, and its imports are there."""
    python, name = plan.launch_spec.python, job.program.name
    found = []
    if job.environment.kind == "container":
        found.append(check_image(job))
        # pyxis is part of srun: its images cannot be entered here
        is_here = job.environment.engine != "pyxis" and not is_fetched(job)
        if found[0].level == PROBLEM or not is_here:
            return found
    answer = _probe(job, plan)
    if isinstance(answer, Finding):
        return [*found, answer]
    if job.environment.modules:
        found.append(Finding("modules", GOOD, " ".join(job.environment.modules)))
    found.append(Finding("python", GOOD, f"{python} ({answer['version']})"))
    if answer.get("missing_module"):
        text = f"{python} does not find the module {name!r}."
        return [*found, Finding("module", PROBLEM, text, _install())]
    if "syntax" in answer:
        line, message, text = answer["syntax"]
        problem = f"{name} does not compile: line {line}: {message}."
        return [*found, Finding("script", PROBLEM, problem, f"line {line}: {text}")]
    found.append(Finding("script", GOOD, f"{name} compiles"))
    return [*found, _imports(job, python, answer)]


def _imports(job: Job, python: str, answer: dict[str, Any]) -> Finding:
    missing = answer.get("missing")
    if not missing:
        return Finding("imports", GOOD, "all found")
    text = f"{job.program.name} imports {', '.join(missing)}, which {python} does not have."
    if answer["own_path"]:  # only the script knows what it adds
        hint = "The script changes sys.path; check that it finds them there."
        return Finding("imports", WARNING, text, hint)
    modules = [job.program.module_with(each, job.cwd) for each in missing]
    if None in modules:
        return Finding("imports", PROBLEM, text, _install())
    hint = f"Use -m {modules[0]}, so that it finds what is in {job.cwd}."
    return Finding("imports", PROBLEM, text, hint)


def _install() -> str:
    cluster = os.environ.get(ON_CLUSTER)
    table = f"profiles.{cluster}.environment" if cluster else "environment"
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
    python, environment = plan.launch_spec.python, job.environment
    if result.failure is not None:
        about, hint = "python", _FIX["venv"]
        if module := re.fullmatch(r"Cannot load the module (.*)\.", result.failure):
            about, hint = "modules", module_hint(plan, module[1])
        elif "'module' command" in result.failure:
            about = "modules"
            hint = "Remove modules from [environment], or submit where there is a module system."
        key = "modules" if about == "modules" else "path"
        return Finding(about, PROBLEM, _with_source(job, key, result.failure), hint)
    if result.code == NO_ENGINE and environment.kind == "container":
        text = "There is neither apptainer nor singularity here, so the image is not checked."
        hint = "If a module provides it, add that to modules in [environment]."
        return Finding("container", WARNING, text, hint)
    reason = "it took too long" if result.code is None else result.last_line
    if result.code in (126, 127) and environment.kind != "container":
        key = "python" if environment.python else "path" if environment.path else "kind"
        text = f"{python} cannot be run here: {reason.rpartition(': ')[2]}."
        hint = _FIX.get(environment.kind, "Correct the path.")
        return Finding("python", PROBLEM, _with_source(job, key, text), hint)
    where = f" in {image_path(job)}" if environment.kind == "container" else ""
    after = f" after the lines of {job.source('environment.setup')}" if environment.setup else ""
    hint = "The script's imports are not checked."
    return Finding("setup", WARNING, f"{python}{where} gave no answer{after}: {reason}", hint)


def _with_source(job: Job, key: str, text: str) -> str:
    return f"{text.removesuffix('.')} ({job.source(f'environment.{key}')})."


def check_image(job: Job) -> Finding:
    image = image_path(job)
    if is_fetched(job):
        if job.environment.engine == "pyxis":
            return Finding("image", GOOD, f"{image} (fetched by pyxis)")
        text = f"Every node fetches {image} when the job starts: can they reach it?"
        return Finding("image", WARNING, text, "Fetch it once: paceline env build")
    if not os.access(image, os.R_OK):
        text = f"There is no image {image} that you can read."
        return Finding("image", PROBLEM, text, f"Check {job.source('environment.image')}.")
    return Finding("image", GOOD, image)


# -- running something in its environment


def environment_lines(plan: SlurmPlan) -> list[str]:
    """Return the lines of a script that set up its environment, with the variables themselves."""
    return [
        f"paceline_run={quote(str(plan.run_path.folder.path))}",
        f"paceline_python={quote(plan.launch_spec.python)}",
        plan.environment_file,
        *plan.environment.after_variables(),
    ]


def probe_python(plan: SlurmPlan, args: Sequence[str]) -> ProbeResult:
    """Run the job's own Python: in its container, if it has one that bash can enter."""
    start = FUNCTION if plan.environment.container else "exec"
    return probe(
        environment_lines(plan), f'{start} "$paceline_python" "$@"', *args, environ=plan.submitter
    )


def module_hint(plan: SlurmPlan, name: str) -> str:
    """Return what to write instead of a module that cannot be loaded."""
    # What is available depends on what was loaded before.
    lines = [plan.environment_file, *plan.environment.modules.until(name).lines()]
    known = available_names(probe(lines, "module -t avail 2>&1", environ=plan.submitter).out)
    if name in known:
        return f"It exists but cannot be loaded. Try it in a shell: module load {name}"
    close = difflib.get_close_matches(name, known, n=6, cutoff=0.5)
    if close:
        return f"Available versions: {', '.join(sorted(close))}."
    return (
        "`module avail` lists all modules; module_paths in [environment] adds folders of modules."
    )


def available_names(text: str) -> list[str]:
    """Return the names that `module -t avail` lists, without headings (which end in a colon) and
    marks (which follow names in brackets).
    """
    names = (re.sub(r"\s*[(<].*$", "", line.strip()) for line in text.splitlines())
    return [name for name in names if re.fullmatch(r"[^\s]*[^\s:/]", name)]
