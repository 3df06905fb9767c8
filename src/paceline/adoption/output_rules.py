"""Output: what all ranks would write or print, one of them does."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from paceline.adoption.script import Script
from paceline.adoption.source import Edit, Remark

SAVES = ("torch.save", "numpy.save", "numpy.savez", "json.dump", "pickle.dump", "safetensors.torch.save_file")
SAVING_METHODS = ("save_pretrained", "savefig")
PRINT = "once, by rank 0"
SAVE = "all ranks would write the same file at the same time"


def change_saves(script: Script, condition: str) -> Iterator[tuple[ast.AST, Edit | Remark]]:
    """Put each statement that writes a file under a condition that is true on one rank."""
    for call in script.calls:
        method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        is_save = script.dotted(call.func) in SAVES or (method in SAVING_METHODS)
        if not is_save or _has_condition(script, call):
            continue
        statement = script.statement(call)
        if isinstance(statement, ast.Expr):
            for change in script.source.under(statement, f"if {condition}:", SAVE):
                yield call, change
        else:
            yield call, Remark(call.lineno, f"this writes a file on all ranks: do it only if {condition}")


def change_prints(script: Script, run: str) -> Iterator[tuple[ast.AST, Edit | Remark]]:
    for call in script.calls:
        is_print = isinstance(call.func, ast.Name) and call.func.id == "print" and "print" not in script.functions
        if is_print and not any(each.arg == "file" for each in call.keywords) and not _has_condition(script, call):
            yield call, script.source.replace(call.func, f"{run}.print", PRINT)


def change_trackers(script: Script) -> Iterator[Edit | Remark]:
    for node in ast.walk(script.tree):
        if isinstance(node, ast.Import) and [(each.name, each.asname) for each in node.names] == [("wandb", None)]:
            yield script.source.replace(node, "import paceline.wandb as wandb", "rank 0 has the W&B run")
    for call in script.calls:
        if script.dotted(call.func).endswith(".SummaryWriter"):
            yield Remark(call.lineno, "all ranks write to TensorBoard: do it on rank 0, or use --tensorboard")
    for call in script.calls_of("torch.load"):
        yield Remark(
            call.lineno,
            "if this loads a checkpoint to go on from, remove it: run.resume does that. Weights to start from can stay",
        )


def _has_condition(script: Script, node: ast.AST) -> bool:
    """Whether an `if` around a node asks which rank this is."""
    tests = [each.test for each in script.ancestors(node) if isinstance(each, ast.If)]
    words = ("rank", "main_process", "is_main", "master")
    return any(word in ast.dump(test).lower() for test in tests for word in words)
