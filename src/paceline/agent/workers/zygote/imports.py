"""What a zygote imports before it forks, and whether it may fork afterwards."""

from __future__ import annotations

import gc
import importlib
import os
import traceback
from typing import Any

from paceline.agent.workers import fork_safety
from paceline.agent.workers.rank_variables import thread_variables
from paceline.agent.workers.zygote.start import ZygoteOptions
from paceline.contract import frameworks

NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"


def shared_modules(options: ZygoteOptions, folder: str) -> list[str]:
    """Return torch, and what the script in this folder needs of torch and of Paceline. None is the
    user's own.
    """
    program = options.program if options.is_module else os.path.join(folder, options.program)
    _, source = frameworks.read_program(program, is_module=options.is_module, import_path=[folder])
    return ["torch", "torch.distributed", *fork_safety.modules_to_preload(source)]


def import_modules(
    names: list[str], *, threads: int, required: bool = False
) -> dict[str, Any] | None:
    """Import modules. Returns a message for the agent if ranks cannot be forked, or if a required
    one is missing.
    """
    os.environ.update(thread_variables(threads))
    nvml_check = os.environ.get(NVML_CHECK)
    os.environ[NVML_CHECK] = "1"  # a check for GPUs must not open the driver in this process
    gc.disable()
    for name in names:
        try:
            importlib.import_module(name)
        except BaseException:
            if required:
                return {"kind": "preload_failed", "module": name, "why": traceback.format_exc()}
            # The script will raise the same error, with a better traceback.
        if fork_safety.count_threads() > 1:
            count = fork_safety.count_threads() - 1
            return {
                "kind": "unsafe",
                "why": f"importing {name} started {count} thread{'s'[: count > 1]}",
            }
        if fork_safety.is_device_in_use():
            return {"kind": "unsafe", "why": f"importing {name} opened the GPU driver"}
    if nvml_check is None:
        del os.environ[NVML_CHECK]
    importlib.import_module("paceline.agent.workers.bootstrap")
    # Ranks share the pages that nobody writes to. No collection before the freeze: it takes a
    # twelfth of the import time and frees little.
    gc.freeze()
    gc.enable()
    return None
