"""Code that is correct for one process but trains differently, or hangs, on several ranks."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from paceline.tools.adopt.rank_dependent_values import OwnValues
from paceline.tools.adopt.source_edits import Remark
from paceline.tools.adopt.training import Training, loss_of

PLATEAU = "torch.optim.lr_scheduler.ReduceLROnPlateau"
MAX_DEPTH = 8


class Hazards:
    """Remarks for scripts with or without DDP; `mean`, `sum` and `ranks` are how such a script
    asks all ranks.
    """

    def __init__(self, found: Training, *, mean: str, sum: str, ranks: str) -> None:
        self.found, self.script, self.own = found, found.script, OwnValues(found)
        self.mean, self.sum, self.ranks = mean, sum, ranks

    def find(self) -> Iterator[Remark]:
        yield from self._parameters()
        yield from self._sums()
        yield from self._decisions()
        yield from self._averages()

    # -- parameters that no model has
    # ------------------------------------------------------------------

    def _parameters(self) -> Iterator[Remark]:
        for optimizer in self.found.optimizers:
            given = [
                *optimizer.args[:1],
                *(each.value for each in optimizer.keywords if each.arg == "params"),
            ]
            for leaf in (each for part in given for each in self._leaves(part, 0)):
                what = (
                    f"`{self.script.source.text_of(leaf)}` is trained but is not part of a "
                    "model, so its gradients"
                )
                more = (
                    "are not averaged over the ranks: make it a parameter of the model, before "
                    "the model is wrapped"
                )
                yield Remark(leaf.lineno, f"{what} {more}", must=True)

    def _leaves(self, node: ast.expr, depth: int) -> Iterator[ast.expr]:
        """Yield the parameters that an optimizer gets one by one."""
        if depth > MAX_DEPTH:
            return
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            for each in node.elts:
                yield from self._leaves(each, depth + 1)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "params":
                    yield from self._leaves(value, depth + 1)
        elif isinstance(node, ast.BinOp):
            yield from self._leaves(node.left, depth + 1)
            yield from self._leaves(node.right, depth + 1)
        elif isinstance(node, ast.Name):
            values = [
                each for each in self.found.origins.values(node.id, node) if hasattr(each, "lineno")
            ]
            if any(map(self._is_tensor, values)):
                yield node
            else:
                for each in values:
                    yield from self._leaves(each, depth + 1)
        elif isinstance(node, ast.Call) and self._is_tensor(node):
            yield node

    def _is_tensor(self, node: ast.AST) -> bool:
        if not isinstance(node, ast.Call):
            return False
        name = self.script.dotted(node.func)
        wants = any(
            each.arg == "requires_grad" and getattr(each.value, "value", None)
            for each in node.keywords
        )
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        return (
            name == "torch.nn.Parameter"
            or (name.startswith("torch.") and wants)
            or method == "requires_grad_"
        )

    # -- losses that are sums
    # --------------------------------------------------------------------------

    def _sums(self) -> Iterator[Remark]:
        done = set()
        for call in self.found.backwards:
            loss = loss_of(call)
            total = self._sum_in(loss, 0) if loss is not None else None
            if total is not None and total not in done:
                done.add(total)
                yield Remark(
                    total.lineno,
                    "this loss is a sum over samples, but gradients are averaged over the ranks, "
                    "so they get smaller"
                    f" with more ranks: use a mean, or multiply the loss by {self.ranks}",
                    must=True,
                )

    def _sum_in(self, node: ast.AST, depth: int) -> ast.Call | None:
        """Return the sum over samples that a loss is, if nothing divides it."""
        if depth > MAX_DEPTH:
            return None
        inner: list[ast.AST] = []
        if isinstance(node, ast.Name):
            inner = [each for each in self.own.definitions(node) if each is not None]
        elif isinstance(node, ast.BinOp) and not isinstance(node.op, (ast.Div, ast.FloorDiv)):
            inner = [node.left, node.right]
        elif isinstance(node, (ast.UnaryOp, ast.IfExp)):
            inner = [node.operand] if isinstance(node, ast.UnaryOp) else [node.body, node.orelse]
        elif isinstance(node, ast.Call):
            if self._is_sum(node) and self.own.has(node):
                return node
            method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            if method in ("to", "float", "double", "half", "squeeze") and isinstance(
                node.func, ast.Attribute
            ):
                inner = [node.func.value]
            elif method == "scale" or getattr(node.func, "id", "") == "sum":
                inner = list(node.args)
            returns = [
                each for function in self.script.callees(node) for each in ast.walk(function)
            ]
            inner += [
                each.value
                for each in returns
                if isinstance(each, ast.Return) and each.value is not None
            ]
        elif isinstance(node, (ast.Tuple, ast.List)):
            inner = list(node.elts)
        return next(
            (found for each in inner if (found := self._sum_in(each, depth + 1)) is not None), None
        )

    def _is_sum(self, call: ast.Call) -> bool:
        made = [
            call,
            *(self.found.origins.of(call.func) if not self.script.dotted(call.func) else []),
        ]
        for each in made:
            if any(
                key.arg == "reduction" and getattr(key.value, "value", "") == "sum"
                for key in each.keywords
            ):
                return True
        if self.script.dotted(call.func) == "torch.sum":
            return len(call.args) == 1 and not call.keywords
        is_method = (
            isinstance(call.func, ast.Attribute)
            and call.func.attr == "sum"
            and not self.script.dotted(call.func)
        )
        return is_method and not call.args and not call.keywords

    # -- decisions by a rank's own value
    # ---------------------------------------------------------------

    def _decisions(self) -> Iterator[Remark]:
        loops = {*self.found.step_loops, *self.found.epoch_loops, *self.found.outer_loops}
        text = (
            "each rank decides from its own value, so some may continue while others wait for "
            f"them: use {self.mean}"
        )
        for node in self.script.nodes:
            if isinstance(node, ast.While) and node in loops and self.own.has(node.test):
                yield Remark(node.lineno, text, must=True)
            if not isinstance(node, ast.If) or not any(
                each in loops for each in self.script.ancestors(node)
            ):
                continue
            if self._changes_course(node, loops) and self.own.has(node.test):
                yield Remark(node.lineno, text, must=True)
        for call in self.script.calls:
            if isinstance(call.func, ast.Attribute) and call.func.attr == "step" and call.args:
                made = [
                    self.script.dotted(each.func) for each in self.found.origins.of(call.func.value)
                ]
                if PLATEAU in made and self.own.has(call.args[0]):
                    what = (
                        "each rank lowers the learning rate depending on its own value, so "
                        "ranks train differently"
                    )
                    yield Remark(call.lineno, f"{what}: use {self.mean}", must=True)

    def _changes_course(self, node: ast.If, loops: set[ast.For | ast.While]) -> bool:
        """Whether a branch ends a loop of training, or an iteration, or trains."""
        for each in (
            part
            for branch in (node.body, node.orelse)
            for statement in branch
            for part in ast.walk(statement)
        ):
            if (
                isinstance(each, (ast.Break, ast.Continue))
                and self.script.loop_around(each) in loops
            ):
                return True
            if isinstance(each, ast.Return) and self.script.function_of(
                each
            ) is self.script.function_of(node):
                return True
            if isinstance(each, ast.Call) and each in self.found.backwards:
                return True
        return False

    def prints(self) -> Iterator[Remark]:
        """What rank 0 prints of its own values."""
        calls = [call for call in self.script.calls if getattr(call.func, "id", "") == "print"]
        lines = [
            call.lineno for call in calls if any(map(self.own.has, [*call.args, *call.keywords]))
        ]
        if lines:
            also = f" (also in line {', '.join(map(str, lines[1:6]))})" if lines[1:] else ""
            yield Remark(
                lines[0],
                f"this prints only rank 0's values{also}: for the mean over all ranks, use "
                f"{self.mean}",
            )

    # -- averages
    # --------------------------------------------------------------------------------------

    def _averages(self) -> Iterator[Remark]:
        """A total of this rank's samples, divided by the number of all."""
        text = (
            "this divides a total over this rank's samples by the number of all samples: first "
            "add up all ranks with"
        )
        for node in self.script.nodes:
            total: ast.AST | None = None
            if (
                isinstance(node, ast.BinOp)
                and isinstance(node.op, ast.Div)
                and self._counts_all(node.right)
            ):
                total = node.left
            elif (
                isinstance(node, ast.AugAssign)
                and isinstance(node.op, ast.Div)
                and self._counts_all(node.value)
            ):
                total = ast.copy_location(
                    ast.Name(getattr(node.target, "id", "-"), ast.Load()), node
                )
                self.script.parents[total] = node
            if (
                isinstance(node, (ast.BinOp, ast.AugAssign))
                and total is not None
                and self.own.has(total)
            ):
                yield Remark(node.lineno, f"{text} {self.sum}", must=True)

    def _counts_all(self, node: ast.AST) -> bool:
        """Whether this is the number of samples that training reads."""
        calls = [
            each
            for each in ast.walk(node)
            if isinstance(each, ast.Call) and getattr(each.func, "id", "") == "len"
        ]
        data = [each.args[0] for each in calls if each.args]
        trained = {*self.found.loaders, *self.found.shared}
        read = {
            origin
            for loader in trained
            for given in loader.args[:1]
            for origin in self.found.origins.of(given)
        }
        for each in data:
            if isinstance(each, ast.Attribute) and each.attr in ("dataset", "sampler"):
                return bool(self.found.origins.of(each.value) & trained)
            if isinstance(each, ast.Name) and self.found.origins.of(each) & read:
                return True
        return False
