"""What makes forking after `import torch` unsafe, and what a script will want to have been imported.

A script is only read, never run: a fork hazard is found before the ranks exist, and they are then started as
fresh processes instead.
"""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

# Read when a library is loaded, so that setting them in a forked rank comes too late.
READ_AT_IMPORT = (
    "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "BLIS_", "VECLIB_", "NUMEXPR_", "ATEN_",
    "TORCH_", "PYTORCH_", "CUDA_", "LD_", "MALLOC_",
)  # fmt: skip


def read_at_import(name: str) -> bool:
    return name.startswith(READ_AT_IMPORT)


def source_of(program: str, *, is_module: bool, import_path: list[str]) -> str:
    """The text of the program, or nothing where it cannot be found without importing."""
    paths = [Path(program)]
    if is_module:
        below = Path(*program.split("."))
        paths = [
            Path(folder) / each
            for folder in import_path
            for each in (below.with_suffix(".py"), below / "__main__.py")
        ]
    for path in paths:
        try:
            return path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
    return ""


def set_before_torch(source: str) -> str | None:
    """The first variable that a script sets ahead of `import torch` and that is read at that import."""
    if "environ" not in source and "putenv" not in source:
        return None
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return None  # the rank itself will say so
    for statement in _flat(body):
        if _imports_torch(statement):
            return None
        for name in _variables_set(statement):
            if read_at_import(name):
                return name
    return None


def _flat(body: list[ast.stmt]) -> list[ast.stmt]:
    """Statements that run at the top level, those under `if` and `try` among them."""
    found = []
    for statement in body:
        found.append(statement)
        for part in ("body", "orelse", "handlers", "finalbody"):
            if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inner = getattr(statement, part, [])
                for each in inner:
                    found += _flat(each.body) if isinstance(each, ast.ExceptHandler) else _flat([each])
    return found


def _imports_torch(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Import):
        return any(alias.name.split(".")[0] == "torch" for alias in statement.names)
    return isinstance(statement, ast.ImportFrom) and (statement.module or "").split(".")[0] == "torch"


def _variables_set(statement: ast.stmt) -> list[str]:
    """Names of variables that one statement sets, where they are written out."""
    if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return [
            each.slice.value
            for each in targets
            if isinstance(each, ast.Subscript)
            and _called(each.value) == "environ"
            and isinstance(each.slice, ast.Constant)
            and isinstance(each.slice.value, str)
        ]
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        if _called(call.func) in ("putenv", "setdefault", "__setitem__"):
            first = call.args[0] if call.args else None
            return [first.value] if isinstance(first, ast.Constant) and isinstance(first.value, str) else []
        if _called(call.func) == "update":
            dicts = [each for each in call.args if isinstance(each, ast.Dict)]
            keys = [key for each in dicts for key in each.keys if isinstance(key, ast.Constant)]
            return [str(key.value) for key in keys] + [each.arg for each in call.keywords if each.arg]
    return []


def _called(node: ast.expr) -> str:
    """The last part of a dotted name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def wanted_modules(source: str) -> list[str]:
    """What is worth importing once, ahead of the fork, judged by what the script mentions."""
    wanted = []
    if "optim" in source or "compile" in source or "paceline" in source:
        wanted.append("torch._dynamo")  # building the first optimizer imports it, which takes over a second
    if "paceline" in source:
        wanted.append("paceline.runtime.session")
    return wanted


def threads_running() -> int:
    """How many threads this process has, those of C libraries included."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        import threading

        return threading.active_count()


def device_in_use() -> bool:
    """Whether the CUDA driver has been touched: a forked child could not use it any more."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
        return True
    try:
        links = [
            os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if name.isdigit()
        ]
    except OSError:
        return False
    return any(link.startswith("/dev/nvidia") for link in links)
