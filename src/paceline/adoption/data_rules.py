"""Loaders: `DataLoader(...)` becomes `run.loader(...)`, which gives each rank its part of every batch."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from paceline.adoption.source import Edit, Remark
from paceline.adoption.training import Training

POSITIONAL = (
    "dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn", "pin_memory",
    "drop_last", "timeout", "worker_init_fn", "multiprocessing_context",
)  # fmt: skip
REASON = "each rank reads its part of every batch; batch_size stays the size over all ranks"


def change_loaders(found: Training, run: str) -> Iterator[Edit | Remark]:
    for call in found.loaders:
        yield from _change(found, call, run)
    for call in found.shared:
        yield Remark(
            call.lineno,
            "this DataLoader feeds training and other loops, so every rank trains on all of its data: make a loader of"
            f" its own for training, with {run}.loader(dataset, batch_size=...)",
            must=True,
        )
    if found.step_loops and not found.loaders and not found.shared:
        line = found.step_loops[0].lineno
        yield Remark(
            line,
            "this loop does not read a DataLoader of this script, so every rank trains on all of its data: read the"
            f" data from {run}.loader(dataset, batch_size=...)",
            must=True,
        )
    yield from _stay_behind(found, run)
    for loop in found.reading:
        if not any(call in found.shared for call in found.origins.of(loop.iter)):
            yield Remark(
                loop.iter.lineno,
                f"every rank evaluates all of the data, and gets the same result. To share the work, use"
                f" {run}.evaluate(...) here, and {run}.sum(...) of what you count",
            )


def _stay_behind(found: Training, run: str) -> Iterator[Remark]:
    """A script without devices: the model goes to the GPU, and batches of `run.steps`, but nothing else."""
    script = found.script
    moves = [call for call in script.calls if getattr(call.func, "attr", "") in ("to", "cuda")]
    placed = moves or any(each.arg == "device" for call in script.calls for each in call.keywords)
    read = [loop.iter.lineno for loop in found.reading]
    read += [] if found.loaders or found.shared else [loop.lineno for loop in found.step_loops]
    if read and not placed:
        text = f"the script moves no data: on a GPU, move what the model gets here, as in x.to({run}.device)"
        yield Remark(min(read), text, must=True)


def keeps_short_batches(found: Training) -> bool:
    """Whether a training loop may get a last batch that is short, and so unequal between ranks."""
    return any(not _drops_last(call) for call in found.loaders if not _has_stars(call))


def _change(found: Training, call: ast.Call, run: str) -> Iterator[Edit | Remark]:
    source = found.script.source
    given: dict[str | None, ast.expr] = dict(zip(POSITIONAL, call.args, strict=False))
    given |= {each.arg: each.value for each in call.keywords}
    size = given.get("batch_size")
    if any(isinstance(each, ast.Starred) for each in call.args) or "dataset" not in given:
        yield Remark(call.lineno, f"make this loader with {run}.loader(dataset, batch_size=...) instead", must=True)
        return
    if isinstance(size, ast.Constant) and size.value is None:
        yield Remark(
            call.lineno, f"batch_size=None: use {run}.loader, and let the data set return samples, not batches"
        )
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
            call.lineno, "the batch size is 1 (torch's default), which ranks cannot share: raise it", must=True
        )
    if not _has_stars(call) and "batch_sampler" not in given and not _is_stream(found, given["dataset"]):
        if not given.keys() & {"shuffle", "sampler"}:
            more.append("shuffle=False")
        if "drop_last" not in given:
            more.append("drop_last=False")
    if more:
        last = max((*call.args, *(each.value for each in call.keywords)), key=source.end)
        why = "as in torch: without these, run.loader shuffles and drops a short last batch"
        yield source.insert(source.end(last), "".join(f", {each}" for each in more), why.replace("run.", f"{run}."))


def _drops_last(call: ast.Call) -> bool:
    value = dict(zip(POSITIONAL, call.args, strict=False)).get("drop_last")
    value = next((each.value for each in call.keywords if each.arg == "drop_last"), value)
    return isinstance(value, ast.Constant) and value.value is True


def _has_stars(call: ast.Call) -> bool:
    return any(each.arg is None for each in call.keywords)


def _is_stream(found: Training, dataset: ast.expr) -> bool:
    """Whether a data set is iterable-style: a class of this script says so."""
    script = found.script
    for call in found.origins.of(dataset):
        owner = script.classes.get(getattr(call.func, "id", ""))
        if owner and any("IterableDataset" in (script.dotted(base) or ast.dump(base)) for base in owner.bases):
            return True
    return False
