"""The session: `import paceline`, and `run = paceline.start()` before the first line that needs
it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import PurePath

from paceline.tools.adopt.script_analysis import Function, Script
from paceline.tools.adopt.source_edits import Edit, Remark

NAMES = ("run", "session", "paceline_run")
SEEDS = ("manual_seed", "manual_seed_all", "seed_everything", "set_seed", "fix_seed", "seed_all")
REASON = "finds this rank, its device and the other ranks; it ends with the script"
SEED = "; the seed makes all ranks draw the same numbers, until they train"


def free_name(script: Script) -> str:
    """Return a name for the run that the script does not use."""
    return next(
        name
        for name in (*NAMES, *(f"run{n}" for n in range(2, 10_000)))
        if name not in script.names
    )


class Entry:
    """The statement before which the session starts: the first one at the top that needs it."""

    def __init__(self, script: Script, needing: Iterable[ast.AST]) -> None:
        self.script = script
        self.is_seeded = any(_last_name(call) in SEEDS for call in script.calls)
        needing = set(needing)
        holders = {script.function_of(node) for node in needing} - {None}
        order = list(self._executed())
        self.statement: ast.stmt | None = None
        for position, statement in enumerate(order):
            lexical = any(node in needing for node in _walk_flat(statement))
            if lexical or script.reachable([statement]) & holders:
                first = position if self.is_seeded else self._first_beside(statement, order)
                self.statement = order[first]
                self.before, self.after = order[:first], order[first:]
                break
        called = [
            each
            for each in order
            if isinstance(each, ast.Expr) and isinstance(each.value, ast.Call)
        ]
        # `app()` calls a function that is decorated for it
        hidden = self.statement is None and bool(called)
        if hidden:
            position = order.index(called[-1])
            self.statement, self.before, self.after = called[-1], order[:position], order[position:]
        if self.statement is not None:
            self._early = script.reachable(self.before)
            self._late = {*script.functions.values()} if hidden else script.reachable(self.after)
            self._late_nodes = {node for each in self.after for node in _walk_flat(each)}

    def _first_beside(self, statement: ast.stmt, order: list[ast.stmt]) -> int:
        """Return the first statement of the same block: without a seed, data may be made up from
        there on.
        """
        block = self.script.parents[statement]
        first = next(
            each for each in order if self.script.parents[each] is block and not _is_text(each)
        )
        return order.index(first)

    def has_run(self, node: ast.AST) -> bool:
        """Whether the session is open when a node runs, as far as one can tell."""
        function = self.script.function_of(node)
        if self.statement is None:
            return False
        if function is None:
            return node in self._late_nodes
        outer: Function | None = function
        while outer is not None:
            if outer in self._late and outer not in self._early:
                return True
            outer = self.script.function_of(outer)
        return False

    def _executed(self) -> Iterator[ast.stmt]:
        """Yield the statements that run at the top, in order, with those under `if __name__ ==
        "__main__":`.
        """
        guard = self.script.guard
        for statement in self.script.tree.body:
            if statement is guard:
                yield from guard.body
            elif not isinstance(
                statement, (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
            ):
                yield statement


def open_session(script: Script, entry: Entry, run: str) -> Iterator[Edit | Remark]:
    assert entry.statement is not None
    line = f"{run} = paceline.start({'' if entry.is_seeded else 'seed=0'})"
    yield import_line(script, "paceline")
    yield script.source.line_before(
        entry.statement, line, REASON if entry.is_seeded else REASON + SEED
    )


def remark_import(
    script: Script, entry: Entry, users: Iterable[ast.AST], run: str
) -> Iterator[Remark]:
    """Say which functions only work in the script itself: whoever imports it does not run its main
    block.
    """
    if script.guard is None or entry.statement not in script.guard.body:
        return
    names = {
        function.name: None for node in users if (function := script.function_of(node)) is not None
    }
    module = PurePath(script.source.name).stem
    if not names or not module.isidentifier():
        return
    first, *rest = names
    text = (
        f"{' and '.join([first, *rest])} use"
        if len(rest) < 2
        else f"{first} and {len(rest)} other functions use"
    )
    yield Remark(
        0,
        f"{text}{'' if rest else 's'} `{run}`, which exists only when "
        f"{PurePath(script.source.name).name} runs as the"
        f" script: a test or notebook that imports it has to set `{module}.{run} = "
        "paceline.start()` first",
    )


def import_line(script: Script, module: str) -> Edit | Remark:
    """Add an import after the imports at the top."""
    body = script.tree.body
    imports = [each for each in body if isinstance(each, (ast.Import, ast.ImportFrom))]
    reason = (
        "the import that the lines below need" if module == "paceline" else f"for {module}.environ"
    )
    if imports:
        first_block = imports[0]
        for previous, following in pairwise(body):
            if previous is first_block and isinstance(following, (ast.Import, ast.ImportFrom)):
                first_block = following
        return script.source.line_after(first_block, f"import {module}", reason)
    if _is_text(body[0]) and len(body) > 1:
        return script.source.line_before(body[1], f"import {module}", reason)
    return script.source.line_before(body[0], f"import {module}", reason)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _last_name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _walk_flat(node: ast.AST) -> Iterator[ast.AST]:
    """Walk through a statement, but not into functions and classes that it defines."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from _walk_flat(child)
