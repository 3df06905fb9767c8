"""What makes a script train on several ranks: the session, the wrapped model, the loaders, the
loops and what is saved.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise

from paceline.tools.adopt.script import (
    FUNCTIONS,
    WRAPPERS,
    Function,
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
CLOSURE = "gives all ranks the loss and the gradients of all ranks"
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
    more = (f"run{number}" for number in range(2, 10_000))
    return next(name for name in (*NAMES, *more) if name not in script.names)


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
        what = "this DataLoader feeds training and other loops: make a separate loader for training"
        yield _must(call.lineno, f"{what}, with {run}.loader(dataset, batch_size=...)")
    for call in found.loaders:
        given, size = _given(call), _given(call).get("batch_size")
        starred = any(isinstance(each, ast.Starred) for each in call.args)
        if starred or "dataset" not in given or getattr(size, "value", 1) is None:
            text = (
                f"make this loader with {run}.loader(dataset, batch_size=...), of a dataset that "
            )
            yield _must(call.lineno, text + "returns samples, not batches")
        elif size is None and not given.keys() & {"batch_sampler", None}:
            text = "the batch size is 1 (torch's default), which ranks cannot share: raise it"
            yield _must(call.lineno, text)
    for model in found.models:
        place = _wrap_place(found, model)
        if place is None:
            text = f"call {run}.wrap(model) for each model before this: {WRAP}"
            yield _must(model.lineno, text)
    if found.step_loops and not found.models:
        text = f"no optimizer of model.parameters() was found: call {run}.wrap(model) before you "
        yield _must(found.backwards[0].lineno, text + "create it")
    for call in _closure_steps(script):
        if not isinstance(script.parents[call], ast.Expr):
            text = f"use {run}.update(optimizer, closure=closure), and {run}.backward(loss) in the "
            yield _must(call.lineno, text + f"closure: it {CLOSURE}")


def _loop_obstacles(found: Training, loop: LoopNode, run: str) -> Iterator[Remark]:
    script = found.script
    if isinstance(loop, ast.While) or range_of(loop) or not loaders_of(script, loop):
        text = "this training loop does not read a DataLoader of this script, so every rank would "
        text += (
            f"train on all of the data: write `for batch in {run}.steps(loader):`, with a loader"
        )
        yield _must(loop.lineno, f"{text} of {run}.loader(dataset, batch_size=...)")
        return
    inner = unwrap(loop.iter)
    if unwrap(loop.iter, tuple({*WRAPPERS} - {"list"})) is not inner:
        text = (
            f"this reads all batches before the first step: iterate over {run}.steps(loader) itself"
        )
        yield _must(loop.lineno, text)
    bar = _bar(script, inner)
    if bar is not None and script.loop_around(bar) is not script.loop_around(loop):
        text = (
            f"create this in each epoch, around {run}.steps(loader): it reads {run}.steps only once"
        )
        yield _must(bar.lineno, text)
    for call in found.backwards:
        above = list(script.ancestors(call))
        around = above[: above.index(loop)] if loop in above else []
        tests = [ast.unparse(each.test) for each in around if isinstance(each, ast.If)]
        if any(word in test for test in tests for word in ("phase", "split", "mode", "train")):
            text = "this loop trains and evaluates: use a separate loop for each, and train over "
            yield _must(loop.lineno, f"{text}{run}.steps(loader)")


def _must(line: int, text: str) -> Remark:
    return Remark(line, text, must=True)


def _bar(script: Script, node: ast.expr) -> ast.Call | None:
    """Return the progress bar that a loop reads by its name: `progress = tqdm(loader)`."""
    values = script.values(node.id, node) if isinstance(node, ast.Name) else []
    bars = [each for each in values if isinstance(each, ast.Call) and unwrap(each) is not each]
    return bars[0] if bars else None


# -- the session


class Entry:
    """The statement at the top before which the session starts: the first that needs it."""

    def __init__(self, script: Script, needing: set[ast.AST]) -> None:
        self.script = script
        self.is_seeded = any(last_name(call) in SEEDS for call in script.calls)
        holders = {script.function_of(node) for node in needing} - {None}
        order = list(self._executed())
        self.statement: ast.stmt | None = None
        for statement in order:
            if needing & set(_walk_flat(statement)) or script.reachable([statement]) & holders:
                self.statement = statement
                break
        called = [each for each in order if isinstance(each, ast.Expr) and not _is_text(each)]
        if self.statement is None and called:  # `app()` calls a function that is decorated for it
            self.statement = called[-1]
        if self.statement is not None and not self.is_seeded:
            # without a seed, the data may be made up from the first line on
            block = script.parents[self.statement]
            beside = [each for each in order if script.parents[each] is block]
            self.statement = next(each for each in beside if not _is_text(each))

    def _executed(self) -> Iterator[ast.stmt]:
        """Yield the statements that run at the top, in order, with those of the main block."""
        guard = self.script.guard
        for statement in self.script.tree.body:
            if statement is guard:
                yield from guard.body
            elif not isinstance(statement, (*FUNCTIONS, ast.ClassDef, ast.Import, ast.ImportFrom)):
                yield statement

    def edits(self, run: str) -> Iterator[Edit]:
        assert self.statement is not None
        source, body = self.script.source, self.script.tree.body
        start = f"{run} = paceline.start({'' if self.is_seeded else 'seed=0'})"
        imports = [each for each in body if isinstance(each, (ast.Import, ast.ImportFrom))]
        if imports:
            last = imports[0]  # of the first block of imports
            for one, two in pairwise(body):
                if one is last and isinstance(two, (ast.Import, ast.ImportFrom)):
                    last = two
            yield source.line_after(last, "import paceline", IMPORT)
        else:
            first = body[1] if _is_text(body[0]) and len(body) > 1 else body[0]
            yield source.line_before(first, "import paceline", IMPORT)
        yield source.line_before(self.statement, start, START if self.is_seeded else START + SEED)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _walk_flat(node: ast.AST) -> Iterator[ast.AST]:
    """Walk through a statement, but not into functions and classes that it defines."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (*FUNCTIONS, ast.ClassDef)):
            yield from _walk_flat(child)


