"""How planning scales: a Plan, the host list and the rank table for thousands of nodes.

    python benchmarks/control.py [--nodes 4096] [--ranks 8]

Wanted: all of it under a second, and a script that does not grow with the nodes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from paceline.plan.hostlist import compress, expand, rank_table
from paceline.plan.site import Site
from paceline.plan.slurm import SlurmPlan, plan_slurm
from paceline.spec import Flag, Program, load_job

from machine import describe, show

LIMIT = 1.0


def make_plan(nodes: int, ranks: int) -> SlurmPlan:
    flags = [
        Flag("--nodes", "job.nodes", nodes),
        Flag("--gpus", "job.gpus_per_node", ranks),
        Flag("--time", "job.time", "2h"),
    ]
    job = load_job(Program("train.py", ("--lr", "0.1")), flags=flags, cwd=Path("/"))
    site = Site(Path("/scratch"), "project", "default", "20260101-000000-abcd")
    return plan_slurm(job, site=site, environ={"PATH": "/usr/bin:/bin"}, python="/usr/bin/python3")


def timed(work: Callable[[], object], repeats: int = 5) -> float:
    took = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=4096)
    parser.add_argument("--ranks", type=int, default=8, help="per node")
    asked = parser.parse_args()
    describe(f"planning {asked.nodes} nodes x {asked.ranks} ranks")
    listed = f"gpu[0001-{asked.nodes:04d}]"
    hosts = expand(listed)
    parts = {
        "plan (order, script)": timed(lambda: make_plan(asked.nodes, asked.ranks)),
        "expand the host list": timed(lambda: expand(listed)),
        "compress it again": timed(lambda: compress(hosts)),
        "rank table": timed(lambda: rank_table(hosts, asked.ranks)),
    }
    total = sum(parts.values())
    show(["part", "ms"], [[name, f"{1e3 * value:.1f}"] for name, value in {**parts, "all": total}.items()])
    small, large = len(make_plan(2, 8).script), len(make_plan(asked.nodes, asked.ranks).script)
    print(f"in all {total:.3f} s (wanted: under {LIMIT:.0f} s)")
    print(f"the script has {small} bytes for 2 nodes, {large} for these")


if __name__ == "__main__":
    main()
