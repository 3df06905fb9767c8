"""Models: `run.wrap(model)` before an optimizer gets its parameters."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from paceline.tools.adopt.source_edits import Edit, Remark
from paceline.tools.adopt.training import Training

REASON = "moves the model to this rank's device, and averages gradients over the ranks"
PARALLEL = ("torch.nn.DataParallel", "torch.nn.parallel.DataParallel")


def wrap_models(found: Training, run: str) -> Iterator[Edit | Remark]:
    script = found.script
    compiled = {call: call for call in script.calls_of("torch.compile") if call.args}
    for model, statement in found.models:
        text = script.source.text_of(model)
        if _is_bound_inside(model, statement):
            text = f"{run}.wrap must get each of these models before this: {REASON}"
            yield Remark(statement.lineno, text, must=True)
            continue
        made = found.origins.of(model)
        options = next((_compile_option(found, call) for call in compiled if call in made), "")
        # An assignment would make a global name local.
        plain = isinstance(model, ast.Name) and not found.origins.is_local(model.id, model)
        target = "" if plain or text == "self" else f"{text} = "
        yield script.source.line_before(statement, f"{target}{run}.wrap({text}{options})", REASON)
    if found.backwards and not found.models:
        yield Remark(
            found.backwards[0].lineno,
            f"no optimizer of model.parameters() was found: call {run}.wrap(model) before you "
            "create it",
            must=True,
        )
    yield from _unwrap(found, compiled)
    for call in script.calls:
        if script.dotted(call.func).startswith("torch.nn.BatchNorm"):
            yield Remark(
                call.lineno,
                "BatchNorm averages over each rank's part of a batch; for the whole batch, call"
                f" torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before {run}.wrap (on "
                "GPUs)",
            )
            break


def _is_bound_inside(model: ast.expr, statement: ast.stmt) -> bool:
    """Whether a model has a name in a comprehension only."""
    parts = [node for node in ast.walk(statement) if isinstance(node, ast.comprehension)]
    bound = {
        node.id for part in parts for node in ast.walk(part.target) if isinstance(node, ast.Name)
    }
    return any(isinstance(node, ast.Name) and node.id in bound for node in ast.walk(model))


def _compile_option(found: Training, call: ast.Call) -> str:
    options = ", ".join(found.script.source.text_of(each) for each in call.keywords)
    return f", compile=dict({options})" if options else ", compile=True"


def _unwrap(found: Training, compiled: dict[ast.Call, ast.Call]) -> Iterator[Edit | Remark]:
    """Take away what `run.wrap` does instead."""
    script, source = found.script, found.script.source
    trained = {call for model, _ in found.models for call in found.origins.of(model)}
    parallel = [call for call in script.calls_of(*PARALLEL) if call.args]
    for call in (*parallel, *(each for each in compiled if each in trained)):
        what = (
            "run.wrap compiles the model after it has wrapped it"
            if call in compiled
            else "run.wrap does this, on all ranks"
        )
        yield from source.unwrap(call, call.args[0], what)
    for node in script.nodes:
        is_inner = isinstance(node, ast.Attribute) and node.attr == "module" and parallel
        if (
            is_inner
            and isinstance(node, ast.Attribute)
            and found.origins.of(node.value) & set(parallel)
        ):
            yield from source.unwrap(
                node, node.value, "run.wrap does not put the model inside another module"
            )
