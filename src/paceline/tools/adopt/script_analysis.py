"""What a script says: its imports, functions and classes, who calls whom, and what encloses
what.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from paceline.tools.adopt.source_edits import Source

# What matters of the modules from which scripts import everything.
STARS = {
    "torch": (
        "save",
        "load",
        "device",
        "compile",
        "manual_seed",
        "sum",
        "zeros",
        "ones",
        "randn",
        "tensor",
        "nn",
        "optim",
    ),
    "torch.nn": (
        "Parameter",
        "DataParallel",
        "BatchNorm1d",
        "BatchNorm2d",
        "BatchNorm3d",
        "MSELoss",
        "CrossEntropyLoss",
    ),
    "torch.optim": ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "LBFGS", "lr_scheduler"),
    "torch.utils.data": ("DataLoader", "DistributedSampler", "IterableDataset", "Dataset"),
    "torch.nn.parallel": ("DistributedDataParallel", "DataParallel"),
    "torch.distributed": ("init_process_group", "get_rank", "destroy_process_group", "all_reduce"),
}

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
LoopNode: TypeAlias = ast.For | ast.While


class Script:
    """A source, and the relations between its parts."""

    def __init__(self, source: Source) -> None:
        self.source, self.tree = source, source.tree
        self.nodes = list(ast.walk(self.tree))
        self.parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self.imports = _imports(self.tree)
        self.calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        self.calls.sort(key=lambda call: (call.lineno, call.col_offset))
        self.classes = {node.name: node for node in self.nodes if isinstance(node, ast.ClassDef)}
        self.functions: dict[str, Function] = {}  # by name
        self.methods: dict[str, list[Function]] = {}
        for node in self.nodes:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                if isinstance(self.parents[node], ast.ClassDef):
                    self.methods.setdefault(node.name, []).append(node)
                else:
                    self.functions[node.name] = node
        self._made = _made(self.tree)
        self._callees: dict[ast.Call, list[Function]] = {}
        self._callers: dict[Function, list[ast.Call]] = {}
        self._passed: dict[Function, list[ast.Call]] = {}
        for call in self.calls:
            for function in self.callees(call):
                self._callers.setdefault(function, []).append(call)
            for argument in call.args:
                if isinstance(argument, ast.Name) and argument.id in self.functions:
                    self._passed.setdefault(self.functions[argument.id], []).append(call)
        self.names = {node.id for node in self.nodes if isinstance(node, ast.Name)}
        self.names |= {node.arg for node in self.nodes if isinstance(node, ast.arg)}
        self.names |= {*self.functions, *self.classes, *self.imports}

    # -- names
    # -----------------------------------------------------------------------------------------

    def dotted(self, node: ast.AST) -> str:
        """Return the full name of what an expression refers to: `optim.SGD` is "torch.optim.SGD";
        "" if unknown.
        """
        if isinstance(node, ast.Name):
            return self.imports.get(node.id, "")
        if isinstance(node, ast.Attribute):
            base = self.dotted(node.value)
            return f"{base}.{node.attr}" if base else ""
        return ""

    def calls_of(self, *names: str) -> list[ast.Call]:
        return [call for call in self.calls if self.dotted(call.func) in names]

    def packages(self) -> set[str]:
        return {name.split(".")[0] for name in self.imports.values()}

    def is_module_class(self, node: ast.ClassDef) -> bool:
        """Whether a class is an nn.Module."""
        bases = [self.dotted(base) or getattr(base, "id", "") for base in node.bases]
        local = [self.classes[base] for base in bases if base in self.classes and base != node.name]
        return any(base.endswith("Module") for base in bases) or any(
            map(self.is_module_class, local)
        )

    # -- structure
    # -------------------------------------------------------------------------------------

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
            if (
                isinstance(node, ast.If)
                and isinstance(node.test, ast.Compare)
                and "'__name__'" in ast.dump(node.test)
            ):
                return node
        return None

    # -- calls
    # -----------------------------------------------------------------------------------------

    def callees(self, call: ast.Call) -> list[Function]:
        """Return the functions of this script that a call may call."""
        if call not in self._callees:
            self._callees[call] = self._find_callees(call)
        return self._callees[call]

    def _find_callees(self, call: ast.Call) -> list[Function]:
        name = call.func
        if isinstance(name, ast.Name):
            if name.id in self.classes:
                body = self.classes[name.id].body
                return [
                    each
                    for each in body
                    if isinstance(each, ast.FunctionDef) and each.name == "__init__"
                ]
            return [self.functions[name.id]] if name.id in self.functions else []
        if isinstance(name, ast.Attribute) and not self.dotted(name):
            methods = self.methods.get(name.attr, [])
            made = (
                self._made.get(ast.unparse(name.value).removeprefix("self.")) if methods else None
            )
            return [each for each in methods if self._may_call(call, made, each)]
        return []

    def _may_call(self, call: ast.Call, made: set[str | None] | None, method: Function) -> bool:
        """Whether a call of a method may be for this one: `model.train()` is not for the `train` of
        a Trainer.

        `made` is by calling what the object gets its value, if that is known.
        """
        owner = self.parents[method]
        if made and None not in made and isinstance(owner, ast.ClassDef):
            known = {self.classes[each] for each in made if each in self.classes}
            if not any(owner in self._family(each) for each in known):
                return False
        arguments = method.args
        required = len(arguments.posonlyargs) + len(arguments.args) - len(arguments.defaults)
        is_static = any(getattr(each, "id", "") == "staticmethod" for each in method.decorator_list)
        starred = any(isinstance(each, ast.Starred) for each in call.args) or any(
            not each.arg for each in call.keywords
        )
        return starred or len(call.args) + len(call.keywords) + (0 if is_static else 1) >= required

    def _family(self, owner: ast.ClassDef) -> set[ast.ClassDef]:
        """Return a class and those of this script that it inherits from."""
        found, waiting = set(), [owner]
        while waiting:
            each = waiting.pop()
            if each not in found:
                found.add(each)
                waiting += [
                    self.classes[name]
                    for base in each.bases
                    if (name := getattr(base, "id", "")) in self.classes
                ]
        return found

    def callers(self, function: Function) -> list[ast.Call]:
        return self._callers.get(function, [])

    def uses(self, function: Function) -> list[ast.Call]:
        """Return the calls of a function, and those that get it as an argument:
        `optimizer.step(closure)`.
        """
        return [*self.callers(function), *self._passed.get(function, [])]

    def repeats(self, node: ast.AST, depth: int = 0) -> bool:
        """Whether a node may run more than once: in a loop, or in a function that is called
        several times.
        """
        if self.loop_around(node) is not None:
            return True
        function = self.function_of(node)
        if function is None or depth > 8:
            return False
        callers = self.callers(function)
        return len(callers) > 1 or any(self.repeats(call, depth + 1) for call in callers)

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


def _made(tree: ast.Module) -> dict[str, set[str | None]]:
    """Return names, without `self.`, and by calling what they get their value; None for values
    that are no calls.
    """
    found: dict[str, set[str | None]] = {}
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        value = getattr(node, "value", None)
        for target in targets:
            if isinstance(target, (ast.Name, ast.Attribute)):
                name = getattr(value.func, "id", "-") if isinstance(value, ast.Call) else None
                same = isinstance(value, ast.Name) and ast.unparse(target).endswith(f".{value.id}")
                if not same:  # self.model = model
                    found.setdefault(ast.unparse(target).removeprefix("self."), set()).add(name)
    return found


def _imports(tree: ast.Module) -> dict[str, str]:
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                found[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            named = [alias for alias in node.names if alias.name != "*"]
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in named}
            if len(named) < len(node.names):
                found |= _star(tree, node.module)
    return found


def _star(tree: ast.Module, module: str) -> dict[str, str]:
    """Return what `from module import *` defines, as far as it matters here."""
    defined = {
        node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }
    defined |= {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    known = STARS.get(module)
    # a module of the user, which may import these itself
    if known is None and not module.startswith("torch"):
        names = {
            name: f"{origin}.{name}"
            for origin in ("torch.utils.data", "torch.optim")
            for name in STARS[origin]
        }
        names["torch"] = "torch"
    else:
        names = {name: f"{module}.{name}" for name in known or ()}
    return {name: full for name, full in names.items() if name not in defined}
