"""Samplers of scripts that already use DDP: each rank must read its part of the data, reshuffled
each epoch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from paceline.tools.adopt.ranks import Ranks
from paceline.tools.adopt.script_analysis import Script
from paceline.tools.adopt.source_edits import Edit, Remark
from paceline.tools.adopt.training import LOADERS, Training

SAMPLERS = (
    "torch.utils.data.distributed.DistributedSampler",
    "torch.utils.data.DistributedSampler",
)
ORDER = "without it, every epoch has the same order"


def change_samplers(found: Training, ranks: Ranks) -> Iterator[Edit | Remark]:
    script = found.script
    made = set(script.calls_of(*LOADERS))
    read = [loop for loop in found.step_loops if isinstance(loop, ast.For)]
    loaders = [*found.loaders, *found.shared]
    for loader in loaders:
        yield from _check_loader(found, ranks, loader)
    if not loaders and not ranks.depends(script.tree if not read else read[0].iter):
        line = (
            (found.step_loops or found.backwards)[0].lineno
            if found.step_loops or found.backwards
            else 0
        )
        if line:
            yield Remark(
                line,
                "see that each rank reads its part of the data here: no DataLoader of this script "
                "is read",
            )
    yield from _set_epoch(found, loaders or sorted(made, key=lambda call: call.lineno))
    for loop in found.reading:
        shared = [_sampler_of(found, call) for call in found.origins.of(loop.iter) & made]
        text = "every rank evaluates all of the data: correct, but no faster with more ranks"
        if any(shared):
            text = (
                "a DistributedSampler repeats samples so that all ranks get the same number: "
                "the result is not exact"
            )
        yield Remark(loop.iter.lineno, text)


def _check_loader(found: Training, ranks: Ranks, loader: ast.Call) -> Iterator[Remark]:
    """A loader that training reads needs a sampler, or data that differ between ranks."""
    given = {each.arg: each.value for each in loader.keywords}
    values = [
        value for name, value in given.items() if name in ("sampler", "batch_sampler")
    ] + loader.args[3:5]
    values = [
        each for each in values if not (isinstance(each, ast.Constant) and each.value is None)
    ]
    if values:
        if not _sampler_of(found, loader) and not any(map(ranks.depends, values)):
            yield Remark(
                loader.lineno,
                "make sure that this sampler gives each rank different samples: it is not a "
                "DistributedSampler",
            )
    elif None in given:
        yield Remark(
            loader.lineno, "make sure that this loader's options include a DistributedSampler"
        )
    elif not _differs(
        found, ranks, [*loader.args[:1], *([given["dataset"]] if "dataset" in given else [])]
    ):
        text = (
            "every rank trains on all of the data: pass sampler=DistributedSampler(dataset), "
            "instead of shuffle"
        )
        yield Remark(loader.lineno, text, must=True)


def _differs(found: Training, ranks: Ranks, dataset: list[ast.expr]) -> bool:
    """Whether a dataset depends on the rank, or its class does."""
    script = found.script
    calls = [call for each in dataset for call in found.origins.of(each)]
    owners = [
        script.classes[name]
        for call in calls
        if (name := getattr(call.func, "id", "")) in script.classes
    ]
    return any(ranks.depends(each) for each in (*dataset, *calls, *owners))


def _sampler_of(found: Training, loader: ast.Call) -> ast.Call | None:
    """Return the DistributedSampler that a loader has, or may have."""
    known = set(found.script.calls_of(*SAMPLERS))
    given = [each.value for each in loader.keywords if each.arg in ("sampler", "batch_sampler")]
    given += loader.args[3:5]
    for value in given:
        calls = found.origins.of(value)
        inner = {
            call for each in calls for argument in each.args for call in found.origins.of(argument)
        }
        if hits := (calls | inner) & known:
            return min(hits, key=lambda call: call.lineno)
    return None


def _set_epoch(found: Training, loaders: list[ast.Call]) -> Iterator[Edit | Remark]:
    """A DistributedSampler gives the same order in each epoch, unless it is told the epoch."""
    script = found.script
    set_epochs = [call for call in script.calls if getattr(call.func, "attr", "") == "set_epoch"]
    samplers = list(
        dict.fromkeys(each for call in loaders if (each := _sampler_of(found, call)) is not None)
    )
    for sampler in samplers:
        shuffle = next((each.value for each in sampler.keywords if each.arg == "shuffle"), None)
        if isinstance(shuffle, ast.Constant) and shuffle.value is False:
            continue
        if any(_sets_epoch_of(found, call, sampler) for call in set_epochs):
            continue
        loop = found.epoch_loops[0] if len(found.epoch_loops) == 1 else None
        name = target = None
        if isinstance(loop, ast.For) and isinstance(loop.target, ast.Name):
            target, name = loop.target.id, _name_of(found, sampler, loop)
        if isinstance(loop, ast.For) and name is not None and _is_certain(script, sampler):
            yield script.source.line_before(loop.body[0], f"{name}.set_epoch({target})", ORDER)
        elif found.epoch_loops:
            what = (
                f"call set_epoch({target or 'epoch'}) on the sampler of line {sampler.lineno} "
                "before each epoch"
            )
            yield Remark(found.epoch_loops[0].lineno, f"{what}: {ORDER}", must=True)


def _sets_epoch_of(found: Training, call: ast.Call, sampler: ast.Call) -> bool:
    """Whether a call of `set_epoch` is for a sampler, or may be."""
    assert isinstance(call.func, ast.Attribute)
    owner = call.func.value
    if isinstance(owner, ast.Attribute) and owner.attr in ("sampler", "batch_sampler"):
        owner = owner.value
    calls = found.origins.of(owner)
    samplers = {
        each for loader in calls if (each := _sampler_of(found, loader)) is not None
    } | calls
    known = set(found.script.calls_of(*SAMPLERS))
    return sampler in samplers or not samplers & known


def _is_certain(script: Script, sampler: ast.Call) -> bool:
    """Whether there is a sampler in any case."""
    for each in script.ancestors(sampler):
        if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return True
        if isinstance(each, (ast.If, ast.IfExp, ast.Try, ast.BoolOp)) and each is not script.guard:
            return False
    return True


def _name_of(found: Training, sampler: ast.Call, loop: ast.For) -> str | None:
    """Return how the loop can name a sampler: by its name, or by that of its loader."""
    script, origins = found.script, found.origins
    names = origins.names_in(script.function_of(loop))
    for name in names:
        if origins.values(name, loop) == [sampler]:
            return name
    for name in names:
        node = ast.Name(name, ast.Load())
        script.parents.setdefault(node, loop)
        for call in origins.of(node):
            for keyword in call.keywords:
                if keyword.arg == "sampler" and sampler in (
                    keyword.value,
                    *origins.of(keyword.value),
                ):
                    return f"{name}.sampler"
    return None
