"""The variables that ranks get: what torchrun would give them, and ours."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from paceline import contract
from paceline.contract import Order, RunFolder
from paceline.node.opening import THREADS, count_of

if TYPE_CHECKING:
    from paceline.node.place import Place

STREAMS = "PACELINE_STREAMS"  # torchrun's ranks: where each finds the pipes that its launcher reads
PARENT = "PACELINE_PARENT"  # fresh ranks: the process that they must not outlive

# What was meant for a launcher: a secret, and what would mislead a launcher that a rank starts in turn.
# wandb's: a service that serves the process around the launcher, on this node alone.
REMOVED = (
    contract.TOKEN,
    contract.HEADSTART,
    contract.HEAD,
    contract.LAUNCHER,
    STREAMS,
    PARENT,
    "WANDB_SERVICE",
)


def thread_variables(threads: int) -> dict[str, str]:
    """Thread counts, exported before torch is imported. OpenBLAS starts its threads at import: one, then."""
    return {THREADS: str(threads), "MKL_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": "1"}


def threads_of(order: Order, environ: Mapping[str, str]) -> int:
    """A rank's share of the cores, unless the user says another number: by name, or in the environment."""
    said = (count_of(each.get(THREADS, "")) for each in (order.variables, environ))
    return next((number for number in said if number), order.threads)


def common_variables(
    order: Order, *, environ: Mapping[str, str], attempt: int, beat: str, extra: Mapping[str, str]
) -> dict[str, str]:
    """Equal on all ranks of a node. What was asked for by name wins over what is worked out here."""
    inherited = {name: value for name, value in environ.items() if name not in REMOVED}
    # What the user has exported stays; a value that means nothing would stop OpenMP from starting as it should.
    exported = {THREADS: environ[THREADS]} if count_of(environ.get(THREADS, "")) else {}
    return {
        **tracker_variables(order, RunFolder(Path(environ[contract.RUN])), environ),
        **inherited,
        **thread_variables(threads_of(order, environ)),
        **exported,
        **folder_variables(order, RunFolder(Path(environ[contract.RUN])), attempt=attempt),
        **extra,
        **order.variables,
        contract.RUN: environ[contract.RUN],
        contract.ATTEMPT: str(attempt),
        contract.BEAT: beat,
    }


def folder_variables(order: Order, run: RunFolder, *, attempt: int) -> dict[str, str]:
    """Where things are, for scripts that do not ask the runtime."""
    return {
        contract.SOURCE_DIR: order.source,
        contract.PROJECT_NAME: order.project,
        contract.SCRATCH_DIR: order.scratch,
        contract.EXP_NAME: order.experiment,
        contract.CHECKPOINTS: str(run.checkpoints),
        contract.LOGS: str(run.attempt(attempt).path),
    }


def tracker_variables(order: Order, run: RunFolder, environ: Mapping[str, str]) -> dict[str, str]:
    """Where wandb keeps its files, also for scripts that use it by themselves: not in the home folder."""
    cache = Path(order.scratch or run.path) / ".cache"
    found = {
        "WANDB_DIR": str(run.trackers),
        "WANDB_CACHE_DIR": str(cache / "wandb"),
        "WANDB_DATA_DIR": str(cache / "wandb-data"),
    }
    home = environ.get("HOME", "")
    if not home or not os.path.isdir(os.path.join(home, ".config", "wandb")):  # else it is only read
        found["WANDB_CONFIG_DIR"] = str(cache / "wandb-config")
    return found


def node_variables(order: Order, place: Place, *, address: str, port: int) -> dict[str, str]:
    """What a process that stands for a whole node needs (style spawn), and every rank too."""
    return {
        contract.MASTER_ADDR: address,
        contract.MASTER_PORT: str(port),
        contract.GROUP_RANK: str(place.node),
        contract.GROUP_WORLD_SIZE: str(place.nodes),
        contract.LOCAL_WORLD_SIZE: str(place.local_world_size),
        contract.RUN_ID: order.run_id,
    }


def rank_variables(order: Order, *, rank: int, local_rank: int, attempt: int) -> dict[str, str]:
    """One rank's own; the rest of torchrun's words are there for programs that look for them."""
    return {
        contract.RANK: str(rank),
        contract.LOCAL_RANK: str(local_rank),
        contract.WORLD_SIZE: str(order.world_size),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(order.world_size),
        "ROLE_NAME": "default",
        "TORCHELASTIC_RESTART_COUNT": str(attempt - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(order.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 itself serves the store
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
