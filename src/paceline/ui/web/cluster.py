"""The cluster: what its partitions have, what is free in them, and your jobs in the queue."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from paceline.errors import ClusterError
from paceline.slurm.job_states import WAITING, JobState
from paceline.slurm.node_use import PartitionUse, ask_node_use, parse_node_use
from paceline.spec.shell_text import to_type
from paceline.watch import origin
from paceline.watch.overview import Overview
from paceline.watch.reasons import expected_start, explain_reason
from paceline.watch.scheduler import query_queue

MAX_JOBS = 1000
NOTHING = {"cluster": "", "partitions": [], "queue": [], "problem": "", "command": ""}
NOT_COPIED = (
    "Its nodes and its queue are not listed on this machine. To see what it has and what is free:"
)


def read_cluster(runs: Mapping[str, Overview]) -> dict[str, Any]:
    """Ask Slurm for partitions and queue; or return why there are none.

    `runs` are those that are known, by their job.
    """
    if (copy := origin.shown()) is not None:
        about = {"cluster": copy.cluster, "command": to_type("doctor")}
        return {**NOTHING, **about, "problem": NOT_COPIED}
    try:
        partitions, queue = parse_node_use(ask_node_use()), query_queue()
    except ClusterError as error:
        problem = " ".join(filter(None, (error.message, error.hint)))
        return {**NOTHING, "problem": problem}
    jobs = [_job(each, runs.get(each.id)) for each in queue[:MAX_JOBS]]
    return {**NOTHING, "partitions": [_partition(each) for each in partitions], "queue": jobs}


def _job(state: JobState, run: Overview | None) -> dict[str, Any]:
    is_waiting = state.phase == WAITING
    is_known = state.start not in ("N/A", "Unknown") and (
        not is_waiting or expected_start(state, time.time()) is not None
    )
    return {
        "job": state.id,
        "run": run and {name: getattr(run, name) for name in ("key", "name", "program", "trial")},
        "state": state.label,
        "reason": explain_reason(state.reason, gpus=False) if is_waiting else "",
        "nodes": state.nodes,
        "start": state.start.replace("T", " ") if is_known else "",
        "elapsed": "" if is_waiting else state.elapsed,
    }


def _partition(use: PartitionUse) -> dict[str, Any]:
    gpus = [
        {"kind": kind, "count": count, "free": use.free_gpus.get(kind, 0)}
        for kind, count in use.gpus.items()
    ]
    return {
        "partition": f"{use.name} (default)" if use.is_default else use.name,
        "state": "up" if use.is_up else "down",
        "time_limit": use.time_limit,
        "nodes": use.nodes,
        "idle_nodes": use.idle_nodes,
        "cpus": use.cpus,
        "free_cpus": use.free_cpus,
        "gpus": gpus,
    }
