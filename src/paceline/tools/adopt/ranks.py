"""Ranks in a script: which lines run on one rank only, and which values differ between ranks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from paceline.tools.adopt.script_analysis import Function, Script
from paceline.tools.adopt.value_origins import Origins

VARIABLES = {
    "RANK",
    "LOCAL_RANK",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "PMIX_RANK",
}
_RANK = re.compile(
    r"_*(?:get_|is_|my_?|self_)?(?:(?:global|local|world|node|dist|ddp|process|proc|cur|current|trainer)_?)?"
    r"rank(?:_?(?:0|zero|id))?$"
)
_MAIN = re.compile(
    r"_*(?:(?:on|is|am)_(?:the_)?(?:main|master|chief|leader|primary|root|global_zero|zero)(?:_(?:process|proc|rank|node|worker))?"
    r"|(?:main|master|chief|leader|primary|root)_(?:process|proc|rank|worker)(?:_only)?"
    r"|(?:main|master|rank_zero|rank0)_only|global_zero|rank_zero|rank0)$"
)
_NUMBER = re.compile(
    r"(?:gpu|gpu_id|device_id|proc_id|process_id|process_index|procid|local_process_index)$"
)
MAX_DEPTH = 6
CASTS = ("int", "bool", "str", "get", "getenv", "get_rank", "get_local_rank")
# what they return computes the same on each device
PLACES = ("to", "cuda", "DDP", "DistributedDataParallel")


class Ranks:
    """Answers by what names mean. In a script that never asks for its rank, `rank` is a number
    like any other.
    """

    def __init__(self, script: Script, origins: Origins) -> None:
        self.script, self.origins = script, origins
        self.known = any(map(self._asks, script.nodes))

    def _asks(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Call):
            return _last_name(node) in (
                "get_rank",
                "init_process_group",
                "is_main_process",
                "get_local_rank",
            )
        return (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value in VARIABLES
        )

    def depends(self, node: ast.AST) -> bool:
        """Whether the value of an expression depends on the rank."""
        return self.known and self._depends(node, 0, set())

    def _chooses(self, test: ast.AST) -> bool:
        """Whether a condition asks for the rank. One by the loss does not, although its device
        depends on the rank.
        """
        return self.known and self._depends(test, 0, set(), guard=True)

    def _depends(
        self,
        node: ast.AST,
        depth: int,
        seen: set[tuple[str, bool]],
        *,
        guard: bool = False,
        ordered: bool = False,
    ) -> bool:
        for each, is_ordered in (
            _parts(node, ordered) if guard else ((part, False) for part in ast.walk(node))
        ):
            if self._asks(each):
                return True
            name = getattr(each, "id", None) or getattr(each, "attr", None)
            if not isinstance(each, (ast.Name, ast.Attribute)) or not name:
                continue
            if (
                _RANK.match(name)
                or _MAIN.match(name)
                or (_NUMBER.match(name) and self._is_compared(each))
            ):
                return True
            if depth < MAX_DEPTH and (name, is_ordered) not in seen:
                seen.add((name, is_ordered))
                key = name if isinstance(each, ast.Name) else f"self.{name}"
                values = self.origins.values(key, each if each in self.script.parents else node)
                if any(
                    self._depends(value, depth + 1, seen, guard=guard, ordered=is_ordered)
                    for value in values
                ):
                    return True
        return False

    def _is_compared(self, node: ast.AST) -> bool:
        """Whether a number is compared with another one, as in `gpu == 0`, or is part of a text."""
        parent = self.script.parents.get(node)
        if isinstance(parent, ast.Compare):
            return any(
                isinstance(each, ast.Constant) and each.value == 0 for each in parent.comparators
            )
        return isinstance(parent, ast.FormattedValue)

    def is_guarded(self, node: ast.AST, depth: int = 0) -> bool:
        """Whether a node runs on some ranks only: by a condition, an exit before it, or wherever
        it is called.
        """
        if not self.known:
            return False
        child = node
        for each in self.script.ancestors(node):
            if (
                isinstance(each, (ast.If, ast.IfExp))
                and child is not each.test
                and self._chooses(each.test)
            ):
                return True
            if (
                isinstance(each, ast.Match)
                and child is not each.subject
                and self._chooses(each.subject)
            ):
                return True
            if isinstance(each, ast.BoolOp) and any(
                map(self._chooses, each.values[: _position(each, child)])
            ):
                return True
            if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)):
                return self._leaves_before(each.body, child) or self._is_limited(each, depth)
            if self._leaves_before(getattr(each, "body", []), child):
                return True
            child = each
        return False

    def _leaves_before(self, body: object, child: ast.AST) -> bool:
        """Whether a statement before one of the same block leaves it on some ranks: `if rank != 0:
        return`.
        """
        if not isinstance(body, list) or child not in body:
            return False
        leaves = (ast.Return, ast.Continue, ast.Break, ast.Raise)
        return any(
            isinstance(each, ast.If)
            and isinstance(each.body[-1], leaves)
            and self._chooses(each.test)
            for each in body[: body.index(child)]
        )

    def _is_limited(self, function: Function, depth: int) -> bool:
        """Whether a function runs on some ranks only: by a decorator, or wherever it is called."""
        names = [part for each in function.decorator_list for part in ast.walk(each)]
        if any(
            _MAIN.match(getattr(each, "id", "") or getattr(each, "attr", "") or "-")
            for each in names
        ):
            return True
        callers = self.script.callers(function)
        return (
            bool(callers)
            and depth < MAX_DEPTH
            and all(self.is_guarded(call, depth + 1) for call in callers)
        )


def _parts(node: ast.AST, ordered: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Walk through a condition, and say what is less or greater than something: there, results of
    calls are numbers.
    """
    yield node, ordered
    if isinstance(node, ast.Call):
        name = _last_name(node)
        if name in PLACES or (
            ordered and not (name in CASTS or _RANK.match(name) or _MAIN.match(name))
        ):
            return
    if isinstance(node, ast.Compare):
        ordered = ordered or any(
            isinstance(each, (ast.Lt, ast.LtE, ast.Gt, ast.GtE)) for each in node.ops
        )
    for child in ast.iter_child_nodes(node):
        yield from _parts(child, ordered)


def _last_name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _position(node: ast.BoolOp, child: ast.AST) -> int:
    return next((index for index, each in enumerate(node.values) if each is child), 0)
