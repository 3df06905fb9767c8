"""What a person has to look at: code that may be correct for one process only."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import PurePath

from paceline.tools.adopt.script import MAX_DEPTH, WRAPPERS, Function, Script, last_name
from paceline.tools.adopt.source_edits import Edit, Remark
from paceline.tools.adopt.training import Training, batch_names, given_parameters, loss_of
from paceline.tools.adopt.training_edits import copies

ATTRIBUTES = ("dataset", "batch_size", "num_workers")  # that a loader of `run.loader` has, too
TRACKERS = ("mlflow.start_run", "neptune.init_run", "comet_ml.Experiment", "aim.Run")
SUM = (
    "this loss is a sum over samples, but gradients are averaged over the ranks, so they get "
    "smaller with more ranks: use a mean, or multiply the loss by {run}.world_size"
)


def find_remarks(found: Training, run: str, *, resumes: bool) -> Iterator[Remark]:
    script = found.script
    yield from _losses(found, run)
    yield from _decisions(found, run)
    yield from _loader_uses(found, run)
    if resumes:
        yield from _forgotten(found, run)
        yield from _unassigned(found)
    for call in script.calls:
        name = script.dotted(call.func)
        if name in TRACKERS or name.endswith(".SummaryWriter"):
            what = f"all ranks start {last_name(call)}: do it only if {run}.is_rank_zero"
            yield Remark(call.lineno, what)
        if any(
            each.arg == "download" and getattr(each.value, "value", 0) for each in call.keywords
        ):
            text = "all ranks download this at once: put it under"
            yield Remark(call.lineno, f"{text} `with {run}.rank_zero_first():`")
        if name == "torch.load":
            text = f"if this loads what rank 0 has written in this run, put it under `with {run}."
            text += f"rank_zero_first():`; if a checkpoint to continue from, {run}.resume does that"
            yield Remark(call.lineno, text)
    norms = [
        call for call in script.calls if script.dotted(call.func).startswith("torch.nn.BatchNorm")
    ]
    if norms:
        text = "BatchNorm averages over each rank's part of a batch; for the whole batch, call "
        text += "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before "
        yield Remark(norms[0].lineno, f"{text}{run}.wrap (on GPUs)")


def change_wandb(script: Script) -> Iterator[Edit | Remark]:
    for node in script.nodes:
        if isinstance(node, ast.Import) and ast.unparse(node) == "import wandb":
            text = "import paceline.wandb as wandb"
            yield script.source.replace(node, text, "rank 0 has the W&B run")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "wandb":
            text = "all ranks start a W&B run: import paceline.wandb as wandb instead"
            yield Remark(node.lineno, text, must=True)


def remark_import(
    script: Script, functions: Iterable[Function | None], run: str
) -> Iterator[Remark]:
    """Say which functions only work in the script itself: whoever imports it does not run its main
    block.
    """
    names = sorted(each.name for each in functions if each is not None)
    file = PurePath(script.source.name)
    if names and file.stem.isidentifier():
        text = f"{', '.join(names)} use{'s' * (len(names) == 1)} `{run}`, which exists only when "
        text += f"{file.name} runs as the script: whoever imports it has to set"
        yield Remark(0, f"{text} `{file.stem}.{run} = paceline.start()` first")


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


def _decisions(found: Training, run: str) -> Iterator[Remark]:
    """Branches that end a loop by what a rank has computed from its own batches."""
    script, own = found.script, _own_names(found)
    loops = {*found.step_loops, *found.epoch_loops}
    for node in script.nodes:
        if isinstance(node, (ast.If, ast.While)):
            leaves = [
                each for each in ast.walk(node) if isinstance(each, (ast.Break, ast.Continue))
            ]
            names = sorted(
                {name for name in _names(node.test) if (script.function_of(node), name) in own}
            )
            if names and loops & {node, *map(script.loop_around, leaves)}:
                text = (
                    f"if {names[0]} differs between ranks, some may continue while others wait for "
                )
                yield Remark(node.lineno, f"{text}them: use {run}.mean({names[0]})")
    for call in script.calls:
        if last_name(call) == "step" and call.args and isinstance(call.func, ast.Attribute):
            made = map(last_name, script.origins(call.func.value))
            if "ReduceLROnPlateau" in made:
                text = "each rank lowers the learning rate by its own value, if it has one: use "
                yield Remark(call.lineno, f"{text}{run}.mean({ast.unparse(call.args[0])})")


def _own_names(found: Training) -> set[tuple[object, str]]:
    """Return the names, with their functions, that training sets from its batches."""
    script = found.script
    own: set[tuple[object, str]] = set()
    kinds = (ast.Assign, ast.AugAssign)
    for loop in (each for each in found.step_loops if isinstance(each, ast.For)):
        function, read = script.function_of(loop), batch_names(loop)
        for node in (each for each in script.nodes if isinstance(each, kinds)):
            calls = [each for each in ast.walk(node.value) if isinstance(each, ast.Call)]
            inside = script.function_of(node) is function and bool(_names(node.value) & read)
            if inside or any(function in script.callees(each) for each in calls):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = {name for each in targets for name in _names(each)}
                read |= names if inside else set()
                own |= {(script.function_of(node), name) for name in names}
    return own


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _loader_uses(found: Training, run: str) -> Iterator[Remark]:
    """What else the script does with a loader of training, which has only a rank's part then."""
    script, loaders = found.script, set(found.loaders)
    for node in script.nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            direct = loaders & {*script.values(node.value.id, node)}
            if direct and node.attr not in ATTRIBUTES:
                text = f"a loader of {run}.loader has no `{node.attr}`: take it from the dataset"
                yield Remark(node.lineno, text, must=True)
    for call in script.calls:
        known = last_name(call) in (*WRAPPERS, "len", "next", "print") or script.callees(call)
        given = [each for each in call.args if isinstance(each, ast.Name)]
        if not known and any(loaders & {*script.values(each.id, each)} for each in given):
            text = "this receives a loader with only this rank's part of the data: pass it a "
            yield Remark(call.lineno, f"{text}DataLoader if it needs all of the data")
    for loop in found.reading:
        if not any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in ast.walk(loop)):
            text = "every rank evaluates all of the data, and gets the same result. To share it, "
            yield Remark(loop.iter.lineno, f"{text}use {run}.evaluate(...), and {run}.sum(...)")

    moved = any(last_name(call) in ("to", "cuda") for call in script.calls)
    placed = moved or any(each.arg == "device" for call in script.calls for each in call.keywords)
    kept = [loop.iter.lineno for loop in found.reading]
    kept += [call.lineno for call in copies(found)]
    if kept and not placed:
        text = (
            "the script never moves anything to a device: on a GPU, move what is used here, as in"
        )
        yield Remark(min(kept), f"{text} x.to({run}.device)", must=True)


