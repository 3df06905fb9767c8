"""Values of one rank: what a script computes from its part of the batch, and so differs between
ranks.
"""

from __future__ import annotations

import ast
from bisect import bisect_left
from collections.abc import Iterator

from paceline.tools.adopt.script_analysis import Function
from paceline.tools.adopt.training import Training

# What makes a value the same on all ranks, as it is called in torch and in well-known scripts.
REDUCERS = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "broadcast",
    "broadcast_object_list",
    "reduce_tensor",
    "reduce_mean",
    "reduce_value",
    "reduce_dict",
    "reduce_loss",
    "all_reduce_mean",
    "gather",
    "gather_for_metrics",
    "synchronize_between_processes",
)
MAX_LOOKS = 3000


class OwnValues:
    """Answers whether the value of an expression comes from a rank's own batch."""

    def __init__(self, found: Training) -> None:
        self.found, self.script = found, found.script
        self._batches = {
            loop: _batch_names(loop) for loop in found.step_loops if isinstance(loop, ast.For)
        }
        self._seen: set[int] = set()
        self._index: dict[ast.AST, dict[str, list[ast.AST]]] = {}  # what statements assign, by name
        self._blocks: dict[ast.AST, list[Block]] = {}
        self._parameters: dict[Function, set[str]] = {}

    def has(self, node: ast.AST) -> bool:
        """Whether an expression has a value of this rank alone."""
        self._seen = set()
        return self._own(node)

    def _own(self, node: ast.AST) -> bool:
        if id(node) in self._seen or len(self._seen) > MAX_LOOKS:
            return False
        self._seen.add(id(node))
        if isinstance(node, ast.Call):
            if _last_name(node) in REDUCERS:
                return False
            if any(self._returns_own(function) for function in self.script.callees(node)):
                return True
        if (
            isinstance(node, ast.Name)
            and isinstance(node.ctx, ast.Load)
            and self._is_own_name(node)
        ):
            return True
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            return self._is_own_attribute(node)
        return any(map(self._own, ast.iter_child_nodes(node)))

    def _returns_own(self, function: Function) -> bool:
        if function.name == "__init__":
            return False
        gives = (ast.Return, ast.Yield)
        returned = [
            each.value
            for each in ast.walk(function)
            if isinstance(each, gives) and each.value is not None
        ]
        return any(map(self._own, returned))

    def _is_own_attribute(self, node: ast.Attribute) -> bool:
        owner, text = self.script.class_of(node), f"self.{node.attr}"
        return owner is not None and any(map(self._own, self._given(owner, text)))

    def _is_own_name(self, node: ast.Name) -> bool:
        return any(each is None or self._own(each) for each in self.definitions(node))

    # -- where a name has its value from
    # -----------------------------------------------------------------

    def definitions(self, node: ast.Name) -> Iterator[ast.AST | None]:
        """Yield what a name may have its value from, where it is read; None for a batch of
        training.
        """
        child: ast.AST = node
        for each in self.script.ancestors(node):
            if isinstance(each, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
                for part in each.generators:
                    if node.id in _names(part.target):
                        yield part.iter
                        return
            body = next(
                (block for block in self._blocks_of(each) if child in block.positions), None
            )
            if body is not None:
                for statement in body.before(child, node.id):
                    yield from self._given(statement, node.id)
                    if _is_final(statement, node.id):
                        return
            if (
                isinstance(each, ast.For)
                and child is not each.iter
                and node.id in _names(each.target)
            ):
                yield None if node.id in self._batches.get(each, ()) else each.iter
                return
            if isinstance(each, (ast.For, ast.While)) and body is not None:
                yield from self._given(each, node.id)  # of an earlier iteration
            if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)):
                if node.id in self._parameters_of(each):
                    yield from self._arguments(each, node.id)
                    return
                if self._given(each, node.id):
                    return
            child = each

    def _parameters_of(self, function: Function) -> set[str]:
        if function not in self._parameters:
            parameters = {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)}
            self._parameters[function] = parameters
        return self._parameters[function]

    def _blocks_of(self, node: ast.AST) -> list[Block]:
        if node not in self._blocks:
            bodies = [body for _, body in ast.iter_fields(node) if isinstance(body, list)]
            self._blocks[node] = [
                Block(body) for body in bodies if body and isinstance(body[0], ast.stmt)
            ]
        return self._blocks[node]

    def _given(self, node: ast.AST, text: str) -> list[ast.AST]:
        if node not in self._index:
            self._index[node] = _given(node)
        return self._index[node].get(text, [])

    def _arguments(self, function: Function, name: str) -> Iterator[ast.expr]:
        for call in self.script.callers(function):
            yield from [each.value for each in call.keywords if each.arg == name]
            names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
            names = names[1:] if names[:1] in (["self"], ["cls"]) else names
            if name in names and names.index(name) < len(call.args):
                yield call.args[names.index(name)]


