"""Resume: `run.resume(...)` with all that training changes, and remarks on what it does not
save.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from paceline.tools.adopt.script_analysis import LoopNode, Script
from paceline.tools.adopt.source_edits import Edit, Remark
from paceline.tools.adopt.training import Training
from paceline.tools.adopt.value_origins import unwrap

RESUME = "saves these, and loads the newest checkpoint, if there is one"
SCALERS = ("torch.amp.GradScaler", "torch.cuda.amp.GradScaler", "torch.amp.grad_scaler.GradScaler")
COPIES = ("copy.deepcopy", "torch.optim.swa_utils.AveragedModel")


def add_resume(found: Training, run: str) -> Iterator[Edit | Remark]:
    """Register what training changes, before its outermost loop, with the names that are visible
    there.
    """
    script = found.script
    loop = (found.epoch_loops or found.step_loops)[0]
    wanted = {
        **dict.fromkeys(found.optimizers, "optimizer"),
        **dict.fromkeys(
            (call for call in script.calls if _is_scheduler(script.dotted(call.func))), "scheduler"
        ),
        **dict.fromkeys(script.calls_of(*SCALERS), "gradient scaler"),
        **dict.fromkeys(copies(found), "copy of the model"),
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
        yield from _forgotten(found, loop, run)
        yield from _unassigned(found)


def _is_scheduler(name: str) -> bool:
    helps = name.startswith("transformers.") and "schedule" in name
    return helps or name.startswith("torch.optim.lr_scheduler.")


def copies(found: Training) -> list[ast.Call]:
    """Return the copies of trained models, such as averages of their weights."""
    trained = {call for model, _ in found.models for call in found.origins.of(model)}
    calls = found.script.calls_of(*COPIES)
    return [call for call in calls if call.args and found.origins.of(call.args[0]) & trained]


def _read_here(found: Training, loop: LoopNode, call: ast.Call) -> dict[str, str]:
    """Return the expression by which a loop in this function reads a loader that has no name."""
    for each in found.step_loops:
        if isinstance(each, ast.For) and found.script.function_of(each) is found.script.function_of(
            loop
        ):
            inner = unwrap(each.iter)
            if (
                inner is not call
                and not isinstance(inner, ast.Call)
                and call in found.origins.of(inner)
            ):
                return {"loader": found.script.source.text_of(inner)}
    return {}


def _not_visible(loop: LoopNode, what: str, line: int, run: str) -> Remark:
    return Remark(
        loop.lineno, f"the {what} of line {line} has no name here: add it to {run}.resume(...)"
    )


def _visible(found: Training, loop: LoopNode) -> list[tuple[str, set[ast.Call]]]:
    """Return the names and attributes that have a value before a loop, with the calls that made
    it.
    """
    script, origins = found.script, found.origins
    function = script.function_of(loop)
    texts = [
        *dict.fromkeys(origins.names_in(function)),
        *dict.fromkeys(origins.attributes_of(script.class_of(loop))),
    ]
    if function is not None:
        texts += [name for name in dict.fromkeys(origins.names_in(None)) if name not in texts]
    visible = []
    for text in texts:
        node = ast.parse(text, mode="eval").body
        for part in ast.walk(node):
            script.parents.setdefault(part, loop)
        values = origins.values(text, loop)
        near = [each for each in values if "." not in text and script.function_of(each) is function]
        late = near and all(each.lineno > loop.lineno for each in near if hasattr(each, "lineno"))
        maybe_none = any(isinstance(each, ast.Constant) and each.value is None for each in values)
        if not (late or maybe_none):
            visible.append((text, origins.of(node)))
    return visible


def _forgotten(found: Training, loop: LoopNode, run: str) -> Iterator[Remark]:
    """Variables that the loop carries from one epoch to the next, such as the best loss: nothing
    saves them.
    """
    script, origins = found.script, found.origins
    carried = {}
    for node in (part for statement in loop.body for part in ast.walk(statement)):
        is_set = isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store)
        text = ast.unparse(node) if is_set else _appended(node)
        if (
            not text
            or text in carried
            or not (text.isidentifier() or text.removeprefix("self.").isidentifier())
        ):
            continue
        begun = [
            each
            for each in origins.values(text, loop)
            if _is_start(each) and each.lineno < loop.lineno
        ]
        anew = [
            each
            for each in origins.values(text, loop)
            if _is_start(each) and script.statement(each) in loop.body
        ]
        if begun and not (
            anew
            and anew[0].lineno == min(each.lineno for each in anew)
            and _first_use(loop, text, anew)
        ):
            carried[text] = begun[0].lineno
    if carried:
        names = ", ".join(f"{name} (line {line})" for name, line in list(carried.items())[:6])
        text = (
            f"a resumed run resets {names}: keep them in an object with state_dict and "
            "load_state_dict, and"
        )
        yield Remark(loop.lineno, f"{text} add it to {run}.resume(...)")


def _unassigned(found: Training) -> Iterator[Remark]:
    """Variables that only a loop over batches assigns, and that are read after it: it may have no
    steps left.
    """
    script = found.script
    for loop in (each for each in found.step_loops if isinstance(each, ast.For)):
        function = script.function_of(loop)
        scope = [node for node in ast.walk(function or script.tree) if isinstance(node, ast.Name)]
        names = [
            each
            for each in scope
            if script.function_of(each) is function and not _is_bound(script, each)
        ]
        lines = range(loop.lineno, (loop.end_lineno or loop.lineno) + 1)
        skipped = set(found.origins.declared_global(function)) if function else set()
        skipped |= (
            {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)}
            if function
            else set()
        )
        stored = [each for each in names if isinstance(each.ctx, ast.Store)]
        inside = {each.id for each in stored if each.lineno in lines} - skipped
        outside: dict[str, int] = {}  # the first line that assigns a name elsewhere
        for each in stored:
            if each.lineno not in lines:
                outside[each.id] = min(each.lineno, outside.get(each.id, each.lineno))
        first: dict[str, int] = {}
        for each in names:
            is_read = (
                isinstance(each.ctx, ast.Load) and each.lineno >= lines.stop and each.id in inside
            )
            if is_read and outside.get(each.id, each.lineno) >= each.lineno:
                first[each.id] = min(each.lineno, first.get(each.id, each.lineno))
        if first:
            listed = ", ".join(sorted(first, key=lambda name: (first[name], name))[:4])
            yield Remark(
                min(first.values()),
                f"only the loop of line {loop.lineno} assigns {listed}: a run that resumes after "
                "the last step of an "
                "epoch skips that loop and fails here. Assign a value before the loop",
            )


def _is_bound(script: Script, node: ast.Name) -> bool:
    """Whether a name belongs to a comprehension or a lambda around it."""
    for each in script.ancestors(node):
        if isinstance(each, ast.stmt):
            return False
        if isinstance(each, ast.Lambda):
            bound = {part.arg for part in ast.walk(each.args) if isinstance(part, ast.arg)}
        else:
            targets = [part.target for part in getattr(each, "generators", ())]
            bound = {
                part.id for one in targets for part in ast.walk(one) if isinstance(part, ast.Name)
            }
        if node.id in bound:
            return True
    return False


def _appended(node: ast.AST) -> str:
    """Return the name of a list that a statement adds to."""
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    if not is_call or node.func.attr not in ("append", "extend", "update"):  # type: ignore[attr-defined]
        return ""
    return ast.unparse(node.func.value)  # type: ignore[attr-defined]


def _is_start(node: ast.expr) -> bool:
    """Whether this is what a counter, a best value or a history begins with."""
    if isinstance(node, ast.UnaryOp):
        return _is_start(node.operand)
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (int, float)) and hasattr(node, "lineno")
    if isinstance(node, (ast.List, ast.Dict)):
        return not (
            node.elts
            if isinstance(node, ast.List)
            else [each for each in node.values if not _is_start(each)]
        )
    text = ast.unparse(node)
    return text.startswith(("float(", "math.inf", "np.inf", "torch.inf", "numpy.inf"))


def _first_use(loop: LoopNode, text: str, anew: list[ast.expr]) -> bool:
    """Whether the body sets a variable anew before it does anything else with it."""
    uses = [
        node
        for each in loop.body
        for node in ast.walk(each)
        if isinstance(node, (ast.Name, ast.Attribute))
    ]
    lines = [node.lineno for node in uses if ast.unparse(node) == text]
    return bool(lines and anew) and min(lines) == min(each.lineno for each in anew)
