"""Print the machine's description and the result tables of the benchmarks."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table


def describe(title: str) -> None:
    """Print the machine's description: results mean nothing without it."""
    try:
        import torch

        version = f"torch {torch.__version__}"
    except ImportError:
        version = "no torch"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    print(
        f"{title}: {cores} cores, {platform.machine()}, Python {platform.python_version()}, {version}, load {load:.1f}"
    )


def show(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    table = Table(show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=120).print(table)
