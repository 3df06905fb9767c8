"""What a person has to look at: code that may be correct for one process only."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from paceline.tools.adopt.script import MAX_DEPTH, Script, last_name
from paceline.tools.adopt.source_edits import Edit, Remark
from paceline.tools.adopt.training import Training, given_parameters, loss_of

REST = (
    'the rest is yours: see "What is left to you" in the page about adopting a script, above all '
    "early stopping, evaluation, and what a resumed run resets"
)
SUM = (
    "this loss is a sum over samples, but gradients are averaged over the ranks, so they get "
    "smaller with more ranks: use a mean, or multiply the loss by {run}.world_size"
)


def find_remarks(found: Training, run: str) -> Iterator[Remark]:
    yield Remark(0, REST)
    yield from _losses(found, run)
    for call in found.script.calls:
        asked = [each.value for each in call.keywords if each.arg == "download"]
        if any(getattr(each, "value", False) for each in asked):
            text = "all ranks download this at once: put it under"
            yield Remark(call.lineno, f"{text} `with {run}.rank_zero_first():`")


def change_wandb(script: Script) -> Iterator[Edit | Remark]:
    for node in script.nodes:
        if isinstance(node, ast.Import) and ast.unparse(node) == "import wandb":
            text = "import paceline.wandb as wandb"
            yield script.source.replace(node, text, "rank 0 has the W&B run")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "wandb":
            text = "all ranks start a W&B run: import paceline.wandb as wandb instead"
            yield Remark(node.lineno, text, must=True)


def _losses(found: Training, run: str) -> Iterator[Remark]:
    script = found.script
    for call in found.backwards:
        total = _sum_in(script, loss_of(call), 0)
        if total is not None:
            yield Remark(total.lineno, SUM.format(run=run), must=True)
    for optimizer in found.optimizers:
        for given in given_parameters(optimizer):
            named = [each for each in ast.walk(given) if isinstance(each, (ast.Name, ast.Call))]
            values = [one for each in named for one in (each, *_values(script, each))]
            if any(isinstance(each, ast.Call) and _is_parameter(script, each) for each in values):
                text = (
                    "a parameter that is not part of a model is trained here, so its gradients are "
                )
                text += (
                    "not averaged over the ranks: make it part of the model, before it is wrapped"
                )
                yield Remark(optimizer.lineno, text, must=True)


def _values(script: Script, node: ast.expr) -> list[ast.expr]:
    return script.values(node.id, node) if isinstance(node, ast.Name) else []


def _sum_in(script: Script, node: ast.AST | None, depth: int) -> ast.Call | None:
    """Return the sum over samples that a loss is, if nothing divides it."""
    inner: list[ast.AST | None] = []
    if isinstance(node, ast.Name):
        inner = [*script.values(node.id, node)]
    elif isinstance(node, ast.BinOp) and not isinstance(node.op, (ast.Div, ast.FloorDiv)):
        inner = [node.left, node.right]
    elif isinstance(node, ast.UnaryOp):
        inner = [node.operand]
    elif isinstance(node, ast.Call):
        if _is_sum(script, node):
            return node
        lines = [each for function in script.callees(node) for each in ast.walk(function)]
        inner = [each.value for each in lines if isinstance(each, ast.Return)]
    found = (_sum_in(script, each, depth + 1) for each in inner if depth < MAX_DEPTH)
    return next((each for each in found if each is not None), None)


def _is_sum(script: Script, call: ast.Call) -> bool:
    made = [call, *script.origins(call.func)]
    options = [each for one in made for each in one.keywords if each.arg == "reduction"]
    if any(getattr(each.value, "value", "") == "sum" for each in options):
        return True
    of_all = len(call.args) == (script.dotted(call.func) == "torch.sum") and not call.keywords
    return last_name(call) == "sum" and isinstance(call.func, ast.Attribute) and of_all


def _is_parameter(script: Script, call: ast.Call) -> bool:
    wants = [each for each in call.keywords if each.arg == "requires_grad"]
    asked = any(getattr(each.value, "value", False) for each in wants)
    name = script.dotted(call.func)
    return name == "torch.nn.Parameter" or (asked and name.startswith("torch."))
