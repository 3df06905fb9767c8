"""Where a value comes from: follow names, attributes, parameters and return values back to the
calls that make it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from paceline.tools.adopt.script_analysis import Function, Script

MAX_LOOKS = 500  # at expressions in one search
PROGRESS = ("tqdm", "track")
WRAPPERS = ("enumerate", *PROGRESS, "iter", "list", "zip", "prefetch")


def unwrap(node: ast.expr, wrappers: tuple[str, ...] = WRAPPERS) -> ast.expr:
    """Return what a loop really iterates over: `loader` of `enumerate(tqdm(loader))`."""
    while isinstance(node, ast.Call) and node.args:
        name = (
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        )
        if name not in wrappers:
            break
        node = node.args[0]
    return node


class Origins:
    """Finds the calls that make a value. Paths and branches are not told apart: all of them
    count.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self._assigned: dict[tuple[object, str], list[ast.expr | tuple[ast.expr, int]]] = {}
        self._globals: dict[Function, set[str]] = {}  # names that functions declare as global
        self._seen: set[tuple[int, int | None]] = set()  # what the current search has looked at
        for node in script.nodes:
            self._record(node)

    def of(self, node: ast.expr) -> set[ast.Call]:
        """Return the calls that an expression's value may come from; wrappers such as `tqdm` are
        looked through.
        """
        self._seen = set()
        return set(self._find(node))

    def values(self, name: str, near: ast.AST) -> list[ast.expr]:
        """Return what is assigned to a name, as seen from a node. Parts of tuples are left out."""
        scope = self.script.class_of(near) if name.startswith("self.") else self._scope(name, near)
        found = self._assigned.get((scope, name), [])
        return [value for value in found if isinstance(value, ast.expr)]

    def is_local(self, name: str, near: ast.AST) -> bool:
        """Whether a name belongs to the function around a node, or to the module if there is
        none.
        """
        return self._scope(name, near) is self.script.function_of(near)

    def names_in(self, function: Function | None) -> list[str]:
        """Return the names that a function, or the module, has itself."""
        names = [name for scope, name in self._assigned if scope is function and "." not in name]
        return [*names, *(each.arg for each in _parameters(function))] if function else names

    def attributes_of(self, owner: ast.ClassDef | None) -> list[str]:
        return (
            [name for scope, name in self._assigned if scope is owner and name.startswith("self.")]
            if owner
            else []
        )

    # -- finding
    # -----------------------------------------------------------------------------------------

    def _find(self, node: ast.AST, index: int | None = None) -> Iterator[ast.Call]:
        if (id(node), index) in self._seen or len(self._seen) > MAX_LOOKS:
            return
        self._seen.add((id(node), index))
        if isinstance(node, ast.Tuple | ast.List):
            parts = node.elts if index is None else node.elts[index : index + 1]
            for part in parts:
                yield from self._find(part)
        elif isinstance(node, ast.IfExp):
            yield from self._find(node.body, index)
            yield from self._find(node.orelse, index)
        elif isinstance(node, ast.Name):
            yield from self._find_name(node)
        elif isinstance(node, ast.Attribute):
            yield from self._find_attribute(node)
        elif isinstance(node, ast.Subscript):
            yield from self._find_item(node)
        elif isinstance(node, ast.Call):
            inner = unwrap(node)
            if inner is not node:
                yield from self._find(inner)
                return
            yield node
            if _is_method(node, "to", "cuda", "cpu", "train", "eval", "half", "float", "double"):
                yield from self._find(node.func.value)  # type: ignore[attr-defined]
            for function in self.script.callees(node):
                for each in ast.walk(function):
                    if isinstance(each, ast.Return) and each.value is not None:
                        yield from self._find(each.value, index)

    def _find_name(self, node: ast.Name) -> Iterator[ast.Call]:
        scope = self._scope(node.id, node)
        for value in self._assigned.get((scope, node.id), []):
            part, index = value if isinstance(value, tuple) else (value, None)
            if part is not node:
                yield from self._find(part, index)
        if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for call in self.script.callers(scope):
                if (argument := _argument(call, scope, node.id)) is not None:
                    yield from self._find(argument)

    def _find_attribute(self, node: ast.Attribute) -> Iterator[ast.Call]:
        key = f"self.{node.attr}"
        for (_, name), values in list(self._assigned.items()):
            if name == key:
                for value in values:
                    part, index = value if isinstance(value, tuple) else (value, None)
                    yield from self._find(part, index)

    def _find_item(self, node: ast.Subscript) -> Iterator[ast.Call]:
        """Look for an entry of a dictionary that is written as one: all of them if it is not clear
        which one.
        """
        if not isinstance(node.value, (ast.Name, ast.Attribute)):
            return
        wanted = node.slice.value if isinstance(node.slice, ast.Constant) else None
        text = node.value.id if isinstance(node.value, ast.Name) else f"self.{node.value.attr}"
        for value in self.values(text, node):
            if isinstance(value, ast.DictComp):
                yield from self._find(value.value)
            if isinstance(value, ast.Dict):
                for key, entry in zip(value.keys, value.values, strict=True):
                    if wanted is None or (isinstance(key, ast.Constant) and key.value == wanted):
                        yield from self._find(entry)

    # -- recording
    # ---------------------------------------------------------------------------------------

    def _record(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, node.value)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            self._assign(node.target, node.value)
        elif isinstance(node, ast.For):
            self._assign(node.target, ast.Constant(None))
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._assign(node.optional_vars, node.context_expr)

    def _assign(self, target: ast.expr, value: ast.expr, index: int | None = None) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            for position, part in enumerate(target.elts):
                whole = isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts)
                inner = value.elts[position] if whole and isinstance(value, ast.Tuple) else value
                self._assign(part, inner, None if whole else position)
            return
        entry = value if index is None else (value, index)
        if isinstance(target, ast.Name):
            function = self.script.function_of(target)
            declared = function is not None and target.id in self.declared_global(function)
            self._assigned.setdefault((None if declared else function, target.id), []).append(entry)
        elif (
            isinstance(target, ast.Attribute)
            and isinstance(target.value, ast.Name)
            and target.value.id == "self"
        ):
            self._assigned.setdefault(
                (self.script.class_of(target), f"self.{target.attr}"), []
            ).append(entry)

    def declared_global(self, function: Function) -> set[str]:
        """Return the names that a function declares as global."""
        if function not in self._globals:
            declared = [each for each in ast.walk(function) if isinstance(each, ast.Global)]
            self._globals[function] = {name for each in declared for name in each.names}
        return self._globals[function]

    def _scope(self, name: str, near: ast.AST) -> Function | None:
        function = self.script.function_of(near)
        while function is not None:
            if (function, name) in self._assigned or name in [
                each.arg for each in _parameters(function)
            ]:
                return function
            function = self.script.function_of(function)
        return None


def _is_method(call: ast.Call, *names: str) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr in names


def _parameters(function: Function) -> list[ast.arg]:
    arguments = function.args
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]


def _argument(call: ast.Call, function: Function, name: str) -> ast.expr | None:
    """Return what a call passes for a parameter."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
    if names[:1] in (["self"], ["cls"]):
        names = names[1:]
    if name in names and names.index(name) < len(call.args):
        return call.args[names.index(name)]
    return None
