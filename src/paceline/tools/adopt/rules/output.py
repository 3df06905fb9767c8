"""Output: let one rank write or print what all ranks otherwise would."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from paceline.tools.adopt.ranks import Ranks
from paceline.tools.adopt.rules.files import path_key
from paceline.tools.adopt.script_analysis import Script
from paceline.tools.adopt.source_edits import Edit, Remark

PRINT = "once, by rank 0"
TRACKERS = (
    "mlflow.start_run",
    "neptune.init_run",
    "comet_ml.Experiment",
    "comet_ml.start",
    "aim.Run",
    "clearml.Task.init",
)


def change_folders(script: Script, ranks: Ranks) -> Iterator[Edit | Remark]:
    """A folder that several ranks make at once must be allowed to exist."""
    for call in script.calls:
        name, method = (
            script.dotted(call.func),
            call.func.attr if isinstance(call.func, ast.Attribute) else "",
        )
        known = any(each.arg in ("exist_ok", None) for each in call.keywords) or len(call.args) > 2
        if known or ranks.is_guarded(call) or _is_tried(script, call):
            continue
        why = "another rank may have just created it"
        if name == "os.mkdir" and call.args and script.source.text_of(call.func) != "os.mkdir":
            yield Remark(call.lineno, f"{why}: use os.makedirs(..., exist_ok=True)", must=True)
        elif name in ("os.makedirs", "os.mkdir") and call.args:
            if name == "os.mkdir":
                yield script.source.replace(call.func, "os.makedirs", why)
            yield script.source.add_argument(call, "exist_ok=True", why)
        elif method == "mkdir" and not name and not call.args:
            yield script.source.add_argument(call, "exist_ok=True", why)
        elif name == "shutil.rmtree":
            yield Remark(
                call.lineno,
                "all ranks remove this folder, even while others use it: remove it on one rank "
                "only",
                must=True,
            )


def _is_tried(script: Script, call: ast.Call) -> bool:
    """Whether the script expects that this may fail."""
    return any(isinstance(each, ast.Try) and each.handlers for each in script.ancestors(call))


def change_prints(
    script: Script, ranks: Ranks, run: str
) -> Iterator[tuple[ast.AST, Edit | Remark]]:
    for call in script.calls:
        own = "print" in script.functions or "print" in script.imports
        is_print = isinstance(call.func, ast.Name) and call.func.id == "print" and not own
        if (
            is_print
            and not any(each.arg == "file" for each in call.keywords)
            and not ranks.is_guarded(call)
        ):
            yield call, script.source.replace(call.func, f"{run}.print", PRINT)


def change_trackers(script: Script, ranks: Ranks, run: str) -> Iterator[Edit | Remark]:
    for node in script.nodes:
        if isinstance(node, ast.Import) and [(each.name, each.asname) for each in node.names] == [
            ("wandb", None)
        ]:
            yield script.source.replace(
                node, "import paceline.wandb as wandb", "rank 0 has the W&B run"
            )
        elif _imports_wandb(node):
            yield Remark(
                node.lineno,  # type: ignore[attr-defined]
                "all ranks start a W&B run: import paceline.wandb as wandb instead",
                must=True,
            )
    for call in script.calls:
        name = script.dotted(call.func)
        if name in TRACKERS and not ranks.is_guarded(call):
            yield Remark(
                call.lineno,
                f"all ranks start a run of {name.split('.')[0]}: do it only if {run}.is_rank_zero",
            )
        if name.endswith(".SummaryWriter") and not ranks.is_guarded(call):
            yield Remark(
                call.lineno, "all ranks write to TensorBoard: do it on rank 0, or use --tensorboard"
            )
        if any(
            each.arg == "download" and getattr(each.value, "value", None) is True
            for each in call.keywords
        ):
            yield Remark(
                call.lineno,
                f"all ranks download this at once: put it under `with {run}.rank_zero_first():`",
            )


def _imports_wandb(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").split(".")[0] == "wandb"
    return isinstance(node, ast.Import) and any(
        each.name.split(".")[0] == "wandb" for each in node.names
    )


def change_loads(
    script: Script, run: str, saved: set[tuple[object, str]], *, resumes: bool
) -> Iterator[Remark]:
    """Files that the script reads: a checkpoint, if the run resumes by itself, or what rank 0 has
    just written.
    """
    for call in script.calls_of("torch.load"):
        is_saved = bool(call.args) and path_key(script, call.args[0]) in saved
        text = (
            f"remove this if it loads a checkpoint to continue from: {run}.resume does that. Keep "
            "it if it loads "
            "pretrained weights"
        )
        if is_saved:
            first = f"put this under `with {run}.rank_zero_first():`"
            text = f"rank 0 writes this file, and other ranks may read it too early: {first}"
        if is_saved or resumes:
            yield Remark(call.lineno, text, must=is_saved)
