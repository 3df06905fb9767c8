"""What Paceline does on one GPU, beside what people use otherwise, in one run.

    python benchmarks/gpu.py [--data-dir MNIST] [--parts mnist gpt start checkpoint recovery] [--repeats 3]

Takes about seven minutes on an H200. Writes the numbers, facts about the machine and a picture to benchmarks/results/.
`--data-dir` is a folder with the full MNIST set, as `examples/mnist/train.py --download` makes it; without it, the time
to 99 % is not measured. Lightning Fabric and Accelerate are measured if they are installed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from gpu_parts.picture import draw
from gpu_parts.result import Result

from machine import describe, show

RESULTS = Path(__file__).parent / "results"


def mnist(options: argparse.Namespace) -> list[Result]:
    from gpu_parts.digits_training import measure

    return measure(options.data_dir, options.repeats)


def gpt(options: argparse.Namespace) -> list[Result]:
    from gpu_parts.language_model import measure

    return measure(options.repeats)


def start(options: argparse.Namespace) -> list[Result]:
    from gpu_parts.start import measure

    return measure(options.repeats)


def checkpoint(options: argparse.Namespace) -> list[Result]:
    from gpu_parts.saving import measure

    return measure(options.repeats)


def recovery(options: argparse.Namespace) -> list[Result]:
    from gpu_parts.restart import measure

    return measure(options.repeats)


PARTS: dict[str, Callable[[argparse.Namespace], list[Result]]] = {
    part.__name__: part for part in (mnist, gpt, start, checkpoint, recovery)
}


def machine() -> dict[str, Any]:
    """Return what the numbers depend on."""
    import torch

    return {
        "gpu": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "processor": platform.machine(),
        "date": time.strftime("%Y-%m-%d"),
    }


def run_part(name: str, options: argparse.Namespace) -> list[Result]:
    """Measure a part in a process of its own, which leaves nothing behind on the GPU."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        command = [
            sys.executable,
            __file__,
            "--parts",
            name,
            "--repeats",
            str(options.repeats),
            "--part-to",
            file.name,
        ]
        if options.data_dir:
            command += ["--data-dir", str(options.data_dir)]
        began = time.monotonic()
        if subprocess.run(command).returncode:
            print(f"{name}: failed after {time.monotonic() - began:.0f} s", flush=True)
            return []
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
        return [Result.from_json(each) for each in json.load(file)]


def number(value: float, unit: str) -> str:
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.2f} {unit}"


def rows(results: list[Result]) -> list[tuple[str, ...]]:
    table = []
    for result in results:
        for peer, theirs in result.peers.items():
            ratio, (low, high) = result.ratio(peer), result.spread(peer)
            target = result.targets.get(peer)
            verdict = (
                ""
                if target is None
                else f"{target:g}x {'reached' if ratio >= target else 'missed'}"
            )
            ours = number(median(result.ours), result.unit)
            other = f"{peer} {number(median(theirs), result.unit)}"
            times = f"{ratio:.3f}x" if ratio < 2 else f"{ratio:.1f}x"
            table.append((result.name, ours, other, times, f"{low:.2f} to {high:.2f}", verdict))
    return table


def write(results: list[Result], facts: dict[str, Any], folder: Path) -> Path:
    """Write the numbers and the picture."""
    folder.mkdir(exist_ok=True)
    name = re.sub(r"[^a-z0-9]+", "-", facts["gpu"].lower()).strip("-")
    path = folder / f"{name}.json"
    path.write_text(
        json.dumps({"machine": facts, "results": [each.to_json() for each in results]}, indent=1)
        + "\n"
    )
    path.with_suffix(".svg").write_text(draw(results, f"{facts['gpu']}, torch {facts['torch']}"))
    return path


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, help="a folder with the full MNIST set")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="where to write (benchmarks/results)"
    )
    parser.add_argument("--part-to", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("benchmarks/gpu.py: not run, there is no CUDA device here")
        return 0
    if options.part_to:
        found = [each.to_json() for each in PARTS[options.parts[0]](options)]
        options.part_to.write_text(json.dumps(found))
        return 0
    facts = machine()
    describe(f"one {facts['gpu']}")
    results: list[Result] = []
    for name in options.parts:
        results += run_part(name, options)
        # a benchmark that is interrupted keeps what it has
        path = write(results, facts, options.results)
    show(("", "Paceline", "peer", "ratio", "spread", "target"), rows(results))
    for result in results:
        for name, value in result.facts.items():
            print(f"{result.name}: {name} {value:.4g}")
    print(f"wrote {path} and {path.with_suffix('.svg').name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
