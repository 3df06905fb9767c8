"""What makes forking after `import torch` unsafe, and which modules a script will need.

The script is only read, never run. If forking would be unsafe, the ranks start as fresh processes
instead.
"""

from __future__ import annotations

import ast
import os
import sys

from paceline.agent.workers.zygote.start import is_read_at_import
from paceline.contract import frameworks

TYPE_CHECKING = False
if TYPE_CHECKING:  # a zygote must start fast
    from paceline.contract.launch_spec import LaunchSpec


def read_program(launch_spec: LaunchSpec) -> str:
    """Return the text of a run's program, from the snapshot if it has one: that is there from the
    start.
    """
    import_path = [launch_spec.in_snapshot(path) for path in launch_spec.import_path]
    program = launch_spec.in_snapshot(launch_spec.program)
    return frameworks.read_program(
        program, is_module=launch_spec.is_module, import_path=import_path
    )[1]


def uses_runtime(launch_spec: LaunchSpec) -> bool:
    """Return whether the program imports Paceline; otherwise it probably has no step boundaries."""
    return frameworks.imports_runtime(read_program(launch_spec))


def variable_set_before_torch(source: str) -> str | None:
    """Return the first variable that a script sets before `import torch` and that this import
    reads.
    """
    if "environ" not in source and "putenv" not in source:
        return None
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return None  # the rank itself will raise it
    for statement in _top_level(body):
        if _imports_torch(statement):
            return None
        for name in _variables_set(statement):
            if is_read_at_import(name):
                return name
    return None


def _top_level(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements that run at import, those under `if` and `try` included."""
    found = []
    for statement in body:
        found.append(statement)
        for part in ("body", "orelse", "handlers", "finalbody"):
            if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inner = getattr(statement, part, [])
                for each in inner:
                    found += (
                        _top_level(each.body)
                        if isinstance(each, ast.ExceptHandler)
                        else _top_level([each])
                    )
    return found


def _imports_torch(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Import):
        return any(alias.name.split(".")[0] == "torch" for alias in statement.names)
    return (
        isinstance(statement, ast.ImportFrom) and (statement.module or "").split(".")[0] == "torch"
    )


def _variables_set(statement: ast.stmt) -> list[str]:
    """Return the variables that a statement sets by a literal name."""
    if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return [
            each.slice.value
            for each in targets
            if isinstance(each, ast.Subscript)
            and _last_name(each.value) == "environ"
            and isinstance(each.slice, ast.Constant)
            and isinstance(each.slice.value, str)
        ]
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        if _last_name(call.func) in ("putenv", "setdefault", "__setitem__"):
            first = call.args[0] if call.args else None
            return (
                [first.value]
                if isinstance(first, ast.Constant) and isinstance(first.value, str)
                else []
            )
        if _last_name(call.func) == "update":
            dicts = [each for each in call.args if isinstance(each, ast.Dict)]
            keys = [key for each in dicts for key in each.keys if isinstance(key, ast.Constant)]
            return [str(key.value) for key in keys] + [
                each.arg for each in call.keywords if each.arg
            ]
    return []


def _last_name(node: ast.expr) -> str:
    """Return the last part of a dotted name."""
    return (
        node.attr
        if isinstance(node, ast.Attribute)
        else node.id
        if isinstance(node, ast.Name)
        else ""
    )


def modules_to_preload(source: str) -> list[str]:
    """Return the modules worth importing before the fork, judging by the script's text."""
    modules = []
    if "optim" in source or "compile" in source or "paceline" in source:
        modules.append("torch._dynamo")  # the first optimizer imports it, which takes over a second
    if "paceline" in source:
        modules.append("paceline.runtime.session")
    return modules


def count_threads() -> int:
    """Return the number of threads of this process, those of C libraries included."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        import threading

        return threading.active_count()


def is_device_in_use() -> bool:
    """Whether this process has opened the CUDA driver: a forked child could not use it."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
        return True
    try:
        links = [
            os.readlink(f"/proc/self/fd/{name}")
            for name in os.listdir("/proc/self/fd")
            if name.isdigit()
        ]
    except OSError:
        return False
    return any(link.startswith("/dev/nvidia") for link in links)
