"""The CPUs that a rank may use, and binding it to those next to its GPU."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch


def allowed_cpus() -> set[int]:
    """Return the CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def format_cpu_list(cpus: Iterable[int]) -> str:
    """Write a CPU list as the kernel does: `0-3,8` for 0, 1, 2, 3 and 8."""
    spans: list[list[int]] = []
    for cpu in sorted(cpus):
        if spans and cpu == spans[-1][1] + 1:
            spans[-1][1] = cpu
        else:
            spans.append([cpu, cpu])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def parse_cpu_list(text: str) -> set[int]:
    """Read a CPU list such as `0-3,8`."""
    found: set[int] = set()
    for span in filter(None, text.strip().split(",")):
        low, _, high = span.partition("-")
        found.update(range(int(low), int(high or low) + 1))
    return found


def bind_to_device_cpus(device: torch.device) -> bool:
    """Bind this process to the CPUs of its GPU, unless it is already bound (by Slurm or
    taskset).
    """
    if device.type != "cuda" or not hasattr(os, "sched_setaffinity"):
        return False
    if len(allowed_cpus()) < (os.cpu_count() or 1):
        return False
    near = device_cpus(device)
    if not near or near >= allowed_cpus():
        return False
    try:
        os.sched_setaffinity(0, near & allowed_cpus())
    except OSError:  # a container may forbid it; binding is an optimization only
        return False
    return True


def device_cpus(device: torch.device) -> set[int]:
    """Return the CPUs of the GPU's NUMA node; empty if the kernel does not list them."""
    properties: Any = torch.cuda.get_device_properties(device)
    try:
        bus = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}"
        address = f"{bus}:{properties.pci_device_id:02x}.0"
        return parse_cpu_list(Path(f"/sys/bus/pci/devices/{address}/local_cpulist").read_text())
    except (AttributeError, OSError, ValueError):
        return set()
