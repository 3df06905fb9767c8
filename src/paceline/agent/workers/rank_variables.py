"""The environment variables of the ranks: those that torchrun sets, and ours."""

from __future__ import annotations

import hashlib
import os
import platform
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.agent.workers.zygote.start import THREADS, parse_thread_count, thread_count
from paceline.contract import env
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import FLIGHT_RECORDER, RunFolder

if TYPE_CHECKING:
    from paceline.agent.launcher_placement import Placement

# Where torch keeps code that it has compiled, so that the next job of a project need not do it
# again. Torch's own defaults are the temporary folder, which most clusters empty after each job,
# and the home folder.
CACHE = "TORCHINDUCTOR_CACHE_DIR"  # torch.compile; Triton's files are in it, too
EXTENSIONS = "TORCH_EXTENSIONS_DIR"  # C++ and CUDA extensions that are built when they are imported

# Meant for the agent alone: a secret, and variables that would mislead an agent started by a rank.
# wandb's is the address of a service that belongs to the process around the agent, on this node
# alone.
REMOVED = (
    env.TOKEN,
    env.ZYGOTE,
    env.RENDEZVOUS,
    env.AGENT,
    env.OUTPUT_PIPES,
    env.PARENT,
    "WANDB_SERVICE",
)


def thread_variables(threads: int) -> dict[str, str]:
    """Return the thread counts to export before torch is imported. OpenBLAS starts its threads at
    import: one.
    """
    return {THREADS: str(threads), "MKL_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": "1"}


def common_variables(
    launch_spec: LaunchSpec,
    *,
    environ: Mapping[str, str],
    attempt: int,
    heartbeat: str,
    extra: Mapping[str, str],
) -> dict[str, str]:
    """Return the variables that all ranks of a node share. The user's own values win over computed
    ones.
    """
    inherited = {name: value for name, value in environ.items() if name not in REMOVED}
    # An exported count stays, but an invalid one would break the start of OpenMP.
    exported = {THREADS: environ[THREADS]} if parse_thread_count(environ.get(THREADS, "")) else {}
    run = RunFolder(Path(environ[env.RUN]))
    return {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # as torchrun does
        **flight_recorder_variables(launch_spec, run, attempt=attempt),
        **tracker_variables(launch_spec, run, environ),
        **framework_variables(launch_spec),
        **compile_cache_variables(launch_spec),
        **inherited,
        **thread_variables(thread_count(launch_spec, environ)),
        **exported,
        **folder_variables(launch_spec, run, attempt=attempt),
        **extra,
        **launch_spec.variables,
        env.RUN: environ[env.RUN],
        env.ATTEMPT: str(attempt),
        env.HEARTBEAT: heartbeat,
    }


def flight_recorder_variables(
    launch_spec: LaunchSpec, run: RunFolder, *, attempt: int
) -> dict[str, str]:
    """Have NCCL keep its last collectives, and write them to the attempt's folder if one of them
    times out.
    """
    if not launch_spec.gpus:
        return {}
    path = str(run.attempt(attempt).path / FLIGHT_RECORDER)
    return {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": path,
    }


def folder_variables(launch_spec: LaunchSpec, run: RunFolder, *, attempt: int) -> dict[str, str]:
    """Return the run's names and folders, for scripts that do not use the runtime."""
    return {
        env.SOURCE_DIR: launch_spec.source,
        env.PROJECT: launch_spec.project,
        env.SCRATCH_DIR: launch_spec.scratch,
        env.EXPERIMENT: launch_spec.experiment,
        env.CHECKPOINTS: str(run.checkpoints),
        env.LOGS: str(run.attempt(attempt).path),
    }


def tracker_variables(
    launch_spec: LaunchSpec, run: RunFolder, environ: Mapping[str, str]
) -> dict[str, str]:
    """Keep wandb's files out of the home folder, for scripts that call wandb themselves too."""
    cache = Path(launch_spec.scratch or run.path) / ".cache"
    variables = {
        "WANDB_DIR": str(run.trackers),
        "WANDB_CACHE_DIR": str(cache / "wandb"),
        "WANDB_DATA_DIR": str(cache / "wandb-data"),
    }
    home = environ.get("HOME", "")
    # an existing one is only read
    if not home or not os.path.isdir(os.path.join(home, ".config", "wandb")):
        variables["WANDB_CONFIG_DIR"] = str(cache / "wandb-config")
    return variables


