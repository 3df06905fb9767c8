"""The cluster: what its partitions have, what is free in them, and your jobs in the queue."""

from __future__ import annotations

from typing import Any

from paceline.cluster.slurm.node_use import PartitionUse
from paceline.errors import ClusterError
from paceline.watch.scheduler.node_answer import query_node_use
from paceline.watch.scheduler.shared_answer import query_queue

MAX_JOBS = 1000


def read_cluster() -> dict[str, Any]:
    """Return partitions and queue from answers of Slurm that all processes share; or why there are none."""
    try:
        partitions, queue = query_node_use(), query_queue()
    except ClusterError as error:
        return {"partitions": [], "queue": [], "problem": " ".join(filter(None, (error.message, error.hint)))}
    jobs = [
        {
            "job": each.id,
            "state": each.label,
            "reason": each.reason,
            "nodes": each.nodes,
            "start": "" if each.start in ("N/A", "Unknown") else each.start.replace("T", " "),
            "elapsed": each.elapsed,
        }
        for each in queue[:MAX_JOBS]
    ]
    return {"partitions": [_partition(each) for each in partitions], "queue": jobs, "problem": ""}


def _partition(use: PartitionUse) -> dict[str, Any]:
    return {
        "partition": f"{use.name} (default)" if use.is_default else use.name,
        "state": "up" if use.is_up else "down",
        "time_limit": use.time_limit,
        "nodes": use.nodes,
        "idle_nodes": use.idle_nodes,
        "cpus": use.cpus,
        "free_cpus": use.free_cpus,
        "gpus": _gpus(use.gpus),
        "free_gpus": _gpus(use.free_gpus),
    }


def _gpus(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}".rstrip() for kind, count in counts.items()) or "0"
