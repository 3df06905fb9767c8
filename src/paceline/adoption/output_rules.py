"""Output: what all ranks would write or print, one of them does."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from paceline.adoption.script import Script
from paceline.adoption.source import Edit, Remark
from paceline.adoption.training import is_backward

SAVES = (
    "torch.save", "numpy.save", "numpy.savez", "json.dump", "pickle.dump", "safetensors.torch.save_file",
    "torchvision.utils.save_image",
)  # fmt: skip
SAVING_METHODS = ("save_pretrained", "savefig")
PRINT = "once, by rank 0"
SAVE = "all ranks would write the same file at the same time"


def change_saves(script: Script, condition: str) -> Iterator[tuple[ast.AST, Edit | Remark]]:
    """Put each statement that writes a file under a condition that is true on one rank."""
    done: set[ast.stmt] = set()
    for call in script.calls:
        if not _is_save(script, call) or _has_condition(script, call):
            continue
        statement = _whole_write(script, script.statement(call))
        if any(each in done for each in (statement, *script.ancestors(statement))):
            continue
        done.add(statement)
        if isinstance(statement, ast.Expr) or (isinstance(statement, ast.With) and not _trains(script, statement)):
            for change in script.source.under(statement, f"if {condition}:", SAVE):
                yield call, change
        else:
            yield call, Remark(call.lineno, f"all ranks write this file: do it only if {condition}")


def change_folders(script: Script) -> Iterator[Edit | Remark]:
    """A folder that several ranks make at once must be allowed to exist."""
    for call in script.calls:
        name, method = script.dotted(call.func), call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if any(each.arg == "exist_ok" for each in call.keywords) or _has_condition(script, call):
            continue
        why = "another rank may have made it just before"
        if name in ("os.makedirs", "os.mkdir") and call.args:
            if name == "os.mkdir":
                yield script.source.replace(call.func, "os.makedirs", why)
            yield script.source.insert(script.source.end(call) - 1, ", exist_ok=True", why)
        elif method == "mkdir" and not name and not call.args:
            comma = ", " if call.keywords else ""
            yield script.source.insert(script.source.end(call) - 1, f"{comma}exist_ok=True", why)
        elif name == "shutil.rmtree":
            yield Remark(call.lineno, "all ranks remove this folder: do it on one")


def _is_save(script: Script, call: ast.Call) -> bool:
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if getattr(call.func, "id", "") == "open":
        modes = [*call.args[1:2], *(each.value for each in call.keywords if each.arg == "mode")]
        return any(isinstance(each, ast.Constant) and set(str(each.value)) & set("wax") for each in modes)
    return script.dotted(call.func) in SAVES or method in SAVING_METHODS


def _whole_write(script: Script, statement: ast.stmt) -> ast.stmt:
    """Return the `with open(...)` around a statement that writes to that file, or the statement itself."""
    parent = script.parents.get(statement)
    opens = isinstance(parent, ast.With) and any(
        isinstance(item.context_expr, ast.Call) and _is_save(script, item.context_expr) for item in parent.items
    )
    return parent if opens and isinstance(parent, ast.With) else statement


def _trains(script: Script, node: ast.AST) -> bool:
    parts = [node, *script.reachable([node])]
    return any(is_backward(each) for part in parts for each in ast.walk(part))


def change_prints(script: Script, run: str) -> Iterator[tuple[ast.AST, Edit | Remark]]:
    for call in script.calls:
        is_print = isinstance(call.func, ast.Name) and call.func.id == "print" and "print" not in script.functions
        if is_print and not any(each.arg == "file" for each in call.keywords) and not _has_condition(script, call):
            yield call, script.source.replace(call.func, f"{run}.print", PRINT)


def change_trackers(script: Script, run: str) -> Iterator[Edit | Remark]:
    for node in ast.walk(script.tree):
        if isinstance(node, ast.Import) and [(each.name, each.asname) for each in node.names] == [("wandb", None)]:
            yield script.source.replace(node, "import paceline.wandb as wandb", "rank 0 has the W&B run")
    for call in script.calls:
        if script.dotted(call.func).endswith(".SummaryWriter"):
            yield Remark(call.lineno, "all ranks write to TensorBoard: do it on rank 0, or use --tensorboard")
    for call in script.calls:
        if any(each.arg == "download" and getattr(each.value, "value", None) is True for each in call.keywords):
            yield Remark(call.lineno, f"all ranks download this at once: put it under `with {run}.rank_zero_first():`")
    for call in script.calls_of("torch.load"):
        yield Remark(
            call.lineno, f"if it loads a checkpoint to go on from, remove it: {run}.resume does that; weights can stay"
        )


def _has_condition(script: Script, node: ast.AST) -> bool:
    """Whether an `if` around a node asks which rank this is."""
    tests = [each.test for each in script.ancestors(node) if isinstance(each, ast.If)]
    words = ("rank", "main_process", "is_main", "master")
    return any(word in ast.dump(test).lower() for test in tests for word in words)
