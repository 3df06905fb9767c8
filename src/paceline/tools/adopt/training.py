"""The training in a script: its loops, the loaders that they read, the models and what optimizes
them.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field

from paceline.tools.adopt.script_analysis import LoopNode, Script
from paceline.tools.adopt.value_origins import Origins, unwrap

LOADERS = ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader")
_OPTIMIZER = re.compile(
    r"(Adam\w*|\w*Adam|SGD|Lion|LBFGS|Adafactor|Adagrad|Adadelta|RMSprop|LAMB|Muon|\w*Optimizer)$"
)


@dataclass
class Training:
    """What was found. `models` are the expressions whose parameters an optimizer gets, with the
    statement to be at.
    """

    script: Script
    origins: Origins
    backwards: list[ast.Call] = field(default_factory=list)
    step_loops: list[LoopNode] = field(default_factory=list)
    epoch_loops: list[LoopNode] = field(default_factory=list)
    # loops that train in one phase, and evaluate in another
    mixed: list[LoopNode] = field(default_factory=list)
    outer_loops: list[LoopNode] = field(default_factory=list)  # around those of epochs
    nested: bool = False  # whether something repeats the epochs, as in cross-validation
    loaders: list[ast.Call] = field(default_factory=list)  # that training loops read
    shared: list[ast.Call] = field(default_factory=list)  # that other loops read, too
    # other loops over loaders
    reading: list[ast.For | ast.comprehension] = field(default_factory=list)
    optimizers: list[ast.Call] = field(default_factory=list)
    models: list[tuple[ast.expr, ast.stmt]] = field(default_factory=list)


def find_training(script: Script) -> Training:
    found = Training(script, Origins(script))
    found.backwards = [call for call in script.calls if is_backward(call)]
    found.step_loops = _unique(
        loop for call in found.backwards for loop in _step_loops(found, call, 0)
    )
    found.epoch_loops = _unique(
        loop for each in found.step_loops for loop in _loops_around(script, each, 0)
    )
    found.outer_loops = _unique(
        loop for each in found.epoch_loops for loop in _loops_around(script, each, 0)
    )
    found.nested = any(map(script.repeats, found.epoch_loops))
    found.mixed = [loop for loop in found.step_loops if _is_mixed(found, loop)]
    _find_loaders(found)
    _find_models(found)
    return found


def is_backward(node: ast.AST) -> bool:
    """Whether this is `loss.backward()`, not that of a framework, whose `backward` gets the
    loss.
    """
    return loss_of(node) is not None


def loss_of(node: ast.AST) -> ast.expr | None:
    """Return the loss of `loss.backward()` or `torch.autograd.backward(loss)`; None for other
    nodes.
    """
    is_call = (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "backward"
    )
    if not is_call or not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    if ast.unparse(node.func.value).endswith("autograd") and node.args:
        return node.args[0]
    given = ast.unparse(node.args[0]) if node.args else "torch.ones"
    return node.func.value if given.startswith(("torch.ones", "torch.tensor")) else None


def is_optimizer(script: Script, call: ast.Call) -> bool:
    name = script.dotted(call.func)
    if name.startswith("torch.optim.lr_scheduler") or not (call.args or call.keywords):
        return False
    if name.startswith("torch.optim."):
        return True
    last = name.rpartition(".")[2] or getattr(call.func, "id", "")
    chosen = isinstance(call.func, ast.Call) and "optim" in script.source.text_of(call.func)
    return chosen or (_OPTIMIZER.match(last) is not None and bool(_parameter_calls(call)))


def _is_mixed(found: Training, loop: LoopNode) -> bool:
    """Whether a loop trains only if a variable says so: `if phase == "train": loss.backward()`."""
    for call in found.backwards:
        above = list(found.script.ancestors(call))
        if loop in above:
            tests = [each.test for each in above[: above.index(loop)] if isinstance(each, ast.If)]
            if any(re.search(r"phase|split|mode|train", ast.unparse(test)) for test in tests):
                return True
    return False


def _loops_around(script: Script, node: ast.AST, depth: int) -> list[LoopNode]:
    """Return the innermost loops around a node: in its function, else around the calls of that
    function.
    """
    loop = script.loop_around(node)
    function = script.function_of(node)
    if loop is not None or function is None or depth > 8:
        return [loop] if loop is not None else []
    return [
        each for call in script.uses(function) for each in _loops_around(script, call, depth + 1)
    ]


def _step_loops(found: Training, node: ast.AST, depth: int) -> list[LoopNode]:
    """Return the innermost loops around a node that read a DataLoader; the innermost of all if
    none does.
    """
    script, made = found.script, set(found.script.calls_of(*LOADERS))
    loops: list[LoopNode] = []
    while (loop := script.loop_around(loops[-1] if loops else node)) is not None:
        loops.append(loop)
    reading = [loop for loop in loops if _reads(found, loop, made)]
    function = script.function_of(node)
    if reading or function is None or depth > 8:
        return (reading or loops)[:1]
    outer = [each for call in script.uses(function) for each in _step_loops(found, call, depth + 1)]
    return [loop for loop in outer if _reads(found, loop, made)] or loops[:1] or outer


def _reads(found: Training, loop: LoopNode, loaders: set[ast.Call]) -> bool:
    return isinstance(loop, ast.For) and bool(found.origins.of(loop.iter) & loaders)


def _find_loaders(found: Training) -> None:
    script, origins = found.script, found.origins
    made = set(script.calls_of(*LOADERS))
    read = [loop for loop in found.step_loops if isinstance(loop, ast.For)]
    used = {
        call for loop in read for source in _iterated(loop) for call in origins.of(source)
    } & made
    loops = [node for node in script.nodes if isinstance(node, (ast.For, ast.comprehension))]
    others = [node for node in loops if node not in found.step_loops]
    elsewhere = set()
    for loop in others:
        if calls := origins.of(loop.iter) & made:
            found.reading.append(loop)
            elsewhere |= calls
    for each in found.mixed:
        elsewhere |= origins.of(each.iter) & made if isinstance(each, ast.For) else set()
    found.loaders = sorted(used - elsewhere, key=lambda call: call.lineno)
    found.shared = sorted(used & elsewhere, key=lambda call: call.lineno)


def _iterated(loop: ast.For) -> list[ast.expr]:
    """Return what a loop reads: several for `zip`."""
    node: ast.expr = loop.iter
    while isinstance(node, ast.Call) and node.args:
        if getattr(node.func, "id", "") == "zip":
            return [unwrap(each) for each in node.args]
        inner = unwrap(node)
        if inner is node:
            break
        node = node.args[0]
    return [node]


def _find_models(found: Training) -> None:
    script = found.script
    found.optimizers = [call for call in script.calls if is_optimizer(script, call)]
    seen: list[set[ast.Call]] = []
    texts: set[tuple[object, str]] = set()
    for optimizer in found.optimizers:
        for call in _parameters_for(found, optimizer):
            model = _model_of(found, call)
            made = found.origins.of(model)
            key = (script.function_of(call), script.source.text_of(model))
            if key in texts or any(made & other for other in seen):
                continue
            texts.add(key)
            seen.append(
                {call for call in made if not script.callees(call) or _is_class(script, call)}
            )
            found.models.append((model, script.statement(call)))


def _is_class(script: Script, call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id in script.classes


def _parameters_for(found: Training, optimizer: ast.Call) -> list[ast.Call]:
    """Return the calls of `parameters()` for an optimizer: among its arguments, or in what these
    were assigned.
    """
    given = [
        *optimizer.args[:1],
        *(each.value for each in optimizer.keywords if each.arg == "params"),
    ]
    for _ in range(4):  # groups of lists of parameters
        calls = [call for each in given for call in _parameter_calls(each)]
        if calls:
            return calls
        names = [node for each in given for node in ast.walk(each) if isinstance(node, ast.Name)]
        given = [
            value
            for name in names
            for value in found.origins.values(name.id, name)
            if value is not optimizer
        ]
    return []


def _parameter_calls(node: ast.AST) -> list[ast.Call]:
    return [
        each
        for each in ast.walk(node)
        if isinstance(each, ast.Call)
        and isinstance(each.func, ast.Attribute)
        and each.func.attr in ("parameters", "named_parameters")
    ]


def _model_of(found: Training, call: ast.Call) -> ast.expr:
    """Return the whole model of `model.head.parameters()`: `model`, or `self.model` in a class
    that is none.
    """
    assert isinstance(call.func, ast.Attribute)
    chain: list[ast.expr] = [call.func.value]
    while isinstance(chain[-1], ast.Attribute):
        chain.append(chain[-1].value)
    root = chain[-1]
    if not isinstance(root, ast.Name):
        return chain[0]
    owner = found.script.class_of(call)
    if root.id == "self" and owner is not None:
        return root if found.script.is_module_class(owner) else chain[max(0, len(chain) - 2)]
    plain = [each for each in found.origins.of(root) if _is_plain_object(found.script, each)]
    return chain[max(0, len(chain) - 2)] if plain else root


def _is_plain_object(script: Script, call: ast.Call) -> bool:
    """Whether a call makes an object of a class of this script that is no nn.Module."""
    return _is_class(script, call) and not script.is_module_class(
        script.classes[getattr(call.func, "id", "")]
    )


def _unique(loops: object) -> list[LoopNode]:
    return list(dict.fromkeys(loops))  # type: ignore[call-overload]
