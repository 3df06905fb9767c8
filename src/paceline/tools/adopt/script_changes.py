"""What `paceline adopt` says about a script: the kind of script, the changes with their reasons,
and remarks.
"""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field

from paceline.contract.stop.framework_presets import PRESETS
from paceline.tools.adopt.ranks import Ranks
from paceline.tools.adopt.rules import ddp_mistakes
from paceline.tools.adopt.rules.data import change_loaders
from paceline.tools.adopt.rules.devices import REASON as DEVICE
from paceline.tools.adopt.rules.devices import change_devices
from paceline.tools.adopt.rules.files import Files
from paceline.tools.adopt.rules.hazards import Hazards
from paceline.tools.adopt.rules.loops import change_loops
from paceline.tools.adopt.rules.models import wrap_models
from paceline.tools.adopt.rules.output import (
    change_folders,
    change_loads,
    change_prints,
    change_trackers,
)
from paceline.tools.adopt.rules.resume import RESUME
from paceline.tools.adopt.rules.session import Entry, free_name, open_session, remark_import
from paceline.tools.adopt.script_analysis import Script
from paceline.tools.adopt.source_edits import Edit, Remark, Source, apply
from paceline.tools.adopt.training import Training, find_training

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
    advice = (
        _known(script, found, name) or _distributed(script, name) or _single(script, found, name)
    )
    advice.edits.sort(key=lambda edit: edit.start)
    advice.remarks.sort(key=lambda remark: (not remark.must, not remark.line, remark.line))
    try:
        advice.text = apply(source, advice.edits)
        ast.parse(advice.text)
    # rather nothing than a script that does not compile
    except (SyntaxError, ValueError) as problem:
        where = f" (near line {problem.lineno})" if isinstance(problem, SyntaxError) else ""
        advice.verdict = f"Paceline cannot change this script safely{where}."
        advice.edits, advice.text, advice.next_steps = [], source.text, []
    return advice


def _known(script: Script, found: Training, name: str) -> Advice | None:
    """Return the advice for a script that uses Paceline or a framework."""
    quoted = shlex.quote(name)
    run = f"paceline run --nproc 2 {quoted}"
    if "paceline" in script.packages():
        return Advice(
            "It already uses Paceline: nothing to change.",
            next_steps=[run, f"paceline prove {quoted}"],
        )
    frameworks = {full for call in script.calls if (full := script.dotted(call.func)) in FRAMEWORKS}
    for preset in PRESETS:
        if (
            preset.fits(script.source.text, script.packages())
            and not frameworks
            and not found.backwards
        ):
            advice = Advice(
                f"None needed: it uses the {preset.name}, and Paceline starts its ranks.",
                next_steps=[run],
            )
            if not preset.can_resume([script.source.text], ()):
                text = (
                    f'it does not resume: pass {preset.resumes}; see "Frameworks" in the '
                    "documentation"
                )
                advice.remarks.append(Remark(0, text))
            return advice
    if frameworks:
        used = FRAMEWORKS[min(frameworks)]
        style = {"Accelerate": "--style accelerate ", "Horovod": "--style mpirun "}.get(used, "")
        command = f"paceline submit {style}{quoted}"
        if used != "Horovod":
            command = f"paceline run {style}--nproc 2 {quoted}"
        advice = Advice(
            f"None needed: it uses {used}, and Paceline starts its ranks.", next_steps=[command]
        )
        advice.remarks.append(Remark(0, f'{STOP}: see "Frameworks" in the documentation'))
        return advice
    return None


def _distributed(script: Script, name: str) -> Advice | None:
    if not ddp_mistakes.is_distributed(script):
        return None
    edits, remarks = _split(ddp_mistakes.fix_mistakes(script))
    style = "--style spawn " if ddp_mistakes.spawns(script) else ""
    command = f"paceline run {style}--nproc 2 {shlex.quote(name)}"
    verdict = "None needed: it already uses DDP."
    if edits:
        verdict = (
            "It already uses DDP, but has mistakes that show up on a cluster or in the results."
        )
    if any(remark.must for remark in remarks):
        verdict = "It already uses DDP, but has mistakes that you have to fix yourself."
        if edits:
            verdict = (
                "It already uses DDP, but has mistakes. These changes fix some of them; fix "
                "the others yourself."
            )
    if style:
        remarks.append(
            Remark(
                0,
                "it starts its ranks itself (mp.spawn), so run it with --style spawn, on one node",
            )
        )
    remarks.append(Remark(0, f'{STOP}: see "Scripts without the runtime" in the documentation'))
    return Advice(verdict, edits, remarks, [command])


