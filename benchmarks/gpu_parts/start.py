"""From the command to the first all-reduce of one rank over NCCL, in a small project: Paceline beside torchrun.

Then the phases of a start with a session, on all GPUs of this machine: what they take, and what of it overlaps.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from gpu_parts.result import Result

SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
torch.cuda.set_device(0)
dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
one = torch.ones(1, device="cuda")
dist.all_reduce(one)
torch.cuda.synchronize()
with open(sys.argv[1] + ".partial", "w") as file:
    file.write(repr(time.time()))
os.rename(sys.argv[1] + ".partial", sys.argv[1])
dist.destroy_process_group()
"""


# A session whose first batch takes a second, and whose model takes a moment to build.
TRAINS = """
import time
import torch
import paceline

class Items:
    def __len__(self): return 65536
    def __getitem__(self, index):
        time.sleep(1 / 64)
        return torch.full((4096,), float(index))

with paceline.session(seed=0, report=False, save_every_seconds=None) as run:
    loader = run.loader(Items(), batch_size=64 * run.world_size, num_workers=4)
    layers = [torch.nn.Linear(4096, 4096) for _ in range(6)]
    model = run.wrap(torch.nn.Sequential(*layers, torch.nn.Linear(4096, 1)))
    opt = torch.optim.SGD(model.parameters(), lr=1e-9)
    run.resume(model=model, opt=opt, loader=loader)
    for x in run.steps(loader):
        run.backward(model(x).square().mean())
        run.update(opt)
        if run.step == 1:
            break
"""


def measure_phases(folder: Path, repeats: int, *options: str) -> dict[str, float]:
    """Return the median seconds of each phase of a start."""
    (folder / "trains.py").write_text(TRAINS)
    found: dict[str, list[float]] = {}
    for _ in range(repeats + 1):
        scratch = Path(tempfile.mkdtemp(dir=folder.parent))
        command = [sys.executable, "-m", "paceline", "run", *options, "trains.py"]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=180,
            cwd=folder,
            env={**os.environ, "PACELINE_SCRATCH": str(scratch)},
        )
        lines = [
            line for file in scratch.rglob("rank-0.jsonl") for line in file.read_text().splitlines()
        ]
        first = [event for event in map(json.loads, lines) if event["event"] == "first_step"]
        if not first:
            sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
        for name, seconds in first[0]["seconds"].items():
            found.setdefault(name, []).append(seconds)
    return {name: round(median(values[1:]), 3) for name, values in found.items()}


def once(command: list[str], mark: Path, project: Path) -> float:
    """Return the seconds from the command to the first all-reduce."""
    variables = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }
    began = time.time()
    done = subprocess.run(
        [*command, str(mark)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=project,
        env={**variables, "PACELINE_SCRATCH": str(mark.with_name("runs"))},
    )
    if not mark.exists():
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
    return float(mark.read_text()) - began


def measure(repeats: int) -> list[Result]:
    python = sys.executable
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "project"
        folder.mkdir()
        script = folder / "probe.py"
        script.write_text(SCRIPT)
        ours = [python, "-m", "paceline", "run", "--nproc", "1"]
        ways = {
            "Paceline": [*ours, str(script)],
            "torchrun": [
                python,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                "1",
                str(script),
            ],
            "warm": [*ours, "--warm", str(script)],
        }
        found: dict[str, list[float]] = {name: [] for name in ways}
        try:
            for turn in range(repeats + 1):
                for name, command in ways.items():
                    seconds = once(command, folder.parent / f"{name}-{turn}", folder)
                    if turn:  # the first one reads everything from disk, or starts the warm process
                        found[name].append(seconds)
            phases = {
                "cold": measure_phases(folder, repeats),
                "warm": measure_phases(folder, repeats, "--warm"),
            }
        finally:
            subprocess.run(
                [python, "-m", "paceline", "clean", "--processes", "--yes"],
                capture_output=True,
                timeout=60,
            )
    for name, seconds in phases.items():
        parts = ", ".join(
            f"{phase.replace('_', ' ')} {value:.3f}" for phase, value in seconds.items()
        )
        print(f"phases of a start ({name}), in seconds: {parts}", flush=True)
    peer = {"torchrun": found["torchrun"]}
    return [
        Result("launch to first NCCL all-reduce", "s", found["Paceline"], peer, {}, phases["cold"]),
        Result("the same, warm start", "s", found["warm"], peer, {"torchrun": 3.0}, phases["warm"]),
    ]
