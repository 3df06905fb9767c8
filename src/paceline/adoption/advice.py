"""What `paceline adopt` says about a script: the kind of script, the changes with their reasons, and remarks."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field

from paceline.adoption import ddp_rules
from paceline.adoption.data_rules import change_loaders
from paceline.adoption.device_rules import REASON as DEVICE
from paceline.adoption.device_rules import change_devices
from paceline.adoption.loop_rules import change_loops
from paceline.adoption.model_rules import wrap_models
from paceline.adoption.output_rules import change_folders, change_prints, change_saves, change_trackers
from paceline.adoption.script import Script
from paceline.adoption.session_rule import Entry, free_name, open_session
from paceline.adoption.source import Edit, Remark, Source, apply
from paceline.adoption.training import Training, find_training
from paceline.contract.stop.presets import PRESETS

FRAMEWORKS = {  # what a script calls, and the name of the framework
    "accelerate.Accelerator": "Accelerate",
    "lightning.fabric.Fabric": "Lightning Fabric",
    "lightning.Fabric": "Lightning Fabric",
    "lightning_fabric.Fabric": "Lightning Fabric",
    "deepspeed.initialize": "DeepSpeed",
    "horovod.torch.init": "Horovod",
}
STOP = "to stop and resume, handle SIGUSR1, save, and exit with 75"


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
    name = source.name
    advice = _known(script, found, name) or _distributed(script, name) or _single(script, found, name)
    advice.edits.sort(key=lambda edit: edit.start)
    advice.remarks.sort(key=lambda remark: (not remark.must, not remark.line, remark.line))
    advice.text = apply(source, advice.edits)
    try:
        ast.parse(advice.text)
    except SyntaxError as problem:  # rather nothing than a script that does not compile
        advice.verdict = f"It is written in a way that cannot be changed safely (near line {problem.lineno})."
        advice.edits, advice.text = [], source.text
    return advice


def _known(script: Script, found: Training, name: str) -> Advice | None:
    """Return the advice for a script that uses Paceline or a framework."""
    run = f"paceline run --nproc 2 {name}"
    if "paceline" in script.packages():
        return Advice("It uses Paceline already: nothing to change.", next_steps=[run, f"paceline prove {name}"])
    frameworks = {full for call in script.calls if (full := script.dotted(call.func)) in FRAMEWORKS}
    for preset in PRESETS:
        if preset.fits(script.source.text, script.packages()) and not frameworks and not found.backwards:
            advice = Advice(f"None needed: it uses the {preset.name}, whose ranks Paceline starts.", next_steps=[run])
            if not preset.can_resume([script.source.text], ()):
                text = f"it does not resume: pass {preset.resumes}, as in docs/frameworks.md"
                advice.remarks.append(Remark(0, text))
            return advice
    if frameworks:
        used = FRAMEWORKS[min(frameworks)]
        style = {"Accelerate": "--style accelerate ", "Horovod": "--style mpirun "}.get(used, "")
        command = f"paceline submit {style}{name}" if used == "Horovod" else f"paceline run {style}--nproc 2 {name}"
        advice = Advice(f"None needed: it uses {used}, whose ranks Paceline starts.", next_steps=[command])
        advice.remarks.append(Remark(0, f"{STOP}: docs/frameworks.md"))
        return advice
    return None


def _distributed(script: Script, name: str) -> Advice | None:
    if not ddp_rules.is_distributed(script):
        return None
    edits, remarks = _split(ddp_rules.fix_mistakes(script))
    style = "--style spawn " if ddp_rules.spawns(script) else ""
    command = f"paceline run {style}--nproc 2 {name}"
    mistakes = "It has DDP of its own, with mistakes that show up on a cluster or in the results."
    verdict = mistakes if edits else "None needed: it has DDP of its own."
    if style:
        remarks.append(Remark(0, "it starts its ranks itself (mp.spawn), so run it with --style spawn, on one node"))
    remarks.append(Remark(0, f"{STOP}: docs/fault-tolerance.md, examples/bare"))
    return Advice(verdict, edits, remarks, [command])


def _single(script: Script, found: Training, name: str) -> Advice:
    if not found.backwards:
        return Advice(
            "No training loop was found: there is no `loss.backward()` in it.",
            remarks=[Remark(0, f"{name} may import it: move the loop here, or change that module in the same way")],
        )
    run = free_name(script)
    rules = [*change_loaders(found, run), *wrap_models(found, run), *change_loops(found, run)]
    soft = [*change_devices(script, run), *change_saves(script, f"{run}.is_rank_zero"), *change_prints(script, run)]
    entry = Entry(script, [*_needing(script, rules), *_placed(script, soft)])
    if entry.statement is None:
        where = Remark(found.backwards[0].lineno, "nothing at the top of the script leads here")
        return Advice("Its training loop is never called.", remarks=[where])
    late = [change for node, change in soft if isinstance(change, Remark) or entry.has_run(node)]
    others = [*change_trackers(script, run), *change_folders(script)]
    edits, remarks = _split([*open_session(script, entry, run), *rules, *late, *others])
    verdict = "These changes make it train on several ranks."
    if any(remark.must for remark in remarks):
        verdict = "These changes are a part of what it needs to train on several ranks; the rest is up to you."
    steps = [f"paceline run --nproc 2 {name}", f"paceline inspect data {name}", f"paceline prove {name}"]
    return Advice(verdict, edits, remarks, steps)


def _placed(script: Script, soft: Iterable[tuple[ast.AST, Edit | Remark]]) -> list[ast.AST]:
    """Return the nodes that name a device, except those at the top of a script that has a main block.

    Workers import the top, too, and must not open a session; "cuda" there is the rank's own GPU, anyway.
    """
    nodes = [node for node, change in soft if isinstance(change, Edit) and change.reason == DEVICE]
    guard = script.guard
    return [node for node in nodes if guard is None or script.function_of(node) or guard in script.ancestors(node)]


def _needing(script: Script, changes: Iterable[Edit | Remark]) -> list[ast.AST]:
    """Return the innermost statements in which changes need the run."""
    starts = sorted({edit.start for edit in changes if isinstance(edit, Edit)})
    statements = [node for node in ast.walk(script.tree) if isinstance(node, ast.stmt)]
    found: dict[int, ast.stmt] = {}
    for node in statements:
        first, last = script.source.offset(node.lineno, 0), script.source.end(node)
        for start in starts:
            if first <= start <= last and (start not in found or _is_inside(script, node, found[start])):
                found[start] = node
    return list(found.values())


def _is_inside(script: Script, node: ast.AST, other: ast.AST) -> bool:
    return other in script.ancestors(node)


def _split(changes: Iterable[Edit | Remark]) -> tuple[list[Edit], list[Remark]]:
    found = list(dict.fromkeys(changes))
    return [each for each in found if isinstance(each, Edit)], [each for each in found if isinstance(each, Remark)]
