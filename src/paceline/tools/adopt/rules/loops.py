"""Loops: `run.epochs` and `run.steps` (a run saves and stops between their iterations), what is
saved, and the loss.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from paceline.tools.adopt.rules.data import keeps_short_batches
from paceline.tools.adopt.rules.resume import add_resume
from paceline.tools.adopt.script_analysis import Function, LoopNode
from paceline.tools.adopt.source_edits import Edit, Remark
from paceline.tools.adopt.training import Training, loss_of
from paceline.tools.adopt.value_origins import PROGRESS, WRAPPERS, unwrap

STEPS = (
    "each iteration is one step; between steps, the run saves, stops if requested, and "
    "reports its progress"
)
CLOSURE = "gives all ranks the loss and the gradients of all ranks"
EPOCHS = "a resumed run continues with the epoch that was interrupted"


def change_loops(found: Training, run: str) -> Iterator[Edit | Remark]:
    for loop in found.step_loops:
        yield from _change_steps(found, loop, run)
    if all(map(_reads_batches, found.step_loops)) and not found.mixed:
        epochs = list(_change_epochs(found, run))
        yield from epochs
        loops = found.epoch_loops or found.step_loops
        changed = not found.epoch_loops or any(isinstance(each, Edit) for each in epochs)
        if changed and len(loops) == 1 and not found.script.repeats(loops[0]):
            yield from add_resume(found, run)
        elif changed and loops:
            advice = (
                f"call {run}.resume(model=model, optimizer=optimizer) once, before the first "
                "step, to resume"
            )
            yield Remark(loops[0].lineno, advice)
        yield from _change_backwards(found, run)


# -- steps
# -------------------------------------------------------------------------------------------------


def _change_steps(found: Training, loop: LoopNode, run: str) -> Iterator[Edit | Remark]:
    script, source = found.script, found.script.source
    if loop in found.mixed:
        text = (
            "this loop trains and evaluates: use a separate loop for each, and train over "
            f"{run}.steps(loader)"
        )
        yield Remark(loop.lineno, text, must=True)
        return
    if isinstance(loop, ast.While) or not _reads_batches(loop):
        yield Remark(
            loop.lineno,
            "the training loop does not iterate over batches: write `for batch in "
            f"{run}.steps(loader):`, or read"
            f" {run}.should_stop at the end of each step",
            must=True,
        )
        return
    inner = unwrap(loop.iter)
    if unwrap(loop.iter, tuple({*WRAPPERS} - {"list"})) is not inner:
        text = (
            f"this reads all batches before the first step: iterate over {run}.steps(loader) itself"
        )
        yield Remark(loop.lineno, text, must=True)
        return
    if isinstance(inner, ast.Name):  # of `progress = tqdm(loader)`
        values = [
            each for each in found.origins.values(inner.id, inner) if isinstance(each, ast.Call)
        ]
        wrapped = [each for each in values if unwrap(each) is not each]
        if len(values) == len(wrapped) == 1 and script.function_of(
            wrapped[0]
        ) is script.function_of(loop):
            if script.loop_around(wrapped[0]) is not script.loop_around(loop):
                text = (
                    f"create this in each epoch, around {run}.steps(loader): it reads "
                    f"{run}.steps only once"
                )
                yield Remark(wrapped[0].lineno, text, must=True)
                return
            inner = unwrap(wrapped[0])
    yield source.insert(source.start(inner), f"{run}.steps(", STEPS)
    yield source.insert(source.end(inner), ")", STEPS)


# -- epochs
# ------------------------------------------------------------------------------------------------


def _change_epochs(found: Training, run: str) -> Iterator[Edit | Remark]:
    """Let `run.epochs` count, if there is one loop that counts all epochs once. Without it,
    nothing is resumed.
    """
    for loop in found.epoch_loops:
        call = _range_of(loop)
        problem = ""
        if found.nested:
            problem = "it runs more than once"
        elif len(found.epoch_loops) > 1:
            problem = "there are several"
        elif call is None:
            problem = "it does not count with range alone"
        elif (
            call.keywords
            or len(call.args) > 2
            or any(isinstance(each, ast.Starred) for each in call.args)
        ):
            problem = "it does not count by one"
        elif isinstance(loop, ast.For) and not isinstance(loop.target, (ast.Name, ast.Attribute)):
            problem = "it sets more than one variable"
        else:
            changes = _count_epochs(found, loop, call, run)
            yield from changes
            problem = "" if changes else "its first epoch is not always the same"
        if problem:
            text = (
                f"this epoch loop is left unchanged, because {problem}, so nothing is resumed. "
                "To resume, count with"
            )
            yield Remark(
                loop.lineno, f"{text} {run}.epochs(n), from 0, and call {run}.resume(...) before it"
            )


def _count_epochs(found: Training, loop: LoopNode, call: ast.Call, run: str) -> list[Edit | Remark]:
    assert isinstance(loop, ast.For)
    source = found.script.source
    first, last = (None, call.args[0]) if len(call.args) == 1 else call.args[:2]
    if first is None or (isinstance(first, ast.Constant) and first.value == 0):
        return [source.replace(call, f"{run}.epochs({source.text_of(last)})", EPOCHS)]
    count = (
        _minus_one(found, last) if isinstance(first, ast.Constant) and first.value == 1 else None
    )
    if count is None:
        return []
    changes: list[Edit | Remark] = [source.replace(call, f"{run}.epochs({count})", EPOCHS)]
    name = source.text_of(loop.target)
    used = [
        node
        for node in found.script.nodes
        if isinstance(node, type(loop.target)) and node is not loop.target
    ]
    if isinstance(loop.target, ast.Attribute) or any(
        getattr(node, "id", "") == name for node in used
    ):
        reason = f"{run}.epochs counts from 0, and this loop from 1"
        changes.append(source.line_before(loop.body[0], f"{name} += 1", reason))
    return changes


def _minus_one(found: Training, node: ast.expr) -> str | None:
    """Return the text of a number less 1: `n` of `n + 1`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return str(node.value - 1)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        one, other = node.right, node.left
        if isinstance(node.left, ast.Constant):
            one, other = node.left, node.right
        if isinstance(one, ast.Constant) and one.value == 1:
            return found.script.source.text_of(other)
    return None


