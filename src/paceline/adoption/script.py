"""What a script says: its imports, functions and classes, who calls whom, and what encloses what."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from paceline.adoption.source import Source

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
LoopNode: TypeAlias = ast.For | ast.While


class Script:
    """A source, and the relations between its parts."""

    def __init__(self, source: Source) -> None:
        self.source, self.tree = source, source.tree
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self.imports = _imports(self.tree)
        self.calls = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call)]
        self.calls.sort(key=lambda call: (call.lineno, call.col_offset))
        self.classes = {node.name: node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)}
        self.functions: dict[str, Function] = {}  # by name
        self.methods: dict[str, list[Function]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                if isinstance(self.parents[node], ast.ClassDef):
                    self.methods.setdefault(node.name, []).append(node)
                else:
                    self.functions[node.name] = node
        self._callers: dict[Function, list[ast.Call]] = {}
        for call in self.calls:
            for function in self.callees(call):
                self._callers.setdefault(function, []).append(call)
        self.names = {node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name)}
        self.names |= {node.arg for node in ast.walk(self.tree) if isinstance(node, ast.arg)}
        self.names |= {*self.functions, *self.classes, *self.imports}

    # -- names -----------------------------------------------------------------------------------------

    def dotted(self, node: ast.AST) -> str:
        """Return the full name of what an expression refers to: `optim.SGD` is "torch.optim.SGD"; "" if unknown."""
        if isinstance(node, ast.Name):
            return self.imports.get(node.id, "")
        if isinstance(node, ast.Attribute):
            base = self.dotted(node.value)
            return f"{base}.{node.attr}" if base else ""
        return ""

    def is_call(self, node: ast.AST, *names: str) -> bool:
        return isinstance(node, ast.Call) and self.dotted(node.func) in names

    def calls_of(self, *names: str) -> list[ast.Call]:
        return [call for call in self.calls if self.dotted(call.func) in names]

    def packages(self) -> set[str]:
        return {name.split(".")[0] for name in self.imports.values()}

    def is_module_class(self, node: ast.ClassDef) -> bool:
        """Whether a class is an nn.Module."""
        bases = [self.dotted(base) or getattr(base, "id", "") for base in node.bases]
        local = [self.classes[base] for base in bases if base in self.classes and base != node.name]
        return any(base.endswith("Module") for base in bases) or any(map(self.is_module_class, local))

    # -- structure -------------------------------------------------------------------------------------

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        while node in self.parents:
            node = self.parents[node]
            yield node

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the innermost statement that holds a node."""
        return next(each for each in (node, *self.ancestors(node)) if isinstance(each, ast.stmt))

    def function_of(self, node: ast.AST) -> Function | None:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        return next((each for each in self.ancestors(node) if isinstance(each, kinds)), None)

    def class_of(self, node: ast.AST) -> ast.ClassDef | None:
        return next((each for each in self.ancestors(node) if isinstance(each, ast.ClassDef)), None)

    def loop_around(self, node: ast.AST) -> LoopNode | None:
        """Return the innermost loop around a node, in the same function."""
        for each in self.ancestors(node):
            if isinstance(each, (ast.For, ast.While)):
                return each
            if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                return None
        return None

    @property
    def guard(self) -> ast.If | None:
        """`if __name__ == "__main__":`."""
        for node in self.tree.body:
            if isinstance(node, ast.If) and isinstance(node.test, ast.Compare) and "'__name__'" in ast.dump(node.test):
                return node
        return None

    # -- calls -----------------------------------------------------------------------------------------

    def callees(self, call: ast.Call) -> list[Function]:
        """Return the functions of this script that a call may call."""
        name = call.func
        if isinstance(name, ast.Name):
            if name.id in self.classes:
                body = self.classes[name.id].body
                return [each for each in body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
            return [self.functions[name.id]] if name.id in self.functions else []
        if isinstance(name, ast.Attribute) and not self.dotted(name):
            return self.methods.get(name.attr, [])
        return []

    def callers(self, function: Function) -> list[ast.Call]:
        return self._callers.get(function, [])

    def reachable(self, nodes: Iterable[ast.AST]) -> set[Function]:
        """Return the functions that running these nodes may call, however deep."""
        found: set[Function] = set()
        waiting = list(nodes)
        while waiting:
            for node in walk_run(waiting.pop()):
                # A function that is only passed on, as to a command-line library, counts as called.
                called = self.callees(node) if isinstance(node, ast.Call) else []
                if isinstance(node, ast.Name) and node.id in self.functions:
                    called = [*called, self.functions[node.id]]
                for function in called:
                    if function not in found:
                        found.add(function)
                        waiting += function.body
        return found


def walk_run(node: ast.AST) -> Iterator[ast.AST]:
    """Walk through what runs when a statement runs: not the bodies of functions that it defines."""
    yield node
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        return
    for child in ast.iter_child_nodes(node):
        yield from walk_run(child)


def _imports(tree: ast.Module) -> dict[str, str]:
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                found[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found