def _forgotten(found: Training, run: str) -> Iterator[Remark]:
    """Variables that the loop carries from one epoch to the next, such as the best loss."""
    script = found.script
    loop = (found.epoch_loops or found.step_loops)[0]
    body = [node for each in loop.body for node in ast.walk(each)]
    stored = {
        ast.unparse(n): n for n in reversed(body) if isinstance(getattr(n, "ctx", None), ast.Store)
    }
    for call in (each for each in body if isinstance(each, ast.Call)):
        if isinstance(call.func, ast.Attribute) and call.func.attr == "append":
            stored.setdefault(ast.unparse(call.func.value), call)
    carried = []
    for text in stored:
        plain = text.removeprefix("self.").isidentifier()
        values = [each for each in script.values(text, loop) if _is_start(each)] if plain else []
        begun = [each.lineno for each in values if each.lineno < loop.lineno]
        anew = [each for each in values if script.statement(each) in loop.body]
        carried += [f"{text} (line {begun[0]})"] if begun and not anew else []
    if carried:
        text = (
            f"a resumed run resets {', '.join(sorted(carried)[:6])}: keep them in an object with "
        )
        text += f"state_dict and load_state_dict, and add it to {run}.resume(...)"
        yield Remark(loop.lineno, text)


def _is_start(node: ast.expr) -> bool:
    """Whether this is what a counter, a best value or a history begins with."""
    if isinstance(node, ast.UnaryOp):
        return _is_start(node.operand)
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (int, float)) and hasattr(node, "lineno")
    return ast.unparse(node) in ("[]", "{}") or ast.unparse(node).startswith(("float(", "math.inf"))


def _unassigned(found: Training) -> Iterator[Remark]:
    """Variables that only a loop over batches assigns, and that are read after it: it may have no
    steps left.
    """
    script = found.script
    for loop in found.step_loops:
        function, last = script.function_of(loop), loop.end_lineno or loop.lineno
        scope = [node for node in ast.walk(function or script.tree) if isinstance(node, ast.Name)]
        names = [node for node in scope if script.function_of(node) is function]
        stored = [node for node in names if isinstance(node.ctx, ast.Store)]
        inside = {node.id for node in stored if loop.lineno <= node.lineno <= last}
        outside = {node.id for node in stored if not loop.lineno <= node.lineno <= last}
        read = [node for node in names if node.lineno > last and node.id in inside - outside]
        if read:
            listed = ", ".join(dict.fromkeys(node.id for node in read))
            text = (
                f"only the loop of line {loop.lineno} assigns {listed}: a run that resumes after "
            )
            text += (
                "the last step of an epoch skips that loop and fails here. Assign a value before it"
            )
            yield Remark(min(node.lineno for node in read), text)