def framework_variables(launch_spec: LaunchSpec, devices: Path = Path("/dev")) -> dict[str, str]:
    """Return what frameworks need besides torchrun's variables in order to train on the same ranks
    and devices.

    Accelerate takes ranks on the CPU for single processes, unless it is told to use the CPU.
    """
    on_cpu = bool(launch_spec.runtime.get("cpu"))
    if launch_spec.world_size > 1 and not launch_spec.gpus:
        # GPUs that are not counted, such as Intel's, have device files too. A script may have been
        # written for those.
        on_cpu |= launch_spec.style == "accelerate" or not (devices / "dri").exists()
    return {"ACCELERATE_USE_CPU": "true"} if on_cpu else {}


def compile_cache_variables(launch_spec: LaunchSpec) -> dict[str, str]:
    """Return the variables for torch. Empty if there is no folder of this user alone: torch runs
    code from it.
    """
    if not launch_spec.scratch:
        return {}
    try:
        own = _own_folder(Path(launch_spec.scratch))
        if own is None:
            return {}
        project = Path(launch_spec.project or "default", node_image())
        # Torch tells interpreters apart only in its default folder.
        python = hashlib.sha256(os.fsencode(launch_spec.python)).hexdigest()[:12]
        folders = {
            CACHE: own / "compile" / project,
            EXTENSIONS: own / "extensions" / project / python,
        }
        for folder in folders.values():
            folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # a full disk, or a folder that only others may write
        return {}
    return {name: str(folder) for name, folder in folders.items()}


def _own_folder(scratch: Path) -> Path | None:
    """Return this user's own folder for caches; None if others could change it, or put another one
    in its place.
    """
    parent, path = scratch.stat(), scratch / f".cache-{os.geteuid()}"
    if parent.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not parent.st_mode & stat.S_ISVTX:
        return None  # everybody who may write there may rename it
    path.mkdir(mode=stat.S_IRWXU, exist_ok=True)
    status = path.lstat()
    is_private = stat.S_ISDIR(status.st_mode) and stat.S_IMODE(status.st_mode) == stat.S_IRWXU
    return path if is_private and status.st_uid == os.geteuid() else None


def node_image() -> str:
    """Return a name for nodes that can run each other's compiled code: the same system and kind of
    processor.

    Torch itself tells GPUs and its versions apart, but it compiles for the processor that it runs
    on.
    """
    facts = [platform.machine(), *platform.libc_ver()]
    try:
        system = platform.freedesktop_os_release()
        facts += [system.get("ID", ""), system.get("VERSION_ID", "")]
    except OSError:
        pass
    digest = hashlib.sha256("|".join([*facts, _processor()]).encode()).hexdigest()
    return f"{platform.machine()}-{digest[:12]}"


def _processor() -> str:
    """Return the instructions that the first processor knows."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith(("flags", "Features")):
                    return " ".join(sorted(line.partition(":")[2].split()))
    except OSError:
        pass
    return platform.processor()


def node_variables(
    launch_spec: LaunchSpec, placement: Placement, *, address: str, port: int
) -> dict[str, str]:
    """Return what every rank needs, and a process that spawns the ranks of a node itself (style
    spawn).
    """
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "GROUP_RANK": str(placement.node),
        "GROUP_WORLD_SIZE": str(placement.nodes),
        "LOCAL_WORLD_SIZE": str(placement.local_world_size),
        "TORCHELASTIC_RUN_ID": str(launch_spec.run_number),
    }


def rank_variables(
    launch_spec: LaunchSpec, *, rank: int, local_rank: int, attempt: int
) -> dict[str, str]:
    """Return one rank's own variables, with the rest of torchrun's for programs that read them."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(launch_spec.world_size),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(launch_spec.world_size),
        "ROLE_NAME": "default",
        "TORCHELASTIC_RESTART_COUNT": str(attempt - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(launch_spec.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 serves the store itself
    }
