"""The first curve of a metrics file with a million lines, and what following it costs.

The peer is what most scripts do: parse every line, keep every value.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from paceline.watch.metrics import Curves, MetricsReader

from machine import show

NEW_LINES = 10  # between two looks
LOOKS = 200


def line(step: int) -> str:
    values = {
        "step": step,
        "epoch": step // 10_000,
        "time": 1.7e9 + step * 0.1,
        "lr": 1e-3,
        "loss": 3.0 / (1 + step / 1000) + step % 7 / 100,
        "seconds": 0.1,
        "data_wait": 0.01,
        "samples_per_second": 1234.5,
    }
    return json.dumps(values) + "\n"


def write_file(path: Path, lines: int) -> None:
    with path.open("w") as out:
        out.writelines(map(line, range(lines)))


def first_curve(path: Path) -> tuple[float, MetricsReader, Curves]:
    """Return the seconds until the loss can be drawn."""
    began = time.perf_counter()
    file, curves = MetricsReader(path), Curves()
    curves.add(file.read_new())
    curve = curves.curve("loss")
    took = time.perf_counter() - began
    assert curve.steps
    return took, file, curves


def every_line(path: Path) -> float:
    """Return the seconds of a reader that parses all lines."""
    began = time.perf_counter()
    values: dict[str, list[float]] = {}
    with path.open() as lines:
        for each in lines:
            for name, value in json.loads(each).items():
                values.setdefault(name, []).append(value)
    assert values["loss"]
    return time.perf_counter() - began


def follow(path: Path, file: MetricsReader, curves: Curves, step: int) -> float:
    """Return the seconds of a look at a file that has a few new lines; the median of many."""
    looks = []
    for _ in range(LOOKS):
        with path.open("a") as out:
            out.writelines(map(line, range(step, step + NEW_LINES)))
        step += NEW_LINES
        began = time.perf_counter()
        curves.add(file.read_new())
        looks.append(time.perf_counter() - began)
    return sorted(looks)[LOOKS // 2]


def measure(folder: Path, lines: int, repeats: int) -> None:
    """Print a table."""
    path, short = folder / "metrics.jsonl", folder / "short.jsonl"
    write_file(path, lines)
    write_file(short, lines // 100)
    took, file, curves = min((first_curve(path) for _ in range(repeats)), key=lambda each: each[0])
    peer = every_line(path)
    _, short_file, short_curves = first_curve(short)
    after_few = follow(short, short_file, short_curves, lines // 100)
    after_many = follow(path, file, curves, lines)
    rows = [
        (f"first curve, {lines:,} lines", f"{took:.2f} s", f"{peer:.2f} s"),
        (
            f"a look at {NEW_LINES} new lines, after {lines // 100:,}",
            f"{after_few * 1e3:.2f} ms",
            "",
        ),
        (
            f"a look at {NEW_LINES} new lines, after {lines:,}",
            f"{after_many * 1e3:.2f} ms",
            f"{peer:.2f} s",
        ),
    ]
    show(("", "Paceline", "parse every line"), rows)
