"""Loops: `run.epochs` and `run.steps`, between whose iterations a run saves and stops; what is saved; the loss."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from paceline.adoption.data_rules import keeps_short_batches
from paceline.adoption.origins import unwrap
from paceline.adoption.script import LoopNode
from paceline.adoption.source import Edit, Remark
from paceline.adoption.training import LOADERS, Training

STEPS = "a step ends with each iteration: there the run saves, stops when it must, and shows its progress"
EPOCHS = "a resumed run goes on with the epoch that was interrupted"
RESUME = "saves these, and loads the newest checkpoint, if there is one"
SCALERS = ("torch.amp.GradScaler", "torch.cuda.amp.GradScaler", "torch.amp.grad_scaler.GradScaler")


def change_loops(found: Training, run: str) -> Iterator[Edit | Remark]:
    for loop in found.step_loops:
        yield from _change_steps(found, loop, run)
    if all(map(_reads_batches, found.step_loops)):
        for loop in found.epoch_loops:
            yield from _change_epochs(found, loop, run)
        yield from _resume(found, run)
        yield from _change_backwards(found, run)


# -- steps -------------------------------------------------------------------------------------------------


def _change_steps(found: Training, loop: LoopNode, run: str) -> Iterator[Edit | Remark]:
    script, source = found.script, found.script.source
    if isinstance(loop, ast.While) or not _reads_batches(loop):
        yield Remark(
            loop.lineno,
            f"the training loop does not iterate over batches: write `for batch in {run}.steps(loader):`, or read"
            f" {run}.should_stop at the end of each step",
            must=True,
        )
        return
    inner = unwrap(loop.iter)
    if isinstance(inner, ast.Name):  # of `progress = tqdm(loader)`
        values = [each for each in found.origins.values(inner.id, inner) if isinstance(each, ast.Call)]
        wrapped = [each for each in values if unwrap(each) is not each]
        if len(values) == len(wrapped) == 1 and script.function_of(wrapped[0]) is script.function_of(loop):
            inner = unwrap(wrapped[0])
    if isinstance(inner, ast.Call) and script.dotted(inner.func) in LOADERS:
        yield source.insert(source.start(inner), f"{run}.steps(", STEPS)
        yield source.insert(source.end(inner), ")", STEPS)
        return
    yield source.replace(inner, f"{run}.steps({source.text_of(inner)})", STEPS)


# -- epochs ------------------------------------------------------------------------------------------------


def _change_epochs(found: Training, loop: LoopNode, run: str) -> Iterator[Edit | Remark]:
    source = found.script.source
    call = _range_of(loop)
    if call is None or found.nested:
        why = "something around it repeats it" if found.nested else "it does not count with range"
        yield Remark(loop.lineno, f"this loop over epochs stays, since {why}; with {run}.epochs(n) a run could resume")
        return
    assert isinstance(loop, ast.For)
    first, last = (None, call.args[0]) if len(call.args) == 1 else call.args[:2]
    if first is None or (isinstance(first, ast.Constant) and first.value == 0):
        yield source.replace(call, f"{run}.epochs({source.text_of(last)})", EPOCHS)
        return
    count = _minus_one(found, last) if isinstance(first, ast.Constant) and first.value == 1 else None
    if count is None or len(call.args) > 2:
        yield Remark(loop.lineno, f"the epochs do not begin at 0: use {run}.epochs(n), which knows where to go on")
        return
    yield source.replace(call, f"{run}.epochs({count})", EPOCHS)
    name = loop.target.id if isinstance(loop.target, ast.Name) else ""
    if any(isinstance(node, ast.Name) and node.id == name for part in loop.body for node in ast.walk(part)):
        yield source.line_before(loop.body[0], f"{name} += 1", f"{run}.epochs counts from 0, and this loop from 1")


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
    inner = unwrap(loop.iter)
    is_range = isinstance(inner, ast.Call) and getattr(inner.func, "id", "") in ("range", "trange")
    return inner if is_range and isinstance(inner, ast.Call) and inner.args else None


# -- resume ------------------------------------------------------------------------------------------------


def _resume(found: Training, run: str) -> Iterator[Edit | Remark]:
    """Register what training changes, before its outermost loop, with the names that are visible there."""
    script = found.script
    loops = found.epoch_loops or found.step_loops
    if found.nested or len(loops) != 1:
        if loops:
            advice = f"call {run}.resume(model=model, optimizer=optimizer) once, before the first step, to resume"
            yield Remark(loops[0].lineno, advice)
        return
    loop = loops[0]
    schedulers = [call for call in script.calls if _is_scheduler(script.dotted(call.func))]
    wanted = {
        **dict.fromkeys(found.optimizers, "optimizer"),
        **dict.fromkeys(schedulers, "scheduler"),
        **dict.fromkeys(script.calls_of(*SCALERS), "gradient scaler"),
        **dict.fromkeys(found.loaders, "loader"),
    }
    visible = _visible(found, loop)
    names: dict[str, str] = {}
    for model, _ in found.models:
        made = found.origins.of(model)
        text = next((text for text, calls in visible if calls & made), None)
        if text is None:
            yield _not_visible(loop, "model", model.lineno, run)
        else:
            names[text.rpartition(".")[2]] = text
    for call, what in wanted.items():
        text = next((text for text, calls in visible if call in calls), None)
        if text is not None:
            names.setdefault(text.rpartition(".")[2], text)
        elif what == "loader":
            names |= _read_here(found, loop, call)
        else:
            yield _not_visible(loop, what, call.lineno, run)
    if names:
        arguments = ", ".join(f"{name}={text}" for name, text in names.items())
        yield script.source.line_before(loop, f"{run}.resume({arguments})", RESUME)


def _is_scheduler(name: str) -> bool:
    helps = name.startswith("transformers.") and "schedule" in name
    return helps or name.startswith("torch.optim.lr_scheduler.")


def _read_here(found: Training, loop: LoopNode, call: ast.Call) -> dict[str, str]:
    """Return the expression by which a loop in this function reads a loader that has no name."""
    for each in found.step_loops:
        if isinstance(each, ast.For) and found.script.function_of(each) is found.script.function_of(loop):
            inner = unwrap(each.iter)
            if inner is not call and call in found.origins.of(inner):
                return {"loader": found.script.source.text_of(inner)}
    return {}


def _not_visible(loop: LoopNode, what: str, line: int, run: str) -> Remark:
    return Remark(loop.lineno, f"the {what} of line {line} has no name here: add it to {run}.resume(...)")


def _visible(found: Training, loop: LoopNode) -> list[tuple[str, set[ast.Call]]]:
    """Return the names and attributes that have a value before a loop, with the calls that made it."""
    script, origins = found.script, found.origins
    function = script.function_of(loop)
    texts = [*dict.fromkeys(origins.names_in(function)), *dict.fromkeys(origins.attributes_of(script.class_of(loop)))]
    if function is not None:
        texts += [name for name in dict.fromkeys(origins.names_in(None)) if name not in texts]
    visible = []
    for text in texts:
        node = ast.parse(text, mode="eval").body
        for part in ast.walk(node):
            script.parents.setdefault(part, loop)
        values = origins.values(text, loop)
        late = values and all(each.lineno > loop.lineno for each in values if hasattr(each, "lineno"))
        maybe_none = any(isinstance(each, ast.Constant) and each.value is None for each in values)
        if not (late or maybe_none):
            visible.append((text, origins.of(node)))
    return visible


# -- the loss ----------------------------------------------------------------------------------------------


def _change_backwards(found: Training, run: str) -> Iterator[Edit | Remark]:
    script, source = found.script, found.script.source
    short = keeps_short_batches(found)
    for call in found.backwards:
        assert isinstance(call.func, ast.Attribute)
        loss, known = call.func.value, {"retain_graph"}
        if short and {each.arg for each in call.keywords} <= known:
            options = "".join(f", {source.text_of(each)}" for each in call.keywords)
            why = "weighs the ranks by their samples in a short last batch"
            yield source.replace(call, f"{run}.backward({source.text_of(loss)}{options})", why)
        elif short:
            yield Remark(call.lineno, "this backward needs equally many samples on all ranks: use drop_last=True")
        name = loss if isinstance(loss, ast.Name) else _scaled(loss)
        statement = script.statement(call)
        if isinstance(name, ast.Name) and isinstance(statement, ast.Expr) and found.step_loops:
            why = "the mean over all ranks, for `paceline show`, `top` and `ui`"
            line = source.line_after(statement, f"{run}.log({name.id}={name.id})", why)
            yield from [line] if isinstance(line, Edit) else []


def _scaled(loss: ast.expr) -> ast.expr | None:
    """Return the loss of `scaler.scale(loss)`."""
    is_scaled = isinstance(loss, ast.Call) and isinstance(loss.func, ast.Attribute) and loss.func.attr == "scale"
    return loss.args[0] if is_scaled and isinstance(loss, ast.Call) and loss.args else None
