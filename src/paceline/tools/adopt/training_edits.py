"""What makes a script train on several ranks: the session, the wrapped model, the loaders, the
loops and what is saved.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from paceline.tools.adopt.script import (
    FUNCTIONS,
    WRAPPERS,
    LoopNode,
    Script,
    assigns,
    last_name,
    parameters,
    unwrap,
)
from paceline.tools.adopt.source_edits import Edit, Remark
from paceline.tools.adopt.training import Training, loaders_of, loss_of, range_of

NAMES = ("run", "session", "paceline_run")
SEEDS = ("manual_seed", "manual_seed_all", "seed_everything", "set_seed", "fix_seed", "seed_all")
START = "finds this rank, its device and the other ranks; it ends with the script"
SEED = "; the seed makes all ranks draw the same numbers, until they train"
IMPORT = "the import that the lines below need"
LOADER = "each rank reads its part of every batch; batch_size remains the global batch size"
DEFAULTS = "as in torch: by default, {run}.loader shuffles and drops a short last batch"
WRAP = "moves the model to this rank's device, and averages gradients over the ranks"
STEPS = (
    "each iteration is one step; between steps, the run saves, stops if requested, and reports "
    "its progress"
)
EPOCHS = "a resumed run continues with the epoch that was interrupted"
RESUME = "saves these, and loads the newest checkpoint, if there is one"
SHORT = "weighs the ranks by their samples in a short last batch"
LOG = "the mean over all ranks, for `paceline show`, `top` and `ui`"
POSITIONAL = (
    *("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers"),
    *("collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn"),
)
PARALLEL = ("torch.nn.DataParallel", "torch.nn.parallel.DataParallel")
SCALERS = ("torch.amp.GradScaler", "torch.cuda.amp.GradScaler")
COPIES = ("copy.deepcopy", "torch.optim.swa_utils.AveragedModel")


def free_name(script: Script) -> str:
    """Return a name for the run that the script does not use."""
    return next((name for name in NAMES if name not in script.names), "run_of_paceline")


# -- what a person has to do first


def obstacles(found: Training, run: str) -> Iterator[Remark]:
    """Say why a script cannot be changed with certainty."""
    script = found.script
    if not found.step_loops:
        line = found.backwards[0].lineno
        yield _must(
            line, f"this trains outside of a loop: write `for batch in {run}.steps(loader):`"
        )
    for loop in found.step_loops:
        yield from _loop_obstacles(found, loop, run)
    for call in found.shared:
        yield _must(
            call.lineno,
            "this DataLoader feeds training and other loops: make a separate loader for training, "
            f"with {run}.loader(dataset, batch_size=...)",
        )
    for call in found.loaders:
        given, size = _given(call), _given(call).get("batch_size")
        starred = given.keys() & {None, "generator"} or any(
            isinstance(each, ast.Starred) for each in call.args
        )
        if starred or "dataset" not in given or getattr(size, "value", 1) is None:
            yield _must(
                call.lineno,
                f"make this loader with {run}.loader(dataset, batch_size=...), of a dataset that "
                "returns samples, not batches",
            )
        elif size is None and not given.keys() & {"batch_sampler"}:
            yield _must(
                call.lineno,
                "the batch size is 1 (torch's default), which ranks cannot share: raise it",
            )
    for model in found.models:
        place = _wrap_place(found, model)
        if place is None:
            yield _must(model.lineno, f"call {run}.wrap(model) for each model before this: {WRAP}")
    if found.step_loops and not found.models:
        yield _must(
            found.backwards[0].lineno,
            f"no optimizer of model.parameters() was found: call {run}.wrap(model) before you "
            "create it",
        )
    for call in script.calls_of(*PARALLEL):
        yield _must(
            call.lineno,
            f"remove this, and `.module` of its result: {run}.wrap does it, on all ranks",
        )
    for call in script.calls_of("torch.compile"):
        yield _must(
            call.lineno,
            f"compile with {run}.wrap(model, compile=True) instead, before the optimizer",
        )
    for call in script.calls:
        if last_name(call) == "step" and call.args and last_name(call.args[0]) in script.functions:
            yield _must(
                call.lineno,
                f"use {run}.update(optimizer, closure=closure), and {run}.backward(loss) in the "
                "closure, so that all ranks get the loss and the gradients of all ranks",
            )


def _loop_obstacles(found: Training, loop: LoopNode, run: str) -> Iterator[Remark]:
    script = found.script
    if isinstance(loop, ast.While) or range_of(loop) or not loaders_of(script, loop):
        yield _must(
            loop.lineno,
            "this training loop does not read a DataLoader of this script, so every rank would "
            f"train on all of the data: write `for batch in {run}.steps(loader):`, with a loader "
            f"of {run}.loader(dataset, batch_size=...)",
        )
        return
    inner = unwrap(loop.iter)
    reads_all = unwrap(loop.iter, tuple({*WRAPPERS} - {"list"})) is not inner
    bar = _bar(script, inner)
    apart = bar is not None and script.loop_around(bar) is not script.loop_around(loop)
    if reads_all or apart:
        yield _must(loop.lineno, f"iterate over {run}.steps(loader) itself, anew in each epoch")
    for call in found.backwards:
        above = list(script.ancestors(call))
        around = above[: above.index(loop)] if loop in above else []
        tests = [ast.unparse(each.test) for each in around if isinstance(each, ast.If)]
        if any(word in test for test in tests for word in ("phase", "split", "mode", "train")):
            yield _must(
                loop.lineno,
                "this loop trains and evaluates: use a separate loop for each, and train over "
                f"{run}.steps(loader)",
            )


def _bar(script: Script, node: ast.expr) -> ast.expr | None:
    """Return the progress bar that a loop reads by its name: `progress = tqdm(loader)`."""
    values = script.values(node.id, node) if isinstance(node, ast.Name) else []
    return next((each for each in values if unwrap(each) is not each), None)


def _must(line: int, text: str) -> Remark:
    return Remark(line, text, must=True)


# -- the session


def first_statement(found: Training) -> ast.stmt | None:
    """Return the statement before which the session starts: the first that runs in the main block,
    or in the module if it has none, or trains outside of it.
    """
    script, guard = found.script, found.script.guard
    body = script.tree.body
    nodes = [*found.loaders, *found.models, *found.step_loops, *found.epoch_loops]
    outside = [each for each in nodes if script.function_of(each) is None]
    if guard is not None and all(guard in script.ancestors(each) for each in outside):
        return guard.body[0]
    last = _last_import(script)
    rest = body[body.index(last) + 1 :] if last is not None else body
    kinds = (*FUNCTIONS, ast.ClassDef, ast.Import, ast.ImportFrom)
    return next((each for each in rest if not isinstance(each, kinds) and not _is_text(each)), None)


def start_session(script: Script, first: ast.stmt, run: str) -> Iterator[Edit]:
    source, last = script.source, _last_import(script)
    is_seeded = any(last_name(call) in SEEDS for call in script.calls)
    if last is not None:
        yield source.line_after(last, "import paceline", IMPORT)
    else:
        yield source.line_before(first, "import paceline", IMPORT)
    start = f"{run} = paceline.start({'' if is_seeded else 'seed=0'})"
    yield source.line_before(first, start, START if is_seeded else START + SEED)


def _last_import(script: Script) -> ast.stmt | None:
    """Return the last statement of the first block of imports."""
    kinds = (ast.Import, ast.ImportFrom)
    last: ast.stmt | None = None
    for statement in script.tree.body:
        if isinstance(statement, kinds):
            last = statement
        elif last is not None:
            break
    return last


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


# -- models and loaders


def _wrap_place(found: Training, model: ast.expr) -> ast.stmt | None:
    """Return the statement before which a model is wrapped: the one that uses its parameters, or
    the `if` around it that chooses between optimizers. None if it has no value there for certain.
    """
    script = found.script
    place = statement = script.statement(model)
    text = ast.unparse(model)
    root = text.split(".", maxsplit=1)[0]
    is_chosen = False  # whether a branch makes the model, and another may make another one
    for each in script.ancestors(statement):
        if isinstance(each, (*FUNCTIONS, ast.For, ast.While, ast.With)):
            break
        if isinstance(each, (ast.If, ast.Try)) and each is not script.guard:
            is_chosen = is_chosen or text in map(ast.unparse, _stored(each))
            place = place if is_chosen else each
    known = text if text.startswith("self.") else root
    if (is_chosen and len(found.optimizers) > 1) or not assigns_before(script, place, known):
        return None
    return place


def _stored(node: ast.AST) -> list[ast.expr]:
    parts = (each for each in ast.walk(node) if isinstance(each, (ast.Name, ast.Attribute)))
    return [each for each in parts if isinstance(each.ctx, ast.Store)]


def assigns_before(script: Script, statement: ast.stmt, text: str) -> bool:
    """Whether a name certainly has a value when a statement runs: its own function, a parameter,
    or the module gives it, or `__init__` an attribute.
    """
    scope = script.scope(text, statement)
    if isinstance(scope, ast.ClassDef):
        made = [each for each in scope.body if getattr(each, "name", "") == "__init__"]
        return any(assigns(each, text) for init in made for each in getattr(init, "body", []))
    if isinstance(scope, FUNCTIONS) and text in parameters(scope):
        return True
    if scope is not script.function_of(statement):
        guard = script.guard
        body = scope.body if scope else [*script.tree.body, *(guard.body if guard else [])]
        return any(assigns(each, text) for each in body)
    child: ast.AST = statement
    for each in script.ancestors(statement):
        for body in (getattr(each, name, []) for name in ("body", "orelse", "finalbody")):
            before = body[: body.index(child)] if isinstance(body, list) and child in body else []
            if any(assigns(other, text) for other in before):
                return True
        if each is scope:
            break
        child = each
    return False


def wrap_models(found: Training, run: str) -> Iterator[Edit]:
    script, source = found.script, found.script.source
    for model in found.models:
        place, text = _wrap_place(found, model), source.text_of(model)
        # An assignment would make a name of the module local.
        is_global = isinstance(model, ast.Name) and script.scope(model.id, model) is not (
            script.function_of(model)
        )
        target = "" if is_global or text == "self" else f"{text} = "
        assert place is not None
        yield source.line_before(place, f"{target}{run}.wrap({text})", WRAP)


def _given(call: ast.Call) -> dict[str | None, ast.expr]:
    given: dict[str | None, ast.expr] = dict(zip(POSITIONAL, call.args, strict=False))
    return given | {each.arg: each.value for each in call.keywords}


def change_loader(found: Training, call: ast.Call, run: str) -> Iterator[Edit]:
    source, given = found.script.source, _given(call)
    yield source.replace(call.func, f"{run}.loader", LOADER)
    for name, value in list(zip(POSITIONAL, call.args, strict=False))[1:]:
        yield Edit(source.start(value), source.start(value), f"{name}=", LOADER)
    defaults = [] if given.keys() & {"shuffle", "sampler"} else ["shuffle"]
    defaults += [] if "drop_last" in given else ["drop_last"]
    if "batch_sampler" in given or _is_stream(found.script, given["dataset"]) or not defaults:
        return
    text = ", ".join(f"{each}=False" for each in defaults)
    yield source.add_argument(call, text, DEFAULTS.format(run=run))


def _is_stream(script: Script, dataset: ast.expr) -> bool:
    """Whether a dataset is iterable-style: a class of this script says so."""
    owners = [script.classes.get(last_name(call)) for call in script.origins(dataset)]
    bases = [base for owner in owners if owner is not None for base in owner.bases]
    return any(last_name(base) == "IterableDataset" for base in bases)


# -- loops


def change_loops(found: Training, run: str) -> Iterator[Edit | Remark]:
    script, source = found.script, found.script.source
    for loop in found.step_loops:
        assert isinstance(loop, ast.For)
        inner = unwrap(loop.iter)
        inner = unwrap(_bar(script, inner) or inner)
        yield Edit(source.start(inner), source.start(inner), f"{run}.steps(", STEPS)
        yield Edit(source.end(inner), source.end(inner), ")", STEPS)
    loops = found.epoch_loops
    counted = _counted(found, run) if len(loops) == 1 and not script.repeats(loops[0]) else []
    once = not loops and len(found.step_loops) == 1 and not script.repeats(found.step_loops[0])
    names = _saved(found, (loops or found.step_loops)[0]) if counted or once else None
    loop = (loops or found.step_loops)[0]
    if names is None:
        yield Remark(
            loop.lineno,
            "nothing is resumed: this is not one loop over `range(n)`, or what it trains may not "
            f"exist before it. To resume, count with {run}.epochs(n), from 0, and call "
            f"{run}.resume(model=model, optimizer=optimizer) before it",
        )
    else:
        arguments = ", ".join(f"{name.rpartition('.')[2]}={name}" for name in names)
        yield source.line_before(loop, f"{run}.resume({arguments})", RESUME)
        yield from counted
    yield from _change_backwards(found, run)


def _counted(found: Training, run: str) -> list[Edit]:
    """Let the run count the epochs, if the loop counts all of them by one."""
    loop, source = found.epoch_loops[0], found.script.source
    call = range_of(loop)
    if call is None or call.keywords or len(call.args) > 2 or not isinstance(loop, ast.For):
        return []
    if not isinstance(loop.target, (ast.Name, ast.Attribute)):
        return []
    first = getattr(call.args[0], "value", None) if len(call.args) == 2 else 0
    last = call.args[-1]
    count = source.text_of(last)
    if first not in (0, 1) or isinstance(last, ast.Starred):
        return []
    if first == 0:
        return [source.replace(call, f"{run}.epochs({count})", EPOCHS)]
    if isinstance(last, ast.BinOp) and ast.unparse(last).endswith(" + 1"):
        count = source.text_of(last.left)
    else:
        count = f"{count} - 1"
    why = f"{run}.epochs counts from 0, and this loop from 1"
    more = source.line_before(loop.body[0], f"{source.text_of(loop.target)} += 1", why)
    return [source.replace(call, f"{run}.epochs({count})", EPOCHS), more]


def _saved(found: Training, loop: LoopNode) -> list[str] | None:
    """Return the names of what training changes; None if one of them has no name before the loop,
    or not in every case.
    """
    script = found.script
    function, owner = script.function_of(loop), script.class_of(loop)
    texts = [*parameters(function)] if function else []
    texts += [each for each in script.assigned_in(function) if each not in texts]
    if owner is not None:
        texts += [each for each in script.assigned_in(owner) if each.startswith("self.")]
    texts += script.assigned_in(None) if function else []
    made = {}
    for text in texts:
        values = script.values(text, loop)
        maybe_none = any(isinstance(each, ast.Constant) and each.value is None for each in values)
        if text not in made and not maybe_none and assigns_before(script, loop, text):
            node = ast.parse(text, mode="eval").body
            script.parents.update(dict.fromkeys(ast.walk(node), loop))
            made[text] = script.origins(node)
    wanted = [script.origins(model) for model in found.models]
    trained = {call for each in wanted for call in each}
    copies = [call for call in script.calls_of(*COPIES) if call.args]
    copies = [call for call in copies if script.origins(call.args[0]) & trained]
    known = ("torch.optim.lr_scheduler.", "transformers.get_")
    schedulers = [each for each in script.calls if script.dotted(each.func).startswith(known)]
    kept = [*found.optimizers, *schedulers, *script.calls_of(*SCALERS), *copies]
    wanted += [{each} for each in kept]
    names = [next((text for text in made if made[text] & each), None) for each in wanted]
    read = [next((text for text in made if made[text] & {each}), None) for each in found.loaders]
    if not all(names):
        return None
    return list(dict.fromkeys(each for each in (*names, *read) if each))


# -- the loss


def _change_backwards(found: Training, run: str) -> Iterator[Edit | Remark]:
    script, source = found.script, found.script.source
    drops = [getattr(_given(call).get("drop_last"), "value", None) for call in found.loaders]
    short = not all(each is True for each in drops)
    for call in found.backwards:
        loss = loss_of(call)
        assert loss is not None
        plain = not call.args or call.args == [loss]  # no gradient is given
        if short and plain and {each.arg for each in call.keywords} <= {"retain_graph"}:
            options = "".join(f", {source.text_of(each)}" for each in call.keywords)
            yield Edit(source.start(call), source.start(loss), f"{run}.backward(", SHORT)
            yield Edit(source.end(loss), source.end(call), f"{options})", SHORT)
        elif short:
            text = "this backward needs the same number of samples on all ranks: use drop_last=True"
            yield Remark(call.lineno, text)
        is_scaled = isinstance(loss, ast.Call) and last_name(loss) == "scale" and loss.args
        name = loss.args[0] if isinstance(loss, ast.Call) and is_scaled else loss
        statement = script.statement(call)
        if isinstance(name, ast.Name) and isinstance(statement, ast.Expr):
            yield source.line_after(statement, f"{run}.log({name.id}={name.id})", LOG)
