"""Scripts that already use DDP: they run unchanged unless they contain one of these mistakes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from paceline.tools.adopt.ranks import Ranks
from paceline.tools.adopt.rules.files import Files
from paceline.tools.adopt.rules.group import GROUP, Group
from paceline.tools.adopt.rules.hazards import Hazards
from paceline.tools.adopt.rules.output import change_folders
from paceline.tools.adopt.rules.samplers import change_samplers
from paceline.tools.adopt.rules.session import import_line
from paceline.tools.adopt.script_analysis import Script
from paceline.tools.adopt.source_edits import Edit, Remark
from paceline.tools.adopt.training import Training, find_training

ADDRESS = (
    "Paceline sets it, as torchrun does: with a fixed value, nodes cannot find each other, "
    "and two runs collide"
)
WRAPPER = (
    "torch.nn.parallel.DistributedDataParallel",
    "torch.nn.parallel.distributed.DistributedDataParallel",
)
IDENTITY = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
SLURM = {"SLURM_PROCID": "RANK", "SLURM_LOCALID": "LOCAL_RANK", "SLURM_NTASKS": "WORLD_SIZE"}
_FIXED = re.compile(r"tcp://[\w.-]+:\d+")


def is_distributed(script: Script) -> bool:
    return bool(script.calls_of(*GROUP, *WRAPPER))


def spawns(script: Script) -> bool:
    return Group(script).spawns


def fix_mistakes(script: Script) -> Iterator[Edit | Remark]:
    found, group = find_training(script), Group(script)
    ranks = Ranks(script, found.origins)
    yield from _addresses(script, group)
    yield from _identity(script, group)
    yield from _local_rank(script)
    yield from change_samplers(found, ranks)
    rank = group.rank
    saves = Files(script, found.origins, ranks)
    for _, change in saves.change(
        lambda call: f"{rank} == 0" if rank and group.is_open(call) else None
    ):
        yield change
    yield from change_folders(script, ranks)
    yield from _forwards(found)
    yield from _unwrapped(found)
    yield from Hazards(
        found, mean="dist.all_reduce", sum="dist.all_reduce", ranks="the world size"
    ).find()
    test = group.condition()
    if test is not None:
        what = script.source.text_of(test)
        yield Remark(
            test.lineno,
            f"it uses DDP only if `{what}`: make sure that this is true when WORLD_SIZE is set",
        )


def _addresses(script: Script, group: Group) -> Iterator[Edit | Remark]:
    """Fixed addresses and ports: keep them as defaults of a start without a launcher."""
    source = script.source
    for node, target, name in _environment(script):
        if name in ("MASTER_ADDR", "MASTER_PORT"):
            text = (
                f'{source.text_of(target.value)}.setdefault("{name}", {source.text_of(node.value)})'
            )
            yield source.replace(node, text, ADDRESS)
    for call in script.calls_of(*GROUP):
        named = [each.value for each in call.keywords if each.arg == "init_method"]
        for value in [*call.args[1:2], *named]:
            if isinstance(value, ast.Constant) and _FIXED.match(str(value.value)):
                if group.spawns:
                    text = "a fixed port: two runs on one node collide"
                    yield Remark(value.lineno, text)
                else:
                    yield source.replace(value, '"env://"', ADDRESS)
            elif not isinstance(value, ast.Constant) and not group.spawns:
                text = (
                    'this address must be "env://" under Paceline, which sets MASTER_ADDR and '
                    "MASTER_PORT"
                )
                yield Remark(value.lineno, text)


def _environment(script: Script) -> Iterator[tuple[ast.Assign, ast.Subscript, str]]:
    """Yield the assignments of environment variables."""
    for node in script.nodes:
        if (
            isinstance(node, ast.Assign)
            and len(node.targets) == 1
            and isinstance(node.targets[0], ast.Subscript)
        ):
            target = node.targets[0]
            name = target.slice.value if isinstance(target.slice, ast.Constant) else ""
            if script.dotted(target.value) == "os.environ":
                yield node, target, str(name)


def _identity(script: Script, group: Group) -> Iterator[Edit | Remark]:
    """The rank and the number of ranks, which the launcher tells."""
    if not group.spawns:
        for node, _, name in _environment(script):
            if name in IDENTITY:
                yield Remark(
                    node.lineno,
                    f"remove this: it overwrites {name}, which the launcher sets",
                    must=True,
                )
        for call in script.calls_of(*GROUP):
            for keyword in call.keywords:
                is_number = isinstance(keyword.value, ast.Constant) and keyword.value.value != -1
                if keyword.arg in ("rank", "world_size") and is_number:
                    yield Remark(
                        call.lineno, f"remove {keyword.arg}=...: the launcher sets it", must=True
                    )
    yield from _tasks(script)
    backends = [(each.value, call) for call in script.calls_of(*GROUP) for each in _texts(call)]
    if "gloo" not in [name for name, _ in backends]:  # otherwise the script chooses
        for call in dict.fromkeys(call for name, call in backends if name == "nccl"):
            yield Remark(call.lineno, 'the backend "nccl" needs GPUs; "gloo" also works on the CPU')


def _tasks(script: Script) -> Iterator[Remark]:
    """Ranks by Slurm's tasks. A script that also reads the launcher's variables may choose between
    them.
    """
    overwritten = {target.slice for _, target, _ in _environment(script)}
    texts = [each for each in _texts(script.tree) if each not in overwritten]
    read, tasks = {each.value for each in texts}, [each for each in texts if each.value in SLURM]
    alone = [each for each in tasks if SLURM[str(each.value)] not in read]
    for constant in (alone or tasks)[:1]:
        name = str(constant.value)
        text = (
            f"{name} is about Slurm tasks, and Paceline starts one per node: read RANK, LOCAL_RANK"
        )
        yield Remark(
            constant.lineno,
            f"{text} and WORLD_SIZE, or submit it with --style srun",
            must=bool(alone),
        )


def _texts(node: ast.AST) -> list[ast.Constant]:
    return [
        each
        for each in ast.walk(node)
        if isinstance(each, ast.Constant) and isinstance(each.value, str)
    ]


def _local_rank(script: Script) -> Iterator[Edit | Remark]:
    """`--local_rank`, which launchers no longer pass."""
    found = False
    for call in script.calls:
        flags = [each.value for each in call.args if isinstance(each, ast.Constant)]
        is_option = isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"
        if not is_option or not {"--local_rank", "--local-rank"} & set(flags):
            continue
        text, why = (
            'int(os.environ.get("LOCAL_RANK", 0))',
            "launchers no longer pass this option, but set LOCAL_RANK",
        )
        default = next((each for each in call.keywords if each.arg == "default"), None)
        if default is not None and "LOCAL_RANK" in ast.dump(default):
            continue
        found = True
        if default is not None:
            yield script.source.replace(default.value, text, why)
        else:
            yield script.source.add_argument(call, f"default={text}", why)
    known = [
        alias.name
        for each in script.tree.body
        if isinstance(each, ast.Import)
        for alias in each.names
    ]
    if found and "os" not in known:
        yield import_line(script, "os")


def _forwards(found: Training) -> Iterator[Remark]:
    """`model.module(x)` in training: DDP does not see the forward, and averages no gradients."""
    script = found.script
    parts = [*found.step_loops, *script.reachable(found.step_loops)]
    seen = set()
    for call in (node for part in parts for node in ast.walk(part) if isinstance(node, ast.Call)):
        is_inner = isinstance(call.func, ast.Attribute) and call.func.attr == "module"
        if is_inner and call not in seen and not _without_gradients(script, call):
            seen.add(call)
            text = (
                "this bypasses DDP, so gradients are not averaged over the ranks: call the "
                "wrapped model itself"
            )
            yield Remark(call.lineno, text, must=True)


def _unwrapped(found: Training) -> Iterator[Remark]:
    """A model that is trained beside the one with DDP."""
    script, wrappers = found.script, found.script.calls_of(*WRAPPER)
    known = {
        call for each in wrappers for given in each.args[:1] for call in found.origins.of(given)
    } | set(wrappers)
    if not known or any(
        "fsdp" in each or "fully_shard" in each for each in script.imports.values()
    ):
        return
    for model, statement in found.models:
        made = found.origins.of(model)
        if made and not made & known:
            what = script.source.text_of(model)
            text = (
                f"`{what}` is trained here, but not wrapped in DDP, so its gradients are not "
                "averaged over the ranks"
            )
            yield Remark(statement.lineno, text, must=True)


def _without_gradients(script: Script, node: ast.AST) -> bool:
    for each in script.ancestors(node):
        marks: list[ast.expr] = (
            [item.context_expr for item in each.items] if isinstance(each, ast.With) else []
        )
        marks += each.decorator_list if isinstance(each, ast.FunctionDef) else []
        if any(word in ast.dump(mark) for mark in marks for word in ("no_grad", "inference_mode")):
            return True
    return False
