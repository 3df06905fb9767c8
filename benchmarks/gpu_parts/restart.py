"""From `kill -9` of a rank that trains over NCCL to the next step: beside torchrun."""

from __future__ import annotations

import tempfile
from pathlib import Path

from faults import Paceline, Torchrun
from gpu_parts.result import Result
from recovery import recover


def measure(repeats: int) -> list[Result]:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in (Paceline, Torchrun):
            training = kind(
                Path(folder) / kind.name,
                ranks=1,
                steps=10**9,
                step_time=0.05,
                per_epoch=20,
                hang_timeout=60,
                device="cuda",
            )
            found[kind.name] = recover(training, repeats)
    return [
        Result("kill -9 to the next step", "s", found["paceline"], {"torchrun": found["torchrun"]})
    ]
