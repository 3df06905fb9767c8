"""The variables that ranks get: what torchrun would give them, and ours."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.agent.workers.zygote.start import THREADS, count_of
from paceline.contract import env
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import RunFolder

if TYPE_CHECKING:
    from paceline.agent.placement import Place

STREAMS = "PACELINE_STREAMS"  # torchrun's ranks: where each finds the pipes that its agent reads
PARENT = "PACELINE_PARENT"  # fresh ranks: the process that they must not outlive

# What was meant for a agent: a secret, and what would mislead a agent that a rank starts in turn.
# wandb's: a service that serves the process around the agent, on this node alone.
REMOVED = (
    env.TOKEN,
    env.ZYGOTE,
    env.RENDEZVOUS,
    env.AGENT,
    STREAMS,
    PARENT,
    "WANDB_SERVICE",
)


def thread_variables(threads: int) -> dict[str, str]:
    """Thread counts, exported before torch is imported. OpenBLAS starts its threads at import: one, then."""
    return {THREADS: str(threads), "MKL_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": "1"}


def threads_of(launch_spec: LaunchSpec, environ: Mapping[str, str]) -> int:
    """A rank's share of the cores, unless the user says another number: by name, or in the environment."""
    said = (count_of(each.get(THREADS, "")) for each in (launch_spec.variables, environ))
    return next((number for number in said if number), launch_spec.threads)


def common_variables(
    launch_spec: LaunchSpec, *, environ: Mapping[str, str], attempt: int, beat: str, extra: Mapping[str, str]
) -> dict[str, str]:
    """Equal on all ranks of a node. What was asked for by name wins over what is worked out here."""
    inherited = {name: value for name, value in environ.items() if name not in REMOVED}
    # What the user has exported stays; a value that means nothing would stop OpenMP from starting as it should.
    exported = {THREADS: environ[THREADS]} if count_of(environ.get(THREADS, "")) else {}
    return {
        **tracker_variables(launch_spec, RunFolder(Path(environ[env.RUN])), environ),
        **inherited,
        **thread_variables(threads_of(launch_spec, environ)),
        **exported,
        **folder_variables(launch_spec, RunFolder(Path(environ[env.RUN])), attempt=attempt),
        **extra,
        **launch_spec.variables,
        env.RUN: environ[env.RUN],
        env.ATTEMPT: str(attempt),
        env.HEARTBEAT: beat,
    }


def folder_variables(launch_spec: LaunchSpec, run: RunFolder, *, attempt: int) -> dict[str, str]:
    """Where things are, for scripts that do not ask the runtime."""
    return {
        env.SOURCE_DIR: launch_spec.source,
        env.PROJECT: launch_spec.project,
        env.SCRATCH_DIR: launch_spec.scratch,
        env.EXPERIMENT: launch_spec.experiment,
        env.CHECKPOINTS: str(run.checkpoints),
        env.LOGS: str(run.attempt(attempt).path),
    }


def tracker_variables(launch_spec: LaunchSpec, run: RunFolder, environ: Mapping[str, str]) -> dict[str, str]:
    """Where wandb keeps its files, also for scripts that use it by themselves: not in the home folder."""
    cache = Path(launch_spec.scratch or run.path) / ".cache"
    found = {
        "WANDB_DIR": str(run.trackers),
        "WANDB_CACHE_DIR": str(cache / "wandb"),
        "WANDB_DATA_DIR": str(cache / "wandb-data"),
    }
    home = environ.get("HOME", "")
    if not home or not os.path.isdir(os.path.join(home, ".config", "wandb")):  # else it is only read
        found["WANDB_CONFIG_DIR"] = str(cache / "wandb-config")
    return found


def node_variables(launch_spec: LaunchSpec, place: Place, *, address: str, port: int) -> dict[str, str]:
    """What a process that stands for a whole node needs (style spawn), and every rank too."""
    return {
        env.MASTER_ADDR: address,
        env.MASTER_PORT: str(port),
        env.GROUP_RANK: str(place.node),
        env.GROUP_WORLD_SIZE: str(place.nodes),
        env.LOCAL_WORLD_SIZE: str(place.local_world_size),
        env.RUN_ID: launch_spec.run_id,
    }


def rank_variables(launch_spec: LaunchSpec, *, rank: int, local_rank: int, attempt: int) -> dict[str, str]:
    """One rank's own; the rest of torchrun's words are there for programs that look for them."""
    return {
        env.RANK: str(rank),
        env.LOCAL_RANK: str(local_rank),
        env.WORLD_SIZE: str(launch_spec.world_size),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(launch_spec.world_size),
        "ROLE_NAME": "default",
        "TORCHELASTIC_RESTART_COUNT": str(attempt - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(launch_spec.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 itself serves the store
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
