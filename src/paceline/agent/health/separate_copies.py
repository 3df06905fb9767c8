"""Warns if the ranks would run the script independently, each as if there were no others.

The script, and the modules of the project that it imports, are only read. They must contain no word
that could be about other ranks, and import no package that could form a group by itself: a wrong
warning would be worse than none.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from paceline.contract.frameworks import imported_names, read_sources
from paceline.contract.launch_spec import LaunchSpec

# Variables of ranks, process groups, and other processes that may do the work.
_AWARE = re.compile(
    r"RANK|WORLD_SIZE|MASTER_|PROCID|MPI|distributed|spawn|fork|exec[lv]|subprocess|multiprocess"
    r"|os\.system|paceline"
)
# Packages that do nothing about other ranks unless the script asks for it.
_UNCONCERNED = {
    *("PIL", "cv2", "datasets", "einops", "h5py", "huggingface_hub", "matplotlib", "numpy"),
    *("pandas", "psutil", "rich", "safetensors", "scipy", "seaborn", "sentencepiece", "sklearn"),
    *("tensorboard", "tiktoken", "tokenizers", "torch", "torchaudio", "torchmetrics"),
    *("torchvision", "tqdm", "wandb", "yaml"),
}


def runs_copies(spec: LaunchSpec) -> bool:
    """Whether the ranks of this script certainly know nothing of each other."""
    if spec.world_size == 1 or spec.style == "mpirun":
        return False
    program = spec.in_snapshot(spec.program)
    import_path = [spec.in_snapshot(path) for path in spec.import_path]
    sources = read_sources(program, is_module=spec.is_module, import_path=import_path)
    if not sources or any(map(_AWARE.search, sources)):
        return False
    try:
        ast.parse(sources[0])
    except (SyntaxError, ValueError):  # it will not run at all
        return False
    packages = {name.partition(".")[0] for text in sources for name in imported_names(text)}
    folders = [Path(program).parent, *map(Path, import_path)]
    others = packages - {"", *sys.stdlib_module_names, *_UNCONCERNED}
    return all(
        any((folder / name).exists() or (folder / f"{name}.py").exists() for folder in folders)
        for name in others
    )


def describe_copies(processes: int, spec: LaunchSpec) -> list[str]:
    """Return the warning in lines."""
    if spec.style == "spawn":
        count = "1 process runs" if processes == 1 else f"{processes} processes run"
        return [
            f"warning: {count} this script, not {spec.world_size}: with --style spawn, a script "
            "starts its own ranks, and this one starts none",
            "call paceline.spawn or mp.spawn, or use --style fork and form a process group",
        ]
    return [
        f"warning: apparently {processes} processes run this script independently: "
        "it neither forms a process group nor reads its rank",
        "use --nproc 1 to run it once, or let the ranks train together with paceline.session, or "
        "with torch.distributed.init_process_group and DistributedDataParallel",
    ]
