"""The training in a script: its loops, the loaders that they read, the models and what optimizes
them.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field

from paceline.tools.adopt.script import MAX_DEPTH, PROGRESS, LoopNode, Script, last_name, unwrap

LOADERS = ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader")
_OPTIMIZER = re.compile(r"(Adam\w*|\w*Adam|SGD|Lion|LBFGS|Ada\w+|RMSprop|LAMB|Muon|\w*Optimizer)$")


@dataclass
class Training:
    """What was found. `models` are the expressions whose parameters an optimizer gets."""

    script: Script
    backwards: list[ast.Call] = field(default_factory=list)
    step_loops: list[LoopNode] = field(default_factory=list)
    epoch_loops: list[LoopNode] = field(default_factory=list)
    loaders: list[ast.Call] = field(default_factory=list)  # that training loops read
    shared: list[ast.Call] = field(default_factory=list)  # that other loops read, too
    optimizers: list[ast.Call] = field(default_factory=list)
    models: list[ast.expr] = field(default_factory=list)


def find_training(script: Script) -> Training:
    found = Training(script)
    found.backwards = [call for call in script.calls if loss_of(call) is not None]
    steps = [loop for call in found.backwards for loop in _step_loops(script, call, 0)]
    found.step_loops = list(dict.fromkeys(steps))
    epochs = [loop for each in found.step_loops for loop in _loops_around(script, each, 0)]
    found.epoch_loops = list(dict.fromkeys(epochs))
    _find_loaders(found)
    found.optimizers = [call for call in script.calls if _is_optimizer(script, call)]
    _find_models(found)
    return found


def loss_of(node: ast.AST) -> ast.expr | None:
    """Return the loss of `loss.backward()` or `torch.autograd.backward(loss)`; None for other
    nodes, such as the `backward` of a framework, which gets the loss.
    """
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    if node.func.attr != "backward":
        return None
    if node.args and ast.unparse(node.func.value).endswith("autograd"):
        return node.args[0]
    given = ast.unparse(node.args[0]) if node.args else "torch.ones"
    return node.func.value if given.startswith(("torch.ones", "torch.tensor")) else None


def range_of(loop: LoopNode) -> ast.Call | None:
    """Return the `range(...)` that a loop counts with."""
    inner = unwrap(loop.iter, PROGRESS) if isinstance(loop, ast.For) else None
    counts = isinstance(inner, ast.Call) and last_name(inner) in ("range", "trange")
    return inner if counts and isinstance(inner, ast.Call) and inner.args else None


def _loops_around(script: Script, node: ast.AST, depth: int) -> list[LoopNode]:
    """Return the innermost loops around a node: in its function, else around the calls of that
    function.
    """
    loop, function = script.loop_around(node), script.function_of(node)
    if loop is not None or function is None or depth > MAX_DEPTH:
        return [loop] if loop is not None else []
    uses = script.callers.get(function, [])
    return [each for call in uses for each in _loops_around(script, call, depth + 1)]


def _step_loops(script: Script, node: ast.AST, depth: int) -> list[LoopNode]:
    """Return the innermost loops around a node that read a DataLoader; the innermost of all if
    none does.
    """
    loops: list[LoopNode] = []
    while (loop := script.loop_around(loops[-1] if loops else node)) is not None:
        loops.append(loop)
    reading = [loop for loop in loops if loaders_of(script, loop)]
    function = script.function_of(node)
    if reading or function is None or depth > MAX_DEPTH:
        return (reading or loops)[:1]
    uses = script.callers.get(function, [])
    outer = [each for call in uses for each in _step_loops(script, call, depth + 1)]
    return [loop for loop in outer if loaders_of(script, loop)] or loops[:1] or outer


def loaders_of(script: Script, loop: LoopNode | ast.comprehension) -> set[ast.Call]:
    """Return the calls that make the loaders that a loop reads: several for `zip`."""
    if isinstance(loop, ast.While):
        return set()
    inner = unwrap(loop.iter, ("enumerate", *PROGRESS, "iter", "list"))
    zipped = isinstance(inner, ast.Call) and last_name(inner) == "zip"
    read = inner.args if zipped and isinstance(inner, ast.Call) else [inner]
    made = set(script.calls_of(*LOADERS))
    return {call for each in read for call in script.origins(each)} & made


def _find_loaders(found: Training) -> None:
    used = {call for loop in found.step_loops for call in loaders_of(found.script, loop)}
    elsewhere: set[ast.Call] = set()
    loops = [each for each in found.script.nodes if isinstance(each, (ast.For, ast.comprehension))]
    for loop in loops:
        if loop not in found.step_loops:
            elsewhere |= loaders_of(found.script, loop)
    found.loaders = sorted(used - elsewhere, key=lambda call: call.lineno)
    found.shared = sorted(used & elsewhere, key=lambda call: call.lineno)


def _is_optimizer(script: Script, call: ast.Call) -> bool:
    name = script.dotted(call.func)
    if name.startswith("torch.optim.lr_scheduler") or not (call.args or call.keywords):
        return False
    chosen = isinstance(call.func, ast.Call) and "optim" in script.source.text_of(call.func)
    if chosen or (name.startswith("torch.optim.") and name.rpartition(".")[2][:1].isupper()):
        return True
    return _OPTIMIZER.match(last_name(call)) is not None and bool(_parameter_calls(call))


def _find_models(found: Training) -> None:
    script = found.script
    seen: set[ast.Call] = set()
    for optimizer in found.optimizers:
        for call in _parameters_for(script, optimizer):
            model = _model_of(script, call)
            made = {each for each in script.origins(model) if not script.callees(each)}
            made |= {each for each in script.origins(model) if last_name(each) in script.classes}
            if made & seen:
                continue
            if made or script.source.text_of(model) not in map(ast.unparse, found.models):
                found.models.append(model)
            seen |= made


def given_parameters(optimizer: ast.Call) -> list[ast.expr]:
    named = [each.value for each in optimizer.keywords if each.arg == "params"]
    return [*optimizer.args[:1], *named]


def _parameters_for(script: Script, optimizer: ast.Call) -> list[ast.Call]:
    """Return the calls of `parameters()` for an optimizer: among its arguments, or in what these
    were assigned.
    """
    given = given_parameters(optimizer)
    for _ in range(4):  # groups of lists of parameters
        if calls := [call for each in given for call in _parameter_calls(each)]:
            return calls
        names = [node for each in given for node in ast.walk(each) if isinstance(node, ast.Name)]
        given = [value for name in names for value in script.values(name.id, name)]
        given = [value for value in given if value is not optimizer]
    return []


def _parameter_calls(node: ast.AST) -> list[ast.Call]:
    calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
    known = ("parameters", "named_parameters")
    return [
        each for each in calls if isinstance(each.func, ast.Attribute) and last_name(each) in known
    ]


def _model_of(script: Script, call: ast.Call) -> ast.expr:
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
    inner = chain[max(0, len(chain) - 2)]
    owner = script.class_of(call)
    if root.id == "self" and owner is not None:
        return root if script.is_module_class(owner) else inner
    made = [script.classes.get(last_name(each)) for each in script.origins(root)]
    holds = any(each is not None and not script.is_module_class(each) for each in made)
    return inner if holds else root
