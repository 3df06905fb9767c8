"""The process group of a script that already uses DDP: where it is created, and whether a line
runs while it exists.
"""

from __future__ import annotations

import ast

from paceline.tools.adopt.script_analysis import Script

GROUP = ("torch.distributed.init_process_group",)
SPAWN = (
    "torch.multiprocessing.spawn",
    "torch.multiprocessing.start_processes",
    "torch.multiprocessing.Process",
)
END = ("torch.distributed.destroy_process_group",)
MAX_DEPTH = 8


class Group:
    def __init__(self, script: Script) -> None:
        self.script = script
        self.made = script.calls_of(*GROUP)
        self.spawns = bool(script.calls_of(*SPAWN))
        self._makers = self._reaching(GROUP)
        self._enders = self._reaching(END)

    @property
    def rank(self) -> str | None:
        """How any line of the script can ask for its rank."""
        top = [
            each for each in self.script.tree.body if isinstance(each, (ast.Import, ast.ImportFrom))
        ]
        names = [(alias.asname or alias.name, each) for each in top for alias in each.names]
        for name, _ in names:
            if self.script.imports.get(name) == "torch.distributed":
                return f"{name}.get_rank()"
        return (
            "torch.distributed.get_rank()"
            if "torch" in [name.split(".")[0] for name, _ in names]
            else None
        )

    def condition(self) -> ast.expr | None:
        """Return the test that decides whether there is a group; None if there always is one."""
        for call in self.made:
            if (test := self._test_around(call, 0)) is not None:
                return test
        return None

    def is_open(self, node: ast.AST, depth: int = 0) -> bool:
        """Whether there certainly is a group when a node runs."""
        function = self.script.function_of(node)
        body = [call for call in self.script.calls if self.script.function_of(call) is function]
        before = [call for call in body if _position(call) < _position(node)]
        made = [call for call in before if call in self._makers and self._is_certain(call)]
        if made:
            return not any(
                call in self._enders for call in before if _position(call) > _position(made[-1])
            )
        callers = (
            self.script.callers(function) if function is not None and depth < MAX_DEPTH else []
        )
        return bool(callers) and all(self.is_open(call, depth + 1) for call in callers)

    def _reaching(self, names: tuple[str, ...]) -> set[ast.Call]:
        """Return the calls of these functions, and of functions of the script that certainly call
        them.
        """
        found = set(self.script.calls_of(*names))
        for _ in range(MAX_DEPTH):
            functions = {
                self.script.function_of(call) for call in found if self._is_certain(call)
            } - {None}
            more = {
                call for each in functions if each is not None for call in self.script.callers(each)
            } - found
            if not more:
                break
            found |= more
        return found

    def _is_certain(self, call: ast.AST) -> bool:
        """Whether a call runs whenever its function does."""
        for each in self.script.ancestors(call):
            if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)):
                left = [node for node in ast.walk(each) if isinstance(node, ast.Return)]
                return not any(_position(node) < _position(call) for node in left)
            if (
                isinstance(each, (ast.If, ast.Try, ast.IfExp, ast.While, ast.For))
                and each is not self.script.guard
            ):
                return False
        return True

    def _test_around(self, call: ast.AST, depth: int) -> ast.expr | None:
        for each in self.script.ancestors(call):
            if isinstance(each, (ast.If, ast.IfExp)) and each is not self.script.guard:
                return each.test
            if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)) and depth < MAX_DEPTH:
                tests = [
                    self._test_around(caller, depth + 1) for caller in self.script.callers(each)
                ]
                return next((test for test in tests if test is not None), None)
        return None


def _position(node: ast.AST) -> tuple[int, int]:
    return node.lineno, node.col_offset  # type: ignore[attr-defined]
