"""Scripts with DDP of their own: they run as they are, unless one of these mistakes is in them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from paceline.adoption.origins import Origins
from paceline.adoption.output_rules import change_folders, change_saves
from paceline.adoption.script import Script
from paceline.adoption.session_rule import import_line
from paceline.adoption.source import Edit, Remark
from paceline.adoption.training import find_training

ADDRESS = "Paceline, like torchrun, sets it: with a fixed one, nodes do not find each other, and two runs collide"
SAMPLERS = ("torch.utils.data.distributed.DistributedSampler", "torch.utils.data.DistributedSampler")
SPAWN = ("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes")
GROUP = ("torch.distributed.init_process_group",)
WRAPPER = ("torch.nn.parallel.DistributedDataParallel", "torch.nn.parallel.distributed.DistributedDataParallel")


def is_distributed(script: Script) -> bool:
    return bool(script.calls_of(*GROUP, *WRAPPER))


def spawns(script: Script) -> bool:
    return bool(script.calls_of(*SPAWN))


def fix_mistakes(script: Script) -> Iterator[Edit | Remark]:
    yield from _addresses(script)
    yield from _local_rank(script)
    yield from _set_epoch(script)
    name = next((alias for alias, full in script.imports.items() if full == "torch.distributed"), "torch.distributed")
    if name in script.imports or "torch" in script.imports:
        for _, change in change_saves(script, f"{name}.get_rank() == 0"):
            yield change
    yield from change_folders(script)
    yield from _remarks(script)


def _addresses(script: Script) -> Iterator[Edit | Remark]:
    """Fixed addresses and ports: keep them as defaults of a start without a launcher."""
    source = script.source
    for node in ast.walk(script.tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            target = node.targets[0]
            name = target.slice.value if isinstance(target.slice, ast.Constant) else ""
            if name in ("MASTER_ADDR", "MASTER_PORT") and script.dotted(target.value) == "os.environ":
                text = f'{source.text_of(target.value)}.setdefault("{name}", {source.text_of(node.value)})'
                yield source.replace(node, text, ADDRESS)
    for call in script.calls_of(*GROUP):
        for keyword in call.keywords:
            value = keyword.value
            fixed = isinstance(value, ast.Constant) and re.match(r"tcp://[\w.-]+:\d+", str(value.value))
            if keyword.arg == "init_method" and (fixed or isinstance(value, ast.JoinedStr)):
                yield source.replace(value, '"env://"', ADDRESS)


def _local_rank(script: Script) -> Iterator[Edit | Remark]:
    """`--local_rank`, which launchers no longer pass."""
    found = False
    for call in script.calls:
        flags = [each.value for each in call.args if isinstance(each, ast.Constant)]
        is_option = isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"
        if not is_option or not {"--local_rank", "--local-rank"} & set(flags):
            continue
        text, why = 'int(os.environ.get("LOCAL_RANK", 0))', "launchers no longer pass this option, but set LOCAL_RANK"
        default = next((each for each in call.keywords if each.arg == "default"), None)
        if default is not None and "LOCAL_RANK" in ast.dump(default):
            continue
        found = True
        if default is not None:
            yield script.source.replace(default.value, text, why)
        else:
            last = max((*call.args, *(each.value for each in call.keywords)), key=script.source.end)
            yield script.source.insert(script.source.end(last), f", default={text}", why)
    known = [alias.name for each in script.tree.body if isinstance(each, ast.Import) for alias in each.names]
    if found and "os" not in known:
        yield import_line(script, "os")


def _set_epoch(script: Script) -> Iterator[Edit | Remark]:
    """A DistributedSampler gives the same order in each epoch, unless it is told the epoch."""
    samplers = script.calls_of(*SAMPLERS)
    if any(isinstance(call.func, ast.Attribute) and call.func.attr == "set_epoch" for call in script.calls):
        return
    found, origins = find_training(script), Origins(script)
    for sampler in samplers:
        shuffle = next((each.value for each in sampler.keywords if each.arg == "shuffle"), None)
        if isinstance(shuffle, ast.Constant) and shuffle.value is False:
            continue
        why = "without it, every epoch has the same order"
        loop = found.epoch_loops[0] if found.epoch_loops else None
        if not isinstance(loop, ast.For) or not isinstance(loop.target, ast.Name):
            yield Remark(sampler.lineno, f"call set_epoch(epoch) on this sampler before each epoch: {why}")
            continue
        name = _name_of(script, origins, sampler, loop)
        if name is None:
            where = f"the sampler of line {sampler.lineno}"
            yield Remark(loop.lineno, f"call set_epoch({loop.target.id}) on {where}: {why}", must=True)
        else:
            yield script.source.line_before(loop.body[0], f"{name}.set_epoch({loop.target.id})", why)
        return  # the others are for evaluation


def _name_of(script: Script, origins: Origins, sampler: ast.Call, loop: ast.For) -> str | None:
    """Return how the loop can name a sampler: by its name, or by that of its loader."""
    names = origins.names_in(script.function_of(loop))
    for name in names:
        if sampler in origins.values(name, loop):
            return name
    for name in names:
        node = ast.Name(name, ast.Load())
        script.parents.setdefault(node, loop)
        for call in origins.of(node):
            for keyword in call.keywords:
                if keyword.arg == "sampler" and sampler in (keyword.value, *origins.of(keyword.value)):
                    return f"{name}.sampler"
    return None


def _remarks(script: Script) -> Iterator[Edit | Remark]:
    found = find_training(script)
    for loop in found.reading:
        samplers = [call for call in script.calls_of(*SAMPLERS) if call.lineno < loop.iter.lineno]
        text = "a DistributedSampler repeats samples so that all ranks have equally many: the result is not exact"
        if len(samplers) < 2:
            text = "every rank evaluates all of the data: correct, but no faster with more ranks"
        yield Remark(loop.iter.lineno, text)
    for call in script.calls_of(*GROUP):
        if any(isinstance(each, ast.Constant) and each.value == "nccl" for each in ast.walk(call)):
            yield Remark(call.lineno, 'the backend "nccl" needs GPUs; "gloo" also works on the CPU')
