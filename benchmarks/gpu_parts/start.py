"""From the command to the first all-reduce of one rank over NCCL, in a small project: Paceline beside torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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


def once(command: list[str], mark: Path, project: Path) -> float:
    """Return the seconds from the command to the first all-reduce."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    began = time.time()
    done = subprocess.run(
        [*command, str(mark)], capture_output=True, text=True, timeout=120, cwd=project,
        env={**variables, "PACELINE_SCRATCH": str(mark.with_name("runs"))},
    )  # fmt: skip
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
            "torchrun": [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", str(script)],
            "warm": [*ours, "--warm", str(script)],
        }
        found: dict[str, list[float]] = {name: [] for name in ways}
        try:
            for turn in range(repeats + 1):
                for name, command in ways.items():
                    seconds = once(command, folder.parent / f"{name}-{turn}", folder)
                    if turn:  # the first one reads everything from disk, or starts the warm process
                        found[name].append(seconds)
        finally:
            subprocess.run([python, "-m", "paceline", "warm", "stop"], capture_output=True, timeout=60)
    peer = {"torchrun": found["torchrun"]}
    return [
        Result("launch to first NCCL all-reduce", "s", found["Paceline"], peer),
        Result("the same, warm start", "s", found["warm"], peer, {"torchrun": 3.0}),
    ]
