"""What `paceline adopt` says about a script: its edits and remarks, and what to type next."""

from __future__ import annotations

import ast
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pyflakes.checker import Checker
from pyflakes.messages import UndefinedLocal, UndefinedName

from paceline.tools.adopt.script import (
    MAX_DEPTH,
    Script,
    find_mistakes,
    framework_of,
    last_name,
    needs_spawn,
    preset_of,
    sign_of,
)
from paceline.tools.adopt.side_effects import SideEffects
from paceline.tools.adopt.source_edits import Edit, Remark, Source, apply
from paceline.tools.adopt.training import Training, find_training, loss_of
from paceline.tools.adopt.training_edits import (
    change_loader,
    change_loops,
    first_statement,
    free_name,
    obstacles,
    start_session,
    wrap_models,
)

STOP = "to stop and resume, it has to save and load checkpoints"


# Runs the text in its input in place of the script, whose path is its argument.
RUN_HELP = """\
import os, sys
name, text = sys.argv[1], sys.stdin.buffer.read()
sys.argv = [name, "--help"]
sys.path[0] = os.path.dirname(name)
variables = vars(sys.modules["__main__"])
variables["__file__"] = name
exec(compile(text, name, "exec"), variables)
"""
HELP_SECONDS = 120


@dataclass
class Advice:
    """`verdict` is one sentence about the script; `next_steps` are commands to type."""

    verdict: str
    edits: list[Edit] = field(default_factory=list)
    remarks: list[Remark] = field(default_factory=list)
    next_steps: list[str] = field(default_factory=list)
    text: str = ""  # of the script, with all edits


def advise(source: Source) -> Advice:
    script = Script(source)
    found = find_training(script)
    quoted = shlex.quote(source.name)
    run, sign = f"paceline run --nproc 2 {quoted}", sign_of(script)
    framework = framework_of(script, preset_of(script))
    if "paceline" in script.packages():
        steps = [run, f"paceline prove {quoted}"]
        advice = Advice("It already uses Paceline: nothing to change.", next_steps=steps)
    elif framework or sign is not None:
        advice = _distributed(script, framework, sign, quoted)
    elif not found.backwards:
        advice = Advice("No training loop was found: the script never calls `loss.backward()`.")
        text = f"{source.name} may import it: move the loop here, or change that module instead"
        advice.remarks.append(Remark(0, text))
    else:
        advice = _single(found, quoted)
    advice.edits.sort(key=lambda edit: edit.start)
    advice.remarks.sort(key=lambda remark: (not remark.must, not remark.line, remark.line))
    try:
        advice.text = apply(source, advice.edits)
        problem = _problem(source.text, advice.text)
    except ValueError as overlap:
        problem = str(overlap)
    if problem:  # rather nothing than a script that does not work
        advice.verdict = f"Paceline cannot change this script safely: {problem}."
        advice.edits, advice.text, advice.next_steps = [], source.text, []
    return advice


def _distributed(
    script: Script, framework: str, sign: tuple[int, str] | None, quoted: str
) -> Advice:
    style = "--style spawn " if needs_spawn(script) else ""
    command = f"paceline run {style}--nproc 2 {quoted}"
    if framework == "Horovod":
        command = f"paceline submit --style mpirun {quoted}"
    remarks = list(find_mistakes(script))
    where = f"{sign[1]} in line {sign[0]}" if sign is not None else ""
    verdict = f"None needed: it is distributed already ({where}), and Paceline starts its ranks."
    if framework:
        verdict = f"None needed: it uses {framework}, and Paceline starts its ranks."
    if any(remark.must for remark in remarks):
        verdict = (
            "It is distributed already, and works as it is, once you have fixed these mistakes."
        )
    if style:
        text = "it starts its ranks itself (mp.spawn), so run it with --style spawn, on one node"
        remarks.append(Remark(0, text))
    page = "Frameworks" if framework else "Scripts without the runtime"
    remarks.append(Remark(0, f'{STOP}: see "{page}" in the documentation'))
    return Advice(verdict, remarks=remarks, next_steps=[command])


def _single(found: Training, quoted: str) -> Advice:
    script = found.script
    run = free_name(script)
    if problems := list(dict.fromkeys(obstacles(found, run))):
        verdict = "It needs changes that only you can make; then start again with `paceline adopt`."
        return Advice(verdict, remarks=problems)
    first = first_statement(found)
    if first is None:
        where = Remark(found.backwards[0].lineno, "no top-level code of the script calls this")
        return Advice("Its training loop is never called.", remarks=[where])
    nodes = [*found.loaders, *found.models, *found.step_loops, *found.epoch_loops]
    functions = {script.function_of(each) for each in (*nodes, *found.backwards)}

    def has_run(node: ast.AST) -> bool:
        """Whether the run exists where a node is, in code that trains."""
        function = script.function_of(node)
        if function is not None:
            return function in functions
        if script.guard is not None:
            return script.guard in script.ancestors(node)
        return script.statement(node).lineno >= first.lineno

    changes: list[Edit | Remark] = [*start_session(script, first, run)]
    changes += [each for call in found.loaders for each in change_loader(found, call, run)]
    changes += [*wrap_models(found, run), *change_loops(found, run)]
    changes += [*SideEffects(script, run, has_run).find(), *change_wandb(script)]
    changes += find_remarks(found, run)
    edits, remarks = _split(changes)
    verdict = "These changes make it train on several ranks."
    if any(remark.must for remark in remarks):
        verdict = "These changes are not all that it needs to train on several ranks; make the "
        verdict += "remaining ones yourself."
    steps = [f"paceline run --nproc 2 {quoted}"]
    steps += [f"paceline inspect data {quoted}", f"paceline prove {quoted}"]
    return Advice(verdict, edits, remarks, steps)


def _split(changes: Iterable[Edit | Remark]) -> tuple[list[Edit], list[Remark]]:
    found = list(dict.fromkeys(changes))
    edits = [each for each in found if isinstance(each, Edit)]
    return edits, [each for each in found if isinstance(each, Remark)]


# -- whether the result works


def _problem(old: str, new: str) -> str:
    """Return what is wrong with a changed script: it does not compile, or reads undefined names."""
    try:
        more = _undefined(new) - _undefined(old)
    except SyntaxError as problem:
        return f"line {problem.lineno} would not compile"
    return f"{min(more)} would be undefined" if more else ""


def _undefined(text: str) -> set[str]:
    found = Checker(ast.parse(text)).messages
    kinds = (UndefinedName, UndefinedLocal)
    return {str(each.message_args[0]) for each in found if isinstance(each, kinds)}


def broken_help(source: Source, advice: Advice) -> str:
    """Return why `--help` of the changed script fails, although it worked before; "" if it works,
    or if the script has none.
    """
    if "parse_args(" not in source.text or not (problem := _run_help(source, advice.text)):
        return ""
    return "" if _run_help(source, source.text) else problem


def _run_help(source: Source, text: str) -> str:
    """Run a text in place of the script; return the last line of its error."""
    command = [sys.executable, "-c", RUN_HELP, str(Path(source.name).absolute())]
    content = text.encode(source.encoding)
    try:
        subprocess.run(
            command, input=content, capture_output=True, timeout=HELP_SECONDS, check=True
        )
    except subprocess.TimeoutExpired as problem:
        return str(problem)
    except subprocess.CalledProcessError as problem:
        return (problem.stderr.decode(errors="replace").strip() or "it fails").splitlines()[-1]
    return ""


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