# -- models and loaders


def _wrap_place(found: Training, model: ast.expr) -> ast.stmt | None:
    """Return the statement before which a model is wrapped: the one that uses its parameters, or
    the `if` around it that chooses between optimizers. None if it has no value there for certain.
    """
    script = found.script
    place = statement = script.statement(model)
    text = ast.unparse(model)
    bound = [each.target for each in ast.walk(statement) if isinstance(each, ast.comprehension)]
    root = text.split(".", maxsplit=1)[0]
    if root in [last_name(part) for each in bound for part in ast.walk(each)]:
        return None
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
    compiled = [call for call in script.calls_of("torch.compile") if call.args]
    inner: set[ast.Call] = set()
    for model in found.models:
        place, text, options = _wrap_place(found, model), source.text_of(model), ""
        for call in (each for each in compiled if each in script.origins(model)):
            inner.add(call)
            named = ", ".join(source.text_of(each) for each in call.keywords)
            options = f", compile=dict({named})" if named else ", compile=True"
        # An assignment would make a name of the module local.
        is_global = isinstance(model, ast.Name) and script.scope(model.id, model) is not (
            script.function_of(model)
        )
        target = "" if is_global or text == "self" else f"{text} = "
        assert place is not None
        yield source.line_before(place, f"{target}{run}.wrap({text}{options})", WRAP)
    parallel = [call for call in script.calls_of(*PARALLEL) if call.args]
    for call in (*parallel, *inner):
        yield from source.unwrap(call, call.args[0], f"{run}.wrap does this, on all ranks")
    why = f"{run}.wrap does not put the model inside another module"
    for node in script.nodes if parallel else ():
        is_inner = isinstance(node, ast.Attribute) and node.attr == "module"
        if (
            isinstance(node, ast.Attribute)
            and is_inner
            and script.origins(node.value) & {*parallel}
        ):
            yield from source.unwrap(node, node.value, why)


def _given(call: ast.Call) -> dict[str | None, ast.expr]:
    given: dict[str | None, ast.expr] = dict(zip(POSITIONAL, call.args, strict=False))
    return given | {each.arg: each.value for each in call.keywords}


