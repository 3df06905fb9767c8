"""The job's own Python, asked before queueing: does it run, does the script compile, is what it imports there?"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from paceline.cluster.findings import GOOD, PROBLEM, WARNING, Finding
from paceline.plan.slurm import SlurmPlan
from paceline.spec import Job

# Runs on the job's own interpreter. Imports that a script guards (in a try, a function, an if) are its own affair.
_PROBE = """
import ast, importlib.util, json, os, sys, tokenize
name, is_module, cwd = sys.argv[1], sys.argv[2] == "module", sys.argv[3]
sys.path[0] = cwd if is_module else os.path.dirname(name)
answer = {"version": sys.version.split()[0]}
def spec(word):
    try:
        return importlib.util.find_spec(word)
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
        answer["syntax"] = [line, getattr(error, "msg", str(error)), (getattr(error, "text", "") or "").strip()]
    else:
        words = []
        for node in tree.body:
            if isinstance(node, ast.Import):
                words += [alias.name.split(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                words.append(node.module.split(".")[0])
        answer["missing"] = sorted({word for word in words if word != "paceline" and spec(word) is None})
print(json.dumps(answer))
"""


def check_program(job: Job, plan: SlurmPlan) -> list[Finding]:
    """The interpreter runs, the script compiles, what it imports is there. Asked of the job's own Python."""
    python = plan.order.python
    if job.environment.kind == "container":
        return [_check_image(job), *_compile_here(job)]
    answer = _ask_python(job, python)
    if isinstance(answer, Finding):
        return [answer]
    found = [Finding("python", GOOD, f"{python} ({answer['version']})")]
    if answer.get("missing_module"):
        return [*found, _loose(job, "module", f"{python} finds no module {job.program.name!r}")]
    if "syntax" in answer:
        return [*found, _syntax(job, *answer["syntax"])]
    found.append(Finding("script", GOOD, f"{job.program.name} compiles"))
    if missing := answer.get("missing"):
        text = f"{job.program.name} imports {', '.join(missing)}, which {python} does not have"
        return [*found, _loose(job, "imports", text)]
    return [*found, Finding("imports", GOOD, "all found")]


def _ask_python(job: Job, python: str) -> dict[str, Any] | Finding:
    program = job.program
    name = program.name if program.is_module else str(job.cwd / program.name)
    kind = "module" if program.is_module else "script"
    variables = {**os.environ, **job.environment.variables}
    try:
        done = subprocess.run(
            [python, "-c", _PROBE, name, kind, str(job.cwd)], env=variables, text=True, capture_output=True,
            timeout=60, stdin=subprocess.DEVNULL, cwd=job.cwd if job.cwd.is_dir() else None,
        )  # fmt: skip
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer
    except (OSError, subprocess.TimeoutExpired) as error:
        where = job.said("environment.path" if job.environment.path else "environment.kind")
        return _loose(job, "python", f"{python} cannot be run here: {_why(error)} ({where})")
    except ValueError:
        return Finding("python", WARNING, f"{python} gave no answer: {done.stderr.strip()[-200:]}")


def _why(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else "it gave no answer"


def _loose(job: Job, about: str, text: str) -> Finding:
    """What is missing here may be there once modules and set-up lines have run: then it is only a warning."""
    if job.environment.modules or job.environment.setup:
        return Finding(about, WARNING, text, "the job's modules or setup may bring it")
    return Finding(about, PROBLEM, text, "install it there, or set kind and path in [environment]")


def _syntax(job: Job, line: int, message: str, text: str) -> Finding:
    return Finding(
        "script",
        PROBLEM,
        f"{job.program.name} does not compile: line {line}: {message}",
        f"line {line}: {text}",
    )


def _compile_here(job: Job) -> list[Finding]:
    """The container's Python cannot be asked from here; ours reads almost the same language."""
    if job.program.is_module:
        return []
    path = job.cwd / job.program.name
    try:
        compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        return [_syntax(job, error.lineno or 0, error.msg, (error.text or "").strip())]
    except (OSError, ValueError) as error:
        return [Finding("script", PROBLEM, f"{job.program.name} cannot be read: {error}")]
    return [Finding("script", GOOD, f"{job.program.name} compiles")]


def _check_image(job: Job) -> Finding:
    image = job.environment.image or ""
    if "://" in image or "#" in image or job.environment.engine == "pyxis":
        return Finding("image", GOOD, f"{image} (fetched by {job.environment.engine})")
    if not Path(image).exists():
        return Finding(
            "image", PROBLEM, f"there is no image {image}", f"check {job.said('environment.image')}"
        )
    return Finding("image", GOOD, image)
