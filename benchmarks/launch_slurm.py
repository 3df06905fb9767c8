"""On a real Slurm, from the start of the step to the first all-reduce of all ranks: Paceline beside srun + torchrun.

    python benchmarks/launch_slurm.py [--nodes 2] [--ranks 4] [--repeats 3]

Brings a sandbox up (as root with a network between the nodes), runs both in turn, takes it down again.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from paceline.sandbox import NAMESPACES, PLAIN, Sandbox, Settings, missing_packages

from machine import describe, show

TARGET = 2.0

SCRIPT = """
import os, sys, time
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
Path(sys.argv[1], f"rank-{dist.get_rank()}").write_text(repr(time.time()))
dist.destroy_process_group()
"""

PEER = """#!/bin/bash
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)
port=$((20000 + SLURM_JOB_ID % 10000))
date +%s.%N >{began}
srun --export=ALL {python} -m torch.distributed.run --nnodes {nodes} --nproc-per-node {ranks} \\
    --rdzv-backend c10d --rdzv-endpoint "$head:$port" --rdzv-id "$SLURM_JOB_ID" {script} {folder}
"""


def peer(cluster: Sandbox, home: Path, folder: Path, *, nodes: int, ranks: int) -> None:
    """What people write: srun starts one torchrun per node."""
    text = PEER.format(
        began=shlex.quote(str(folder / "began")), python=sys.executable, nodes=nodes, ranks=ranks,
        script=shlex.quote(str(home / "train.py")), folder=shlex.quote(str(folder)),
    )  # fmt: skip
    options = [
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={ranks}",
        f"--output={folder}/log",
    ]
    cluster.run(["sbatch", "--wait", *options], input=text, timeout=600)


def ours(cluster: Sandbox, home: Path, folder: Path, *, nodes: int, ranks: int) -> None:
    line = f"date +%s.%N >{shlex.quote(str(folder / 'began'))}"
    (home / "paceline.toml").write_text(f"[environment]\nsetup = [{json.dumps(line)}]\n")
    words = [
        "submit",
        "--wait",
        "--nodes",
        str(nodes),
        "--nproc",
        str(ranks),
        "--cpus-per-gpu",
        "1",
        "--no-check",
    ]
    environment = {**os.environ, **cluster.environment, "PACELINE_SCRATCH": str(home.parent / "scratch")}
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *words, "train.py", str(folder)],
        cwd=home, env=environment, text=True, capture_output=True, timeout=600,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"the run failed:\n{done.stdout}\n{done.stderr}")


def measure(folder: Path, world_size: int) -> float:
    """Seconds from the step's start to the last rank's word."""
    said = [float(path.read_text()) for path in folder.glob("rank-*")]
    assert len(said) == world_size, f"{len(said)} of {world_size} ranks spoke: see {folder}"
    return max(said) - float((folder / "began").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=4, help="per node")
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    network = NAMESPACES if os.geteuid() == 0 else PLAIN
    if lacking := missing_packages(Settings(network=network)):
        print(f"no Slurm to measure on: install {' '.join(lacking)}")
        return
    describe(f"launch on Slurm, {asked.nodes} nodes x {asked.ranks} ranks")
    times: dict[str, list[float]] = {"paceline (fork)": [], "srun + torchrun": []}
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as temporary:
        home = Path(temporary) / "project"
        home.mkdir()
        (home / "train.py").write_text(SCRIPT)
        cluster = Sandbox.up(Path(temporary) / "slurm", nodes=asked.nodes, gpus=0, network=network)
        try:
            for repeat in range(asked.repeats):
                for name, launch in (("paceline (fork)", ours), ("srun + torchrun", peer)):
                    folder = Path(temporary) / f"{name.split()[0]}-{repeat}"
                    folder.mkdir()
                    launch(cluster, home, folder, nodes=asked.nodes, ranks=asked.ranks)
                    times[name].append(measure(folder, asked.nodes * asked.ranks))
                    time.sleep(0.5)
        finally:
            cluster.down()
    medians = {name: statistics.median(values) for name, values in times.items()}
    rows = [
        [name, f"{medians[name]:.2f}", f"{min(values):.2f}", f"{max(values):.2f}"]
        for name, values in times.items()
    ]
    show(["starter", "median s", "least", "most"], rows)
    ratio = medians["srun + torchrun"] / medians["paceline (fork)"]
    print(f"paceline is {ratio:.1f}x as fast (wanted: {TARGET:.1f}x)")


if __name__ == "__main__":
    main()