def change_loader(found: Training, call: ast.Call, run: str) -> Iterator[Edit]:
    source, given = found.script.source, _given(call)
    yield source.replace(call.func, f"{run}.loader", LOADER)
    for name, value in list(zip(POSITIONAL, call.args, strict=False))[1:]:
        yield source.insert(source.start(value), f"{name}=", LOADER)
    for keyword in call.keywords:
        if keyword.arg == "generator":
            text = f"seed={source.text_of(keyword.value)}.initial_seed()"
            yield source.replace(keyword, text, "all ranks must draw the same order")
    defaults = [] if given.keys() & {"shuffle", "sampler"} else ["shuffle"]
    defaults += [] if "drop_last" in given else ["drop_last"]
    if "batch_sampler" in given or _is_stream(found.script, given["dataset"]) or not defaults:
        return
    why = DEFAULTS.format(run=run)
    stars = [each.value for each in call.keywords if each.arg is None]
    if stars:
        first = "".join(f'"{each}": False, ' for each in defaults)
        yield source.replace(stars[0], f"{{{first}**{source.text_of(stars[0])}}}", why)
    else:
        yield source.add_argument(call, ", ".join(f"{each}=False" for each in defaults), why)


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
        yield source.insert(source.start(inner), f"{run}.steps(", STEPS)
        yield source.insert(source.end(inner), ")", STEPS)
    loops = found.epoch_loops
    counted = _counted(found, run) if len(loops) == 1 and not script.repeats(loops[0]) else []
    once = not loops and len(found.step_loops) == 1 and not script.repeats(found.step_loops[0])
    names = _saved(found, (loops or found.step_loops)[0]) if counted or once else None
    loop = (loops or found.step_loops)[0]
    if names is None:
        text = (
            "nothing is resumed: this is not one loop over `range(n)`, or what it trains may not "
        )
        text += f"exist before it. To resume, count with {run}.epochs(n), from 0, and call "
        yield Remark(loop.lineno, f"{text}{run}.resume(model=model, optimizer=optimizer) before it")
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
    if first == 0 and not isinstance(last, ast.Starred):
        return [source.replace(call, f"{run}.epochs({source.text_of(last)})", EPOCHS)]
    count = None
    if first == 1 and isinstance(last, ast.Constant):
        count = str(int(str(last.value)) - 1)
    elif first == 1 and isinstance(last, ast.BinOp) and isinstance(last.op, ast.Add):
        sides = (last.left, last.right)
        ones = [each for each in sides if getattr(each, "value", None) == 1]
        rest = [each for each in sides if each not in ones[:1]]
        count = source.text_of(rest[0]) if ones else None
    if count is None:
        return []
    name = source.text_of(loop.target)
    edits = [source.replace(call, f"{run}.epochs({count})", EPOCHS)]
    nodes = [node for node in found.script.nodes if isinstance(node, (ast.Name, ast.Attribute))]
    is_read = any(ast.unparse(node) == name and node is not loop.target for node in nodes)
    if is_read or isinstance(loop.target, ast.Attribute):
        why = f"{run}.epochs counts from 0, and this loop from 1"
        edits.append(source.line_before(loop.body[0], f"{name} += 1", why))
    return edits


def copies(found: Training) -> list[ast.Call]:
    """Return the copies of trained models, such as averages of their weights."""
    trained = {call for model in found.models for call in found.script.origins(model)}
    calls = [call for call in found.script.calls_of(*COPIES) if call.args]
    return [call for call in calls if found.script.origins(call.args[0]) & trained]


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
    wanted += [{each} for each in found.optimizers]
    wanted += [{each} for each in script.calls if _is_scheduler(script.dotted(each.func))]
    wanted += [{each} for each in (*script.calls_of(*SCALERS), *copies(found))]
    names = [next((text for text in made if made[text] & each), None) for each in wanted]
    read = [next((text for text in made if made[text] & {each}), None) for each in found.loaders]
    if not all(names):
        return None
    return list(dict.fromkeys(each for each in (*names, *read) if each))


def _is_scheduler(name: str) -> bool:
    helps = name.startswith("transformers.") and "schedule" in name
    return helps or name.startswith("torch.optim.lr_scheduler.")


# -- the loss


def _closure_steps(script: Script) -> list[ast.Call]:
    """Return the calls of `optimizer.step(closure)`."""
    calls = [call for call in script.calls if last_name(call) == "step" and call.args]
    return [call for call in calls if last_name(call.args[0]) in script.functions]


def _change_backwards(found: Training, run: str) -> Iterator[Edit | Remark]:
    script, source = found.script, found.script.source
    short = not all(
        getattr(_given(call).get("drop_last"), "value", None) is True for call in found.loaders
    )
    closures: set[Function | None] = set()
    for call in _closure_steps(script):
        assert isinstance(call.func, ast.Attribute)
        closure = last_name(call.args[0])
        closures.add(script.functions[closure])
        text = f"{run}.update({source.text_of(call.func.value)}, closure={closure})"
        yield source.replace(call, text, CLOSURE)
    for call in found.backwards:
        loss, closed = loss_of(call), script.function_of(call) in closures
        assert loss is not None
        plain = not call.args or call.args == [loss]  # no gradient is given
        if (short or closed) and plain and {each.arg for each in call.keywords} <= {"retain_graph"}:
            options = "".join(f", {source.text_of(each)}" for each in call.keywords)
            why = CLOSURE if closed else SHORT
            yield source.insert(source.start(call), f"{run}.backward(", why)
            if call.args:
                yield Edit(source.start(call), source.start(loss), "", why)
            yield Edit(source.end(loss), source.end(call), f"{options})", why)
        elif short:
            text = "this backward needs the same number of samples on all ranks: use drop_last=True"
            yield Remark(call.lineno, text)
        is_scaled = isinstance(loss, ast.Call) and last_name(loss) == "scale" and loss.args
        name = loss.args[0] if isinstance(loss, ast.Call) and is_scaled else loss
        statement = script.statement(call)
        if isinstance(name, ast.Name) and isinstance(statement, ast.Expr) and not closed:
            yield source.line_after(statement, f"{run}.log({name.id}={name.id})", LOG)
