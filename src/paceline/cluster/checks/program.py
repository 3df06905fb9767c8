"""The job's own Python, asked before queueing: does it run, does the script compile, is what it imports there?

It is asked in the job's own surroundings: bash puts on its modules, its environment and its set-up lines first, as the
batch script will.
"""

from __future__ import annotations

import json
from typing import Any

from paceline.cluster.checks.container import can_be_asked, check_image, why_no_answer
from paceline.cluster.checks.finding import GOOD, PROBLEM, WARNING, Finding
from paceline.cluster.environment.rehearsal import Tried, module_hint, try_command
from paceline.plan.environment.modules import failed_module
from paceline.plan.slurm.plan import SlurmPlan
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
        known = {"paceline", *sys.modules}
        answer["missing"] = sorted({word for word in words if word not in known and spec(word) is None})
        named = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "path"]
        answer["own_path"] = any(getattr(node.value, "id", "") == "sys" for node in named)
print(json.dumps(answer))
"""


def check_program(job: Job, plan: SlurmPlan) -> list[Finding]:
    """The interpreter runs, the script compiles, what it imports is there. Asked of the job's own Python."""
    python = plan.launch_spec.python
    found = []
    if job.environment.kind == "container":
        found.append(check_image(job))
        if found[0].level == PROBLEM or not can_be_asked(job):
            return [*found, *_compile_here(job)]
    answer = _ask_python(job, plan)
    if isinstance(answer, Finding):
        return [*found, answer, *(_compile_here(job) if found else [])]
    found.append(Finding("python", GOOD, f"{python} ({answer['version']})"))
    if job.environment.modules:
        found.insert(0, Finding("modules", GOOD, " ".join(job.environment.modules)))
    if answer.get("missing_module"):
        return [
            *found,
            Finding("module", PROBLEM, f"{python} finds no module {job.program.name!r}", _INSTALL),
        ]
    if "syntax" in answer:
        return [*found, _syntax(job, *answer["syntax"])]
    found.append(Finding("script", GOOD, f"{job.program.name} compiles"))
    if missing := answer.get("missing"):
        text = f"{job.program.name} imports {', '.join(missing)}, which {python} does not have"
        if answer["own_path"]:  # nobody but the script knows what it adds
            return [
                *found,
                Finding("imports", WARNING, text, "it changes sys.path: may it find them by that?"),
            ]
        return [*found, Finding("imports", PROBLEM, text, _INSTALL)]
    return [*found, Finding("imports", GOOD, "all found")]


_MEND = {
    "venv": "mend the path, or build one: paceline env build",
    "conda": "mend the path: `conda env list` shows the folders of what there is",
}
_INSTALL = "install it there, or set kind and path in [environment]"


def _ask_python(job: Job, plan: SlurmPlan) -> dict[str, Any] | Finding:
    program = job.program
    name = program.name if program.is_module else str(job.cwd / program.name)
    kind = "module" if program.is_module else "script"
    tried = try_command(plan, ["-c", _PROBE, name, kind, str(job.cwd)])
    try:
        # The last line: modules and lines of `setup` may print too.
        answer: dict[str, Any] = json.loads(tried.out.strip().splitlines()[-1])
        return answer
    except (ValueError, IndexError):
        return _no_answer(job, plan, tried)


def _no_answer(job: Job, plan: SlurmPlan, tried: Tried) -> Finding:
    """Why the job's Python was never reached, or said nothing."""
    python = plan.launch_spec.python
    if (refusal := tried.refusal) is not None:
        if (module := failed_module(refusal)) is not None:
            return Finding("modules", PROBLEM, _told(job, "modules", refusal), module_hint(plan, module))
        if "'module' command" in refusal:
            hint = "take modules out of [environment], or submit where there are some"
            return Finding("modules", PROBLEM, _told(job, "modules", refusal), hint)
        return Finding("python", PROBLEM, _told(job, "path", refusal), _MEND["venv"])
    if job.environment.kind == "container":
        return why_no_answer(job, python, tried)
    if tried.code in (126, 127):
        key = "python" if job.environment.python else "path" if job.environment.path else "kind"
        why = tried.last_words.rpartition(": ")[2]
        text = _told(job, key, f"{python} cannot be run here: {why}")
        return Finding("python", PROBLEM, text, _MEND.get(job.environment.kind, "mend the path"))
    why = "it took too long" if tried.code is None else tried.last_words
    if job.environment.setup:
        text = f"with the lines of {job.source('environment.setup')} {python} gave no answer here: {why}"
        return Finding("setup", WARNING, text, "so nobody knows whether the script's imports are there")
    return Finding("python", WARNING, f"{python} gave no answer: {why}")


def _told(job: Job, key: str, text: str) -> str:
    return f"{text} ({job.source(f'environment.{key}')})"


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