def _single(script: Script, found: Training, name: str) -> Advice:
    if not found.backwards:
        return Advice(
            "No training loop was found: the script never calls `loss.backward()`.",
            remarks=[
                Remark(
                    0,
                    f"{name} may import it: move the loop here, or change that module in the same "
                    "way",
                )
            ],
        )
    run = free_name(script)
    rules = [*change_loaders(found, run), *wrap_models(found, run), *change_loops(found, run)]
    ranks = Ranks(script, found.origins)
    files = Files(script, found.origins, ranks)
    saves = list(files.change(lambda _: f"{run}.is_rank_zero"))
    soft = [*change_devices(script, run), *saves, *change_prints(script, ranks, run)]
    users = [*_needing(script, rules), *_placed(script, soft)]
    entry = Entry(script, users)
    if entry.statement is None:
        where = Remark(found.backwards[0].lineno, "no top-level code of the script calls this")
        return Advice("Its training loop is never called.", remarks=[where])
    late = [change for node, change in soft if isinstance(change, Remark) or entry.has_run(node)]
    saved = files.paths(node for node, change in saves if isinstance(change, Edit))
    resumes = any(isinstance(change, Edit) and change.reason == RESUME for change in rules)
    loads = change_loads(script, run, saved, resumes=resumes)
    others = [*change_trackers(script, ranks, run), *change_folders(script, ranks), *loads]
    hazards = Hazards(
        found, mean=f"{run}.mean(...)", sum=f"{run}.sum(...)", ranks=f"{run}.world_size"
    )
    edits, remarks = _split(
        [
            *open_session(script, entry, run),
            *rules,
            *late,
            *others,
            *hazards.find(),
            *hazards.prints(),
        ]
    )
    remarks += remark_import(script, entry, users, run)
    verdict = "These changes make it train on several ranks."
    if any(remark.must for remark in remarks):
        verdict = (
            "These changes are not all that it needs to train on several ranks; make the "
            "remaining ones yourself."
        )
    quoted = shlex.quote(name)
    steps = [
        f"paceline run --nproc 2 {quoted}",
        f"paceline inspect data {quoted}",
        f"paceline prove {quoted}",
    ]
    return Advice(verdict, edits, remarks, steps)


def _placed(script: Script, soft: Iterable[tuple[ast.AST, Edit | Remark]]) -> list[ast.AST]:
    """Return the nodes that name a device, except those at the top of a script that has a main
    block.

    Workers import the top, too, and must not open a session; "cuda" there is the rank's own GPU,
    anyway.
    """
    nodes = [node for node, change in soft if isinstance(change, Edit) and change.reason == DEVICE]
    guard = script.guard
    return [
        node
        for node in nodes
        if guard is None or script.function_of(node) or guard in script.ancestors(node)
    ]


def _needing(script: Script, changes: Iterable[Edit | Remark]) -> list[ast.AST]:
    """Return the innermost statements in which changes need the run."""
    starts = sorted({edit.start for edit in changes if isinstance(edit, Edit)})
    statements = [node for node in script.nodes if isinstance(node, ast.stmt)]
    found: dict[int, ast.stmt] = {}
    for node in statements:
        first, last = script.source.offset(node.lineno, 0), script.source.end(node)
        for start in starts:
            if first <= start <= last and (
                start not in found or _is_inside(script, node, found[start])
            ):
                found[start] = node
    return list(found.values())


def _is_inside(script: Script, node: ast.AST, other: ast.AST) -> bool:
    return other in script.ancestors(node)


def _split(changes: Iterable[Edit | Remark]) -> tuple[list[Edit], list[Remark]]:
    found = list(dict.fromkeys(changes))
    return [each for each in found if isinstance(each, Edit)], [
        each for each in found if isinstance(each, Remark)
    ]
