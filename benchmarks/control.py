"""How planning and submitting scale: a plan for thousands of nodes, and a sweep of ten thousand points.

    python benchmarks/control.py [--nodes 4096] [--ranks 8] [--points 10000]

Targets: a plan takes under a second, and its script does not grow with the number of nodes. The sweep is planned and
submitted in under ten seconds with one `sbatch` per full array. It is compared with submitit's `map_array`: both submit
held jobs to the same real Slurm, and the time is that of the whole command.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from paceline.contract.launcher_variables import expand
from paceline.launch.slurm_job import SlurmPlan, plan_slurm
from paceline.spec.job import Program
from paceline.spec.load import load_job
from paceline.spec.option import Flag
from paceline.spec.run_path import RunPath
from paceline.tools.sandbox import PLAIN, Sandbox, Settings, missing_packages

from machine import describe, show

LIMIT = 1.0
SWEEP_LIMIT = 10.0
ARRAY = 1001  # tasks per array, Slurm's default

SWEEP = """\
[sweep]
script = "train.py"
sampler = "random"
count = {points}
metric = "loss"

[space]
lr = {{ log_uniform = [1e-5, 1e-1] }}
width = [64, 128, 256]

[job]
time = "10m"
"""

# The usual way with submitit: a function, and one array for each chunk that the cluster accepts.
SUBMITIT = """\
import random, sys, submitit
points, size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
generator = random.Random(0)
values = [(10 ** generator.uniform(-5, -1), generator.choice([64, 128, 256])) for _ in range(points)]
executor = submitit.AutoExecutor(folder=folder, cluster="slurm")
executor.update_parameters(
    timeout_min=10, slurm_array_parallelism=size, slurm_additional_parameters={"hold": True}
)
for start in range(0, points, size):
    rates, widths = zip(*values[start : start + size])
    executor.map_array(pow, rates, widths)
"""

# Comes before the real sbatch on PATH, and records its calls.
COUNTING = """\
#!/bin/sh
echo "$@" >>{calls}
exec {sbatch} "$@"
"""


def make_plan(nodes: int, ranks: int) -> SlurmPlan:
    flags = [
        Flag("--nodes", "job.nodes", nodes),
        Flag("--gpus", "job.gpus_per_node", ranks),
        Flag("--time", "job.time", "2h"),
    ]
    job = load_job(Program("train.py", ("--lr", "0.1")), flags=flags, cwd=Path("/"))
    run_path = RunPath(Path("/scratch"), "project", "default", "20260101-000000-abcd")
    return plan_slurm(
        job, run_path=run_path, environ={"PATH": "/usr/bin:/bin"}, python="/usr/bin/python3"
    )


def timed(work: Callable[[], object], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def measure_plans(nodes: int, ranks: int) -> None:
    describe(f"planning {nodes} nodes x {ranks} ranks")
    listed = f"gpu[0001-{nodes:04d}]"

    parts = {
        "plan (launch spec, script)": timed(lambda: make_plan(nodes, ranks)),
        "expand the host list": timed(lambda: expand(listed)),
    }
    total = sum(parts.values())
    show(
        ["part", "ms"],
        [[name, f"{1e3 * value:.1f}"] for name, value in {**parts, "total": total}.items()],
    )
    small, large = len(make_plan(2, 8).script), len(make_plan(nodes, ranks).script)
    print(f"total {total:.3f} s (target: under {LIMIT:.0f} s)")
    print(f"the script has {small} bytes for 2 nodes and {large} for {nodes}")


def measure_sweeps(points: int) -> None:
    """Submit with Paceline and with submitit to one Slurm, each time with an empty queue."""
    if missing := missing_packages(Settings(network=PLAIN)):
        print(f"no Slurm to submit to: install {' '.join(missing)}")
        return
    describe(f"submitting {points} points")
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as temporary:
        home = Path(temporary)
        (home / "train.py").write_text("print('trained')\n")
        (home / "sweep.toml").write_text(SWEEP.format(points=points))
        (home / "submitit_sweep.py").write_text(SUBMITIT)
        # Each task of an array counts as a job.
        options = {"MaxJobCount": str(4 * points + 1000)}
        cluster = Sandbox.up(
            home / "slurm", nodes=1, gpus=0, network=PLAIN, max_array_size=ARRAY, options=options
        )
        try:
            ours = [sys.executable, "-m", "paceline", "sweep", "--sbatch-arg=--hold", "sweep.toml"]
            theirs = [
                sys.executable,
                "submitit_sweep.py",
                str(points),
                str(ARRAY),
                str(home / "submitit"),
            ]
            found = {
                "paceline sweep": measure_submission(cluster, home, ours, points),
                "submitit map_array": measure_submission(cluster, home, theirs, points),
            }
        finally:
            cluster.down()
    rows = [
        [name, f"{seconds:.2f}", str(calls), f"{files:,}"]
        for name, (seconds, calls, files) in found.items()
    ]
    show(["command", "s", "sbatch calls", "files"], rows)
    seconds, calls, _ = found["paceline sweep"]
    fewest = math.ceil(points / ARRAY)
    print(
        f"{seconds:.2f} s with {calls} sbatch calls (target: under {SWEEP_LIMIT:.0f} s with {fewest} calls)"
    )
    print(f"paceline is {found['submitit map_array'][0] / seconds:.1f}x as fast as submitit")


def measure_submission(
    cluster: Sandbox, home: Path, command: list[str], points: int
) -> tuple[float, int, int]:
    """Return the seconds of the whole command, the number of jobs it submitted and of files it created."""
    tools, calls = home / "tools", home / "calls"
    tools.mkdir(exist_ok=True)
    calls.write_text("")
    real = cluster.run(["sh", "-c", "command -v sbatch"]).stdout.strip()
    (tools / "sbatch").write_text(COUNTING.format(calls=calls, sbatch=real))
    (tools / "sbatch").chmod(0o755)
    environment = {**os.environ, **cluster.environment, "PACELINE_SCRATCH": str(home / "scratch")}
    environment["PATH"] = f"{tools}:{environment['PATH']}"
    before = files_in(home)
    began = time.perf_counter()
    done = subprocess.run(
        command, cwd=home, env=environment, text=True, capture_output=True, timeout=600
    )
    seconds = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stdout}\n{done.stderr}")
    queued = cluster.run(["squeue", "--noheader", "--array", "--format=%i"]).stdout.split()
    assert len(queued) == points, f"{len(queued)} tasks are queued, not {points}"
    cluster.run(["scancel", "--user", str(os.getuid())])
    deadline = time.monotonic() + 120
    while cluster.run(["squeue", "--noheader", "--format=%i"]).stdout.strip():
        assert time.monotonic() < deadline, "the queue is not empty"
        time.sleep(0.5)
    # `sbatch --test-only` submits nothing.
    submitted = [line for line in calls.read_text().splitlines() if "--test-only" not in line]
    return seconds, len(submitted), files_in(home) - before


def files_in(home: Path) -> int:
    paths = [path for path in home.iterdir() if path.name not in ("slurm", "tools")]
    return sum(len(names) for path in paths if path.is_dir() for _, _, names in os.walk(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=4096)
    parser.add_argument("--ranks", type=int, default=8, help="per node")
    parser.add_argument("--points", type=int, default=10000, help="of the sweep")
    args = parser.parse_args()
    measure_plans(args.nodes, args.ranks)
    print()
    measure_sweeps(args.points)


if __name__ == "__main__":
    main()
