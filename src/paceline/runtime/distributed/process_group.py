"""The process group: made once the ranks have met, destroyed always, never by way of a barrier.

Besides the group that trains there is a second one on gloo, for control: agreements about stopping and saving
travel beside the gradients, and never wait for a device.
"""

from __future__ import annotations

import atexit
import ctypes
import datetime
import os
import time
import zlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from paceline.contract.hostlist import expand
from paceline.errors import EnvironmentProblem
from paceline.runtime.distributed.identity import Identity

# The store is where ranks find each other. Its address serves once per process, so it is kept for all sessions.
_store: Any = None
_sessions = 0
LETTING_GO = 0.1  # seconds, once per process


@dataclass
class ProcessGroups:
    """Both groups of a world; in a world of one there are none, and every call is answered at once."""

    store: Any = None
    main: Any = None
    control: Any = None
    owned: bool = False

    def close(self) -> None:
        """After a clean end: every rank is here, nothing is in flight."""
        if self.owned and dist.is_initialized():
            dist.destroy_process_group()
        self.main = self.control = None

    def abandon(self) -> None:
        """After an error: peers may never answer, so nothing is waited for.

        Destroying a group waits for its collectives, also while the interpreter ends. What can be aborted is;
        the rest is kept alive until the process is gone.
        """
        if not self.owned or self.main is None:
            return
        for group in (self.main, self.control):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.store))
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.distributed_c10d._world))
        self.main = self.control = None


def wait_for_gloo_threads() -> None:
    """Gloo's threads let go of their last tensors, for which they need the interpreter.

    One that comes to it only while the interpreter ends aborts the process: a run that is done would have failed,
    and the exit code would no longer be that of an error.
    """
    time.sleep(LETTING_GO)


def default_backend(device: torch.device) -> str:
    """What carries gradients for a device."""
    if device.type == "cuda" and dist.is_nccl_available():
        return "nccl"
    if device.type == "xpu" and getattr(dist, "is_xccl_available", lambda: False)():
        return "xccl"
    return "gloo"


def open_store(identity: Identity, *, timeout: float | None) -> Any:
    """The store of this session: a place of its own within the one that the ranks share. None when alone."""
    global _store, _sessions
    if not identity.is_distributed:
        return None
    if _store is None:
        from torch.distributed.rendezvous import rendezvous

        patience = datetime.timedelta(seconds=timeout or 600)
        where = address(identity)
        ending = f"?rank={identity.rank}&world_size={identity.world_size}"
        url = f"env://{ending}" if where is None else f"tcp://{where[0]}:{where[1]}{ending}"
        try:
            try:
                _store, _, _ = next(iter(rendezvous(url, timeout=patience)))
            except (dist.DistError, RuntimeError) as error:
                # Some builds of torch (Debian's, Windows') lack it, and ask for it all the same.
                if "libuv" not in str(error):
                    raise
                _store, _, _ = next(iter(rendezvous(f"{url}&use_libuv=0", timeout=patience)))
        except (dist.DistError, RuntimeError, ValueError) as error:
            raise EnvironmentProblem(
                f"rank {identity.rank} did not meet its peers: {str(error).splitlines()[0]}",
                hint="MASTER_ADDR and MASTER_PORT must name a free port on the host of rank 0.",
            ) from error
    _sessions += 1
    return torch.distributed.distributed_c10d.PrefixStore(f"paceline/{_sessions}", _store)


def wait_for_key(store: Any, key: str) -> str | None:
    """What a peer leaves in the store, however long it takes; None when the store has died with its owner."""
    try:
        while True:
            try:
                store.wait([key])
                return str(store.get(key), "utf-8")
            except dist.DistStoreError:  # only this wait was too short: a download may take hours
                continue
    except dist.DistError:
        return None


def init_process_groups(
    identity: Identity, device: torch.device, *, store: Any, backend: str | None, timeout: float | None
) -> ProcessGroups:
    """Form the groups over a store. A group that the script has made itself is used, and left alone."""
    if not identity.is_distributed:
        return ProcessGroups()
    limit = None if timeout is None else datetime.timedelta(seconds=timeout)
    owned = not dist.is_initialized()
    atexit.unregister(wait_for_gloo_threads)  # of an earlier session
    atexit.register(wait_for_gloo_threads)
    if owned:
        backend = backend or default_backend(device)
        # With the device told, NCCL forms its communicators now: a fault shows here and not in the first step.
        dist.init_process_group(
            backend, store=store, rank=identity.rank, world_size=identity.world_size, timeout=limit,
            device_id=device if backend == "nccl" else None,
        )  # fmt: skip
    control = dist.new_group(backend="gloo", timeout=limit)
    return ProcessGroups(store=store, main=dist.group.WORLD, control=control, owned=owned)


def address(identity: Identity) -> tuple[str, int] | None:
    """Where to meet when no agent said it: on one host a port of the job's own, under Slurm on its first host."""
    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        return None
    if identity.source == "slurm":
        job = "/".join(
            os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        )
        return first_host(os.environ.get("SLURM_STEP_NODELIST", os.environ.get("SLURM_NODELIST", ""))), _port(
            job
        )
    if identity.num_nodes == 1:
        # All ranks of one host have one parent (mpirun, or its daemon), and so one number to derive a port from.
        names = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "HYDI_CONTROL_FD")
        job = "/".join([*(os.environ.get(name, "") for name in names), str(os.getppid())])
        return "127.0.0.1", _port(job)
    raise EnvironmentProblem(
        f"{identity.world_size} ranks on {identity.num_nodes} nodes do not know where to meet ({identity.source})",
        hint="Export MASTER_ADDR (the host of rank 0) and MASTER_PORT to all ranks, or use paceline submit.",
    )


def _port(job: str) -> int:
    """A port outside the kernel's own range (32768 and up), the same for all ranks of one job and for no other."""
    return 20000 + zlib.crc32(job.encode()) % 12000


def first_host(hostlist: str) -> str:
    """Return the first host of a Slurm host list."""
    hosts = expand(hostlist)
    if not hosts:
        raise EnvironmentProblem(
            "SLURM_STEP_NODELIST names no host.", hint="Export MASTER_ADDR and MASTER_PORT to all ranks."
        )
    return hosts[0]
