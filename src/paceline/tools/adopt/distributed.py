"""Scripts that are distributed already: any sign of it means that they run as they are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from paceline.contract.frameworks import PRESETS, Preset
from paceline.tools.adopt.script import Script, last_name
from paceline.tools.adopt.source_edits import Remark

FRAMEWORKS = {  # package, and the name of the framework
    "accelerate": "Accelerate",
    "lightning": "Lightning",
    "pytorch_lightning": "Lightning",
    "lightning_fabric": "Lightning Fabric",
    "deepspeed": "DeepSpeed",
    "horovod": "Horovod",
    "colossalai": "Colossal-AI",
    "composer": "Composer",
    "fairscale": "FairScale",
    "megatron": "Megatron",
    "ray": "Ray",
    "torch_xla": "PyTorch/XLA",
}
RANK = {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID", "WORLD_SIZE": "SLURM_NTASKS"}
VARIABLES = (
    *RANK,
    *RANK.values(),
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_NAME = re.compile(
    r"(?i)(\w*distributed(?!sampler_\w)\w*|(?:init_|setup_|use_|is_)?f?s?ddp\d?|fsdp\d?|fully_shard"
    r"|local_rank|world_size|get_(?:local_)?rank|init_device_mesh|device_?mesh|parallelize_module"
    r"|init_process_group|rank_zero_only|(?:is_)?main_process|tensor_parallel)$"
)
_OPTION = re.compile(r"--(local[_-]rank|world[_-]size|distributed|dist[_-]\w+)$")
SPAWN = ("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes")
_FIXED = re.compile(r"tcp://[\w.-]+:\d+")


def framework_of(script: Script, preset: Preset | None) -> str:
    """Return the name of the framework that starts or joins the ranks; "" if there is none."""
    known = sorted(FRAMEWORKS[each] for each in script.packages() & FRAMEWORKS.keys())
    return f"the {preset.name}" if preset is not None else next(iter(known), "")


def preset_of(script: Script) -> Preset | None:
    """Return the framework whose trainer a script uses, if it does not train in a loop itself."""
    text = script.source.text
    own = any(last_name(call) == "backward" for call in script.calls)
    return next((each for each in PRESETS if each.fits(text) and not own), None)


def sign_of(script: Script) -> tuple[int, str] | None:
    """Return the first sign that a script is distributed: its line, and what is there."""
    found = []
    for node in script.nodes:
        given = (_identifier(node), *_imported(node))
        names = [name for name in given if any(map(_NAME.match, name.split(".")))]
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, str) and (value in VARIABLES or _OPTION.match(value)):
            names.append(value)
        if isinstance(node, ast.Call) and script.dotted(node.func) in SPAWN:
            names.append("torch.multiprocessing")
        if names:
            found.append((getattr(node, "lineno", 1), names[0]))
    return min(found, default=None)


def _identifier(node: ast.AST) -> str:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return node.name
    return last_name(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""


def _imported(node: ast.AST) -> list[str]:
    if not isinstance(node, (ast.Import, ast.ImportFrom)):
        return []
    names = [alias.name for alias in node.names]
    names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
    return names


def needs_spawn(script: Script) -> bool:
    """Whether a script can only start its ranks itself, because it never reads those it gets."""
    read = {node.value for node in script.nodes if isinstance(node, ast.Constant)}
    return bool(script.calls_of(*SPAWN)) and read.isdisjoint(RANK)


def find_mistakes(script: Script) -> Iterator[Remark]:
    """What works on one machine only, or trains differently on several ranks."""
    spawns = bool(script.calls_of(*SPAWN))
    texts = [node for node in script.nodes if isinstance(node, ast.Constant)]
    values = {str(node.value): node.lineno for node in texts}
    for node in script.nodes if not spawns else ():
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(target, ast.Subscript) and script.dotted(target.value) == "os.environ":
            name = getattr(target.slice, "value", "")
            constant = isinstance(getattr(node, "value", None), ast.Constant)
            if constant and name in ("MASTER_ADDR", "MASTER_PORT", *RANK):
                text = f"this overwrites {name}, which Paceline sets as torchrun does: use "
                yield Remark(
                    target.lineno, f'{text}os.environ.setdefault("{name}", ...)', must=True
                )
    for text, line in values.items():
        if _FIXED.match(text):
            what = "a fixed address: nodes cannot find each other, and two runs on one node collide"
            yield Remark(line, f'{what}. Use "env://"')
