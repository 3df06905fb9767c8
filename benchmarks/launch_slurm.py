"""Time from the start of the job step to the first all-reduce on a real Slurm: Paceline compared with srun + torchrun.

    python benchmarks/launch_slurm.py [--nodes 2] [--ranks 4] [--repeats 3]

Starts a sandbox (with a network between the nodes if you are root), runs both alternately and stops it.
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

from paceline.tools.sandbox import NAMESPACES, PLAIN, Sandbox, Settings, missing_packages

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

TORCHRUN = """#!/bin/bash
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)
port=$((20000 + SLURM_JOB_ID % 10000))
date +%s.%N >{began}
srun --export=ALL {python} -m torch.distributed.run --nnodes {nodes} --nproc-per-node {ranks} \\
    --rdzv-backend c10d --rdzv-endpoint "$head:$port" --rdzv-id "$SLURM_JOB_ID" {script} {folder}
"""


def launch_torchrun(cluster: Sandbox, home: Path, folder: Path, *, nodes: int, ranks: int) -> None:
    """Launch the usual way: srun starts one torchrun per node."""
    text = TORCHRUN.format(
        began=shlex.quote(str(folder / "began")),
        python=sys.executable,
        nodes=nodes,
        ranks=ranks,
        script=shlex.quote(str(home / "train.py")),
        folder=shlex.quote(str(folder)),
    )
    options = [
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={ranks}",
        f"--output={folder}/log",
    ]
    cluster.run(["sbatch", "--wait", *options], input=text, timeout=600)


def launch_paceline(cluster: Sandbox, home: Path, folder: Path, *, nodes: int, ranks: int) -> None:
    line = f"date +%s.%N >{shlex.quote(str(folder / 'began'))}"
    (home / "paceline.toml").write_text(f"[environment]\nsetup = [{json.dumps(line)}]\n")
    args = [
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
    environment = {
        **os.environ,
        **cluster.environment,
        "PACELINE_SCRATCH": str(home.parent / "scratch"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *args, "train.py", str(folder)],
        cwd=home,
        env=environment,
        text=True,
        capture_output=True,
        timeout=600,
    )
    if done.returncode:
        raise SystemExit(f"the run failed:\n{done.stdout}\n{done.stderr}")


def measure(folder: Path, world_size: int) -> float:
    """Return the seconds from the start of the step to the last rank's all-reduce."""
    times = [float(path.read_text()) for path in folder.glob("rank-*")]
    assert len(times) == world_size, (
        f"only {len(times)} of {world_size} ranks finished: see {folder}"
    )
    return max(times) - float((folder / "began").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=4, help="per node")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    network = NAMESPACES if os.geteuid() == 0 else PLAIN
    if missing := missing_packages(Settings(network=network)):
        print(f"no Slurm to measure on: install {' '.join(missing)}")
        return
    describe(f"launch on Slurm, {args.nodes} nodes x {args.ranks} ranks")
    times: dict[str, list[float]] = {"paceline (fork)": [], "srun + torchrun": []}
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as temporary:
        home = Path(temporary) / "project"
        home.mkdir()
        (home / "train.py").write_text(SCRIPT)
        cluster = Sandbox.up(Path(temporary) / "slurm", nodes=args.nodes, gpus=0, network=network)
        try:
            for repeat in range(args.repeats):
                for name, launch in (
                    ("paceline (fork)", launch_paceline),
                    ("srun + torchrun", launch_torchrun),
                ):
                    folder = Path(temporary) / f"{name.split()[0]}-{repeat}"
                    folder.mkdir()
                    launch(cluster, home, folder, nodes=args.nodes, ranks=args.ranks)
                    times[name].append(measure(folder, args.nodes * args.ranks))
                    time.sleep(0.5)
        finally:
            cluster.down()
    medians = {name: statistics.median(values) for name, values in times.items()}
    rows = [
        [name, f"{medians[name]:.2f}", f"{min(values):.2f}", f"{max(values):.2f}"]
        for name, values in times.items()
    ]
    show(["launcher", "median s", "min", "max"], rows)
    ratio = medians["srun + torchrun"] / medians["paceline (fork)"]
    print(f"paceline is {ratio:.1f}x as fast (target: {TARGET:.1f}x)")


if __name__ == "__main__":
    main()
