"""The program of the fitness check: each rank measures its device and its links, within seconds.

It is started by agents, with torchrun's variables, or by srun. It writes what it has after each
part, so that a link that hangs does not hide what was measured before.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.contract import env
from paceline.contract.fitness import LINE, Measurement
from paceline.contract.run_folder import write_atomically
from paceline.runtime.distributed.device import activate, choose_device
from paceline.runtime.distributed.identity import Identity, read_identity
from paceline.runtime.distributed.process_group import default_backend, open_store

PRODUCT_SECONDS = 1.0
CPU_SIZE, GPU_SIZE = 384, 8192  # of the square matrices
CPU_BYTES, GPU_BYTES = 8 << 20, 256 << 20  # of an exchange
ROUNDS = 4  # of an exchange; the fastest counts, since others may share the network
TIMEOUT = 20.0  # seconds for a collective


def main() -> None:
    """Measure, and write or print the result. Exits normally, whatever is slow."""
    identity = read_identity()
    device = choose_device(identity, cpu=os.environ.get(env.FITNESS_CPU) == "1")
    activate(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    found = Measurement(identity.rank, host, identity.node, name)
    found = replace(found, tflops=round(measure_product(device), 6))
    _write(found)
    try:
        found = measure_links(found, identity, device)
    except (RuntimeError, OSError) as error:
        found = replace(found, error=(str(error).splitlines() or [type(error).__name__])[0][:300])
    _write(found)
    if env.FITNESS not in os.environ:
        print(LINE + json.dumps(asdict(found)), flush=True)
    os._exit(0)  # a process group whose peer hangs would wait for it at exit


def measure_product(device: torch.device) -> float:
    """Return TFLOP/s of a matrix product. On a CPU, only the time that this thread computes
    counts.
    """
    clock, size, dtype = time.perf_counter, GPU_SIZE, torch.bfloat16
    if device.type != "cuda":
        torch.set_num_threads(1)
        clock, size, dtype = time.thread_time, CPU_SIZE, torch.float32
    left = torch.rand(size, size, device=device, dtype=dtype)
    out = left @ left
    _synchronize(device)
    rates: list[float] = []
    deadline = time.perf_counter() + PRODUCT_SECONDS
    while time.perf_counter() < deadline or len(rates) < 3:
        began = clock()
        torch.mm(left, left, out=out)
        _synchronize(device)
        rates.append(2 * size**3 / max(1e-9, clock() - began))
    return statistics.median(rates) / 1e12


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_links(found: Measurement, identity: Identity, device: torch.device) -> Measurement:
    """Measure exchanges within the node, between all nodes, and between pairs of neighbouring
    nodes.
    """
    if not identity.is_distributed:
        return replace(found, complete=True)
    backend = default_backend(device)
    store = open_store(identity, timeout=TIMEOUT)
    dist.init_process_group(
        backend,
        store=store,
        rank=identity.rank,
        world_size=identity.world_size,
        timeout=datetime.timedelta(seconds=TIMEOUT),
        device_id=device if backend == "nccl" else None,
    )
    nodes, local = identity.num_nodes, identity.local_world_size
    buffer = torch.ones((GPU_BYTES if device.type == "cuda" else CPU_BYTES) // 4, device=device)
    leaders = dist.new_group(list(range(0, nodes * local, local)))
    if local > 1:
        starts = range(0, nodes * local, local)  # all ranks create the groups of all nodes
        within = [dist.new_group(list(range(start, start + local))) for start in starts]
        found = replace(found, within=_all_reduce(buffer, within[identity.node], local, device))
        _write(found)
    if nodes > 1 and identity.local_rank == 0:
        found = _measure_pairs(found, identity, buffer)
        _write(found)
        found = replace(found, between=_all_reduce(buffer, leaders, nodes, device))
    return replace(found, complete=True)


def _all_reduce(buffer: torch.Tensor, group: object, ranks: int, device: torch.device) -> float:
    """Return the bus bandwidth of an all-reduce: what each rank sends, as NCCL's own tests count
    it.
    """

    def once() -> None:
        dist.all_reduce(buffer, group=group)

    size = buffer.numel() * buffer.element_size()
    return round(2 * (ranks - 1) / ranks * size / _fastest(once, device) / 1e9, 4)


def _measure_pairs(found: Measurement, identity: Identity, buffer: torch.Tensor) -> Measurement:
    """Exchange with the next node, then with the one before: each node takes part in two pairs, or
    one of two nodes.
    """
    nodes, node, local = identity.num_nodes, identity.node, identity.local_world_size
    pairs = {}
    for first in (0, 1):
        # Nodes 0-1, 2-3, ... at first; then 1-2, 3-4, ... An odd last node waits for the next
        # round.
        peer = node + 1 if node % 2 == first else node - 1
        if not 0 <= peer < nodes:
            continue
        rank = peer * local

        def once(rank: int = rank, sends_first: bool = node < peer) -> None:
            for sends in (sends_first, not sends_first):
                dist.send(buffer, rank) if sends else dist.recv(buffer, rank)

        size = 2 * buffer.numel() * buffer.element_size()
        pairs[str(peer)] = round(size / _fastest(once, buffer.device) / 1e9, 4)
    return replace(found, pairs=pairs)


def _fastest(once: Callable[[], None], device: torch.device) -> float:
    """Return the seconds of the fastest of a few rounds, after one that makes the connections."""
    seconds = []
    for number in range(ROUNDS + 1):
        began = time.perf_counter()
        once()
        _synchronize(device)
        if number:
            seconds.append(time.perf_counter() - began)
    return min(seconds)


def _write(found: Measurement) -> None:
    folder = os.environ.get(env.FITNESS)
    if folder:
        write_atomically(Path(folder, f"rank-{found.rank}.json"), json.dumps(asdict(found)))


if __name__ == "__main__":
    main()