def _reads_batches(loop: LoopNode) -> bool:
    """Whether a loop iterates over something, and does not count."""
    return isinstance(loop, ast.For) and _range_of(loop) is None


def _range_of(loop: LoopNode) -> ast.Call | None:
    """Return the `range(...)` that a loop counts with."""
    if not isinstance(loop, ast.For):
        return None
    inner = unwrap(loop.iter, PROGRESS)
    is_range = isinstance(inner, ast.Call) and getattr(inner.func, "id", "") in ("range", "trange")
    return inner if is_range and isinstance(inner, ast.Call) and inner.args else None


# -- the loss
# ----------------------------------------------------------------------------------------------


def _change_backwards(found: Training, run: str) -> Iterator[Edit | Remark]:
    script, source = found.script, found.script.source
    short = keeps_short_batches(found)
    closures, changes = _change_closures(found, run)
    yield from changes
    for call in found.backwards:
        loss, known = loss_of(call), {"retain_graph"}
        assert loss is not None
        function = script.function_of(call)
        closed = function in closures
        plain = not call.args or call.args == [loss]  # no gradient is given
        if (short or closed) and plain and {each.arg for each in call.keywords} <= known:
            options = "".join(f", {source.text_of(each)}" for each in call.keywords)
            why = CLOSURE if closed else "weighs the ranks by their samples in a short last batch"
            yield from _replace_backward(found, call, loss, end=f"{options})", run=run, why=why)
        elif short:
            yield Remark(
                call.lineno,
                "this backward pass needs the same number of samples on all ranks: use "
                "drop_last=True",
            )
        name = loss if isinstance(loss, ast.Name) else _scaled(loss)
        statement = script.statement(call)
        if (
            isinstance(name, ast.Name)
            and isinstance(statement, ast.Expr)
            and found.step_loops
            and not closed
        ):
            why = "the mean over all ranks, for `paceline show`, `top` and `ui`"
            yield source.line_after(statement, f"{run}.log({name.id}={name.id})", why)


def _replace_backward(
    found: Training, call: ast.Call, loss: ast.expr, *, end: str, run: str, why: str
) -> Iterator[Edit | Remark]:
    """Write `run.backward(loss)`; the loss may have changes of its own, as in
    `f(x.cuda()).backward()`.
    """
    source = found.script.source
    dot = source.end(call.func) - len(".backward")
    if call.args or source.text[dot] != ".":
        yield source.replace(call, f"{run}.backward({source.text_of(loss)}{end}", why)
    else:
        yield source.insert(source.start(call), f"{run}.backward(", why)
        yield Edit(dot, source.end(call), end, why)


def _change_closures(found: Training, run: str) -> tuple[set[Function], list[Edit | Remark]]:
    """`optimizer.step(closure)`, which would see another loss on each rank. Return the closures,
    and the changes.
    """
    script, source = found.script, found.script.source
    closures, changes = set(), list[Edit | Remark]()
    for call in script.calls:
        is_step = (
            isinstance(call.func, ast.Attribute) and call.func.attr == "step" and bool(call.args)
        )
        name = getattr(call.args[0], "id", "") if is_step else ""
        if not isinstance(call.func, ast.Attribute) or name not in script.functions:
            continue
        if isinstance(script.parents[call], ast.Expr):
            text = f"{run}.update({source.text_of(call.func.value)}, closure={name})"
            changes.append(source.replace(call, text, CLOSURE))
            closures.add(script.functions[name])
        else:
            text = (
                f"use {run}.update(optimizer, closure={name}), and {run}.backward(loss) in it: "
                f"{CLOSURE}"
            )
            changes.append(Remark(call.lineno, text, must=True))
    return closures, changes


def _scaled(loss: ast.expr) -> ast.expr | None:
    """Return the loss of `scaler.scale(loss)`."""
    is_scaled = (
        isinstance(loss, ast.Call)
        and isinstance(loss.func, ast.Attribute)
        and loss.func.attr == "scale"
    )
    return loss.args[0] if is_scaled and isinstance(loss, ast.Call) and loss.args else None
