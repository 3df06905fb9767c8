"""Loaders: `DataLoader(...)` becomes `run.loader(...)`, which gives each rank its part of every
batch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from paceline.tools.adopt.rules.resume import copies
from paceline.tools.adopt.source_edits import Edit, Remark
from paceline.tools.adopt.training import Training
from paceline.tools.adopt.value_origins import WRAPPERS, unwrap

POSITIONAL = (
    "dataset",
    "batch_size",
    "shuffle",
    "sampler",
    "batch_sampler",
    "num_workers",
    "collate_fn",
    "pin_memory",
    "drop_last",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
)
# of a DataLoader that one of `run.loader` has, too
ATTRIBUTES = ("dataset", "batch_size", "num_workers")
REASON = "each rank reads its part of every batch; batch_size remains the global batch size"


def change_loaders(found: Training, run: str) -> Iterator[Edit | Remark]:
    for call in found.loaders:
        yield from _change(found, call, run)
    for call in found.shared:
        yield Remark(
            call.lineno,
            "this DataLoader feeds training and other loops, so every rank trains on all of its "
            "data: make a separate "
            f"loader for training, with {run}.loader(dataset, batch_size=...)",
            must=True,
        )
    if found.step_loops and not found.loaders and not found.shared:
        line = found.step_loops[0].lineno
        yield Remark(
            line,
            "this loop does not read a DataLoader of this script, so every rank trains on all of "
            "its data: read the"
            f" data from {run}.loader(dataset, batch_size=...)",
            must=True,
        )
    yield from _stay_behind(found, run)
    yield from _other_uses(found, run)
    is_reported = False
    for loop in found.reading:
        trains = isinstance(loop, ast.comprehension) and _trains(found, found.script.parents[loop])
        if trains and not is_reported:
            is_reported = True
            text = (
                "this trains in a comprehension: write a loop instead, `for batch in "
                f"{run}.steps(loader):`"
            )
            yield Remark(loop.iter.lineno, text, must=True)
        gives = any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in ast.walk(loop))
        if (
            not trains
            and not gives
            and not any(call in found.shared for call in found.origins.of(loop.iter))
        ):
            yield Remark(
                loop.iter.lineno,
                "every rank evaluates all of the data, and gets the same result. To share the "
                "work, use"
                f" {run}.evaluate(...) here, and {run}.sum(...) for your counts",
            )


def _other_uses(found: Training, run: str) -> Iterator[Remark]:
    """What else the script does with a loader of training, which has only a rank's part of the
    data then.
    """
    script = found.script
    for node in script.nodes:
        if (
            isinstance(node, ast.Attribute)
            and node.attr not in ATTRIBUTES
            and _is_loader(found, node.value)
        ):
            text = (
                f"a loader of {run}.loader has no `{node.attr}`: take it from the dataset or "
                "the sampler instead"
            )
            yield Remark(node.lineno, text, must=True)
    for call in script.calls:
        name = getattr(call.func, "id", "") or getattr(call.func, "attr", "")
        known = name in (*WRAPPERS, "len", "next", "print", "append") or script.callees(call)
        if not known and any(_is_loader(found, each) for each in call.args):
            text = (
                "this receives a loader with only this rank's part of the data: pass it a "
                "DataLoader if it needs all "
                "of the data"
            )
            yield Remark(call.lineno, text)


def _is_loader(found: Training, node: ast.expr) -> bool:
    """Whether an expression is a loader of training itself, not a progress bar around it."""
    if not isinstance(node, (ast.Name, ast.Attribute)) or found.script.dotted(node):
        return False
    text = node.id if isinstance(node, ast.Name) else f"self.{node.attr}"
    values = [each for each in found.origins.values(text, node) if isinstance(each, ast.Call)]
    is_wrapped = any(unwrap(each) is not each for each in values)
    return not is_wrapped and bool(found.origins.of(node) & set(found.loaders))


def _trains(found: Training, node: ast.AST) -> bool:
    """Whether running a node runs a backward."""
    reached = found.script.reachable([node])
    return any(each in found.backwards for part in (node, *reached) for each in ast.walk(part))


def _stay_behind(found: Training, run: str) -> Iterator[Remark]:
    """A script without devices: the model goes to the GPU, and batches of `run.steps`, but nothing
    else.
    """
    script = found.script
    moves = [call for call in script.calls if getattr(call.func, "attr", "") in ("to", "cuda")]
    placed = moves or any(each.arg == "device" for call in script.calls for each in call.keywords)
    read = [loop.iter.lineno for loop in found.reading]
    read += [] if found.loaders or found.shared else [loop.lineno for loop in found.step_loops]
    for copy in copies(found):
        wrapped = [
            each for _, each in found.models if script.function_of(each) is script.function_of(copy)
        ]
        if not placed and any(copy.lineno < each.lineno for each in wrapped):
            text = (
                f"this copy stays on the CPU, but {run}.wrap moves the model to a GPU: add "
                f".to({run}.device)"
            )
            yield Remark(copy.lineno, text, must=True)
    if read and not placed:
        text = (
            "the script never moves data to a device: on a GPU, move the model's input here, "
            f"as in x.to({run}.device)"
        )
        yield Remark(min(read), text, must=True)


def keeps_short_batches(found: Training) -> bool:
    """Whether a training loop may get a last batch that is short, and so unequal between ranks."""
    return any(not _drops_last(call) for call in found.loaders)


def _change(found: Training, call: ast.Call, run: str) -> Iterator[Edit | Remark]:
    source = found.script.source
    given: dict[str | None, ast.expr] = dict(zip(POSITIONAL, call.args, strict=False))
    given |= {each.arg: each.value for each in call.keywords}
    size = given.get("batch_size")
    if any(isinstance(each, ast.Starred) for each in call.args) or "dataset" not in given:
        yield Remark(
            call.lineno,
            f"make this loader with {run}.loader(dataset, batch_size=...) instead",
            must=True,
        )
        return
    if isinstance(size, ast.Constant) and size.value is None:
        text = (
            f"every rank reads all batches: use {run}.loader, and let the dataset return "
            "samples, not batches"
        )
        yield Remark(call.lineno, text, must=True)
        return
    yield source.replace(call.func, f"{run}.loader", REASON)
    for name, value in list(zip(POSITIONAL, call.args, strict=False))[1:]:
        yield source.insert(source.start(value), f"{name}=", REASON)
    for keyword in call.keywords:
        if keyword.arg == "generator":
            text = f"seed={source.text_of(keyword.value)}.initial_seed()"
            yield source.replace(keyword, text, "all ranks must draw the same order")
    more = []
    if size is None and not given.keys() & {"batch_sampler", None}:
        more.append("batch_size=1")
        yield Remark(
            call.lineno,
            "the batch size is 1 (torch's default), which ranks cannot share: raise it",
            must=True,
        )
    defaults = []
    if "batch_sampler" not in given and not _is_stream(found, given["dataset"]):
        defaults += ["shuffle"] if not given.keys() & {"shuffle", "sampler"} else []
        defaults += ["drop_last"] if "drop_last" not in given else []
    why = f"as in torch: by default, {run}.loader shuffles and drops a short last batch"
    stars = [each.value for each in call.keywords if each.arg is None]
    if stars and defaults:
        first = "".join(f'"{each}": False, ' for each in defaults)
        yield source.replace(stars[0], f"{{{first}**{source.text_of(stars[0])}}}", why)
    elif more or defaults:
        yield source.add_argument(
            call, ", ".join([*more, *(f"{each}=False" for each in defaults)]), why
        )


def _drops_last(call: ast.Call) -> bool:
    value = dict(zip(POSITIONAL, call.args, strict=False)).get("drop_last")
    value = next((each.value for each in call.keywords if each.arg == "drop_last"), value)
    return isinstance(value, ast.Constant) and value.value is True


def _is_stream(found: Training, dataset: ast.expr) -> bool:
    """Whether a dataset is iterable-style: a class of this script says so."""
    script = found.script
    for call in found.origins.of(dataset):
        owner = script.classes.get(getattr(call.func, "id", ""))
        if owner and any(
            "IterableDataset" in (script.dotted(base) or ast.dump(base)) for base in owner.bases
        ):
            return True
    return False
