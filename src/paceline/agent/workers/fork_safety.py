"""What makes forking after `import torch` unsafe, and which modules a script will need.

The script is only read, never run. If forking would be unsafe, the ranks start as fresh processes
instead.
"""

from __future__ import annotations

import ast
import itertools
import os
import sys

from paceline.agent.workers.zygote.start import is_read_at_import
from paceline.contract import frameworks

TYPE_CHECKING = False
if TYPE_CHECKING:  # a zygote must start fast
    from paceline.contract.launch_spec import LaunchSpec


SETTERS = ("putenv", "setdefault", "update", "__setitem__")


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
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue  # what these do comes later
        nodes = list(ast.walk(statement))
        for name in itertools.chain.from_iterable(map(_variables_set, nodes)):
            if is_read_at_import(name):
                return name
        if any(map(_imports_torch, nodes)):
            return None
    return None


def _imports_torch(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").split(".")[0] == "torch"
    return isinstance(node, ast.Import) and any(
        alias.name.split(".")[0] == "torch" for alias in node.names
    )


def _variables_set(node: ast.AST) -> list[str]:
    """Return the names in an assignment to `os.environ[...]`, or in a call that sets variables."""
    literals: list[ast.AST] = []
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        if _last_name(node.value) == "environ":
            literals = [node.slice]
    elif isinstance(node, ast.Call) and _last_name(node.func) in SETTERS:
        literals = list(ast.walk(node))
    strings = [each.value for each in literals if isinstance(each, ast.Constant)]
    keywords = [each.arg for each in literals if isinstance(each, ast.keyword)]
    return [name for name in [*strings, *keywords] if isinstance(name, str)]


def _last_name(node: ast.expr) -> str:
    """Return the last part of a dotted name."""
    name: str = getattr(node, "attr", getattr(node, "id", ""))
    return name


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
    return len(os.listdir("/proc/self/task"))


def is_device_in_use() -> bool:
    """Whether this process has opened the CUDA driver: a forked child could not use it."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
        return True
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("/dev/nvidia"):
                return True
        except OSError:  # that of the list itself
            continue
    return False
