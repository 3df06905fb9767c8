"""The program of the fitness check: each rank measures its device, and its node's links, within
seconds.

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
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.contract import env
from paceline.contract.fitness import LINE, Measurement
from paceline.contract.run_folder import write_atomically
from paceline.runtime.distributed.identity import Identity, read_identity
from paceline.runtime.distributed.placement import activate, choose_device
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
    """Measure exchanges between the first ranks of neighbouring nodes: with the next node, then
    with the one before.
    """
    if identity.num_nodes == 1:
        return replace(found, complete=True)
    backend = default_backend(device)
    dist.init_process_group(
        backend,
        store=open_store(identity, timeout=TIMEOUT),
        rank=identity.rank,
        world_size=identity.world_size,
        timeout=datetime.timedelta(seconds=TIMEOUT),
        device_id=device if backend == "nccl" else None,
    )
    buffer = torch.ones((GPU_BYTES if device.type == "cuda" else CPU_BYTES) // 4, device=device)
    nodes, node, local = identity.num_nodes, identity.node, identity.local_world_size
    pairs = {}
    for first in (0, 1):
        # Nodes 0-1, 2-3, ... at first; then 1-2, 3-4, ... An odd last node waits for the next
        # round.
        peer = node + 1 if node % 2 == first else node - 1
        if identity.local_rank == 0 and 0 <= peer < nodes:
            pairs[str(peer)] = _exchange(buffer, peer * local, sends_first=node < peer)
    return replace(found, pairs=pairs, complete=True)


def _exchange(buffer: torch.Tensor, peer: int, *, sends_first: bool) -> float:
    """Return the GB/s of the fastest of a few rounds, after one that makes the connection."""
    seconds = []
    for _ in range(ROUNDS + 1):
        began = time.perf_counter()
        for sends in (sends_first, not sends_first):
            dist.send(buffer, peer) if sends else dist.recv(buffer, peer)
        _synchronize(buffer.device)
        seconds.append(time.perf_counter() - began)
    return round(2 * buffer.numel() * buffer.element_size() / min(seconds[1:]) / 1e9, 4)


def _write(found: Measurement) -> None:
    folder = os.environ.get(env.FITNESS)
    if folder:
        write_atomically(Path(folder, f"rank-{found.rank}.json"), json.dumps(asdict(found)))


if __name__ == "__main__":
    main()
