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
from paceline.contract.run_folder import FLIGHT_RECORDER, AttemptFolder, RunFolder

if TYPE_CHECKING:
    from paceline.agent.workers.started_ranks import Launch

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


def common_variables(launch: Launch) -> dict[str, str]:
    """Return the variables of every process of a node. The user's own values win over computed
    ones.
    """
    spec, placement, environ = launch.launch_spec, launch.placement, launch.environ
    # An exported count stays, but an invalid one would break the start of OpenMP.
    exported = {THREADS: environ[THREADS]} if parse_thread_count(environ.get(THREADS, "")) else {}
    run, attempt = RunFolder(Path(environ[env.RUN])), launch.attempt
    return {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # as torchrun does
        **flight_recorder_variables(spec, attempt),
        **tracker_variables(spec, run, environ),
        **framework_variables(spec),
        **compile_cache_variables(spec),
        **{name: value for name, value in environ.items() if name not in REMOVED},
        **thread_variables(thread_count(spec, environ)),
        **exported,
        # the run's names and folders, for scripts that do not use the runtime
        env.SOURCE_DIR: spec.source,
        env.PROJECT: spec.project,
        env.SCRATCH_DIR: spec.scratch,
        env.EXPERIMENT: spec.experiment,
        env.CHECKPOINTS: str(run.checkpoints),
        env.LOGS: str(attempt.path),
        **launch.extra,
        **spec.variables,
        env.RUN: environ[env.RUN],
        env.ATTEMPT: str(attempt.number),
        env.HEARTBEAT: launch.heartbeat,
        "MASTER_ADDR": launch.address,
        "MASTER_PORT": str(launch.port),
        "GROUP_RANK": str(placement.node),
        "GROUP_WORLD_SIZE": str(placement.nodes),
        "LOCAL_WORLD_SIZE": str(placement.local_world_size),
        "TORCHELASTIC_RUN_ID": str(spec.run_number),
    }


def rank_variables(launch: Launch, rank: int, local_rank: int) -> dict[str, str]:
    """Return one rank's own variables, with the rest of torchrun's for programs that read them."""
    world_size = str(launch.launch_spec.world_size)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": world_size,
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": world_size,
        "ROLE_NAME": "default",
        "TORCHELASTIC_RESTART_COUNT": str(launch.attempt.number - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(launch.launch_spec.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 serves the store itself
    }


def flight_recorder_variables(launch_spec: LaunchSpec, attempt: AttemptFolder) -> dict[str, str]:
    """Have NCCL keep its last collectives, and write them to the attempt's folder if one of them
    times out.
    """
    if not launch_spec.gpus:
        return {}
    return {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(attempt.path / FLIGHT_RECORDER),
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
    """Return a name for nodes that can run each other's compiled code: the same C library and
    kind of processor.

    Torch itself tells GPUs and its versions apart, but it compiles for the processor that it runs
    on.
    """
    facts = [platform.machine(), *platform.libc_ver(), _processor()]
    digest = hashlib.sha256("|".join(facts).encode()).hexdigest()
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