class Block:
    """The statements of a block, and which of them may change a name: long scripts have
    thousands.
    """

    def __init__(self, body: list[ast.stmt]) -> None:
        self._body = body
        self.positions: dict[ast.AST, int] = {
            statement: index for index, statement in enumerate(body)
        }
        self._changing: dict[str, list[int]] | None = None  # the positions of statements, by name

    def before(self, statement: ast.AST, name: str) -> Iterator[ast.stmt]:
        """Yield the statements before one that may change a name, from the last to the first."""
        if self._changing is None:
            self._changing = {}
            for index, each in enumerate(self._body):
                for found in _changed(each):
                    self._changing.setdefault(found, []).append(index)
        positions = self._changing.get(name, [])
        for index in reversed(positions[: bisect_left(positions, self.positions[statement])]):
            yield self._body[index]


def _names(target: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}


def _batch_names(loop: ast.For) -> set[str]:
    """Return the variables of a loop that hold a batch, not its number."""
    calls = [node for node in ast.walk(loop.iter) if isinstance(node, ast.Call)]
    counted = any(_last_name(call) == "enumerate" for call in calls)
    if counted and isinstance(loop.target, ast.Tuple):
        return {name for part in loop.target.elts[1:] for name in _names(part)}
    return _names(loop.target)


def _given(node: ast.AST) -> dict[str, list[ast.AST]]:
    """Return what a statement, or one inside of it, assigns to each name, or gives to a method of
    it.
    """
    found: dict[str, list[ast.AST]] = {}
    for each in ast.walk(node):
        if isinstance(each, ast.Assign):
            for name, value in (
                pair for target in each.targets for pair in _assigned(target, each.value)
            ):
                found.setdefault(name, []).append(value)
        elif (
            isinstance(each, (ast.AugAssign, ast.AnnAssign, ast.NamedExpr))
            and each.value is not None
        ):
            found.setdefault(ast.unparse(each.target), []).append(each.value)
        elif isinstance(each, ast.Expr) and isinstance(each.value, ast.Call):
            call = each.value
            owner = call.func.value if isinstance(call.func, ast.Attribute) else call.func
            if _last_name(call) not in REDUCERS:
                given = [*call.args, *(keyword.value for keyword in call.keywords)]
                found.setdefault(ast.unparse(owner), []).extend(given)
    return found


def _changed(statement: ast.stmt) -> set[str]:
    """Return the names that a statement may change: at least those that `_given` and `_is_final`
    look for.
    """
    found: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            call = node.value
            owner = call.func.value if isinstance(call.func, ast.Attribute) else call.func
            found |= _names(node) if _last_name(call) in REDUCERS else _names(owner)
    return found


def _assigned(target: ast.expr, value: ast.expr) -> list[tuple[str, ast.expr]]:
    if isinstance(target, (ast.Tuple, ast.List)):
        whole = isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts)
        parts = (
            value.elts
            if whole and isinstance(value, (ast.Tuple, ast.List))
            else [value] * len(target.elts)
        )
        return [
            each
            for one, two in zip(target.elts, parts, strict=True)
            for each in _assigned(one, two)
        ]
    return [(ast.unparse(target), value)]


def _is_final(statement: ast.AST, name: str) -> bool:
    """Whether nothing before a statement matters for a name: it gets another value, or that of all
    ranks.
    """
    if isinstance(statement, ast.Assign):
        return any(
            name == each
            for target in statement.targets
            for each, _ in _assigned(target, statement.value)
        )
    # a loop over no batches is not what anybody writes
    if isinstance(statement, (ast.With, ast.For)):
        return any(_is_final(each, name) for each in statement.body)
    call = statement.value if isinstance(statement, ast.Expr) else None
    reduced = isinstance(call, ast.Call) and _last_name(call) in REDUCERS
    return reduced and any(
        isinstance(node, ast.Name) and node.id == name for node in ast.walk(statement)
    )


def _last_name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
