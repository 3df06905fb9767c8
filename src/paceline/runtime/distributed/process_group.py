"""Create and destroy the process groups: one for training, one on gloo for control.

The control group carries stop and save decisions beside the gradients, and never waits for a
device. Groups are destroyed at every clean end, and never by way of a barrier.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from paceline.contract import clean_exit
from paceline.contract.launcher_variables import expand
from paceline.errors import EnvironmentProblem, RunError
from paceline.runtime.console import format_ranks, note
from paceline.runtime.distributed.identity import Identity

# Ranks find each other through the store. Its address can be used once per process, so all sessions
# share it.
_store: Any = None
_sessions = 0

# Seconds for the communication check, unless the session sets a time: in large worlds, adapters may
# take minutes to connect.
CHECK_TIMEOUT = 300.0
POLL_INTERVAL = 0.0005
_INTERFACE = {"nccl": "NCCL_SOCKET_IFNAME", "gloo": "GLOO_SOCKET_IFNAME"}
LATE_AFTER = 5.0  # seconds after which ranks that have not come are named
RENDEZVOUS_TIMEOUT = 1800.0  # seconds, as for collectives over gloo


@dataclass
class ProcessGroups:
    """The store and both groups. With a single rank there are none, and every call returns at
    once.
    """

    store: Any = None
    main: Any = None
    control: Any = None
    owned: bool = False
    _data: ProcessGroups | None = None

    @property
    def data(self) -> ProcessGroups:
        """The groups of ranks with different samples: these, or with tensor parallelism some of
        their ranks.
        """
        return self._data or self

    def split_data(self, tensor: int) -> None:
        """Count each sample once, if `tensor` neighbouring ranks work on the same ones. A
        collective.
        """
        for first in range(tensor):
            ranks = list(range(first, dist.get_world_size(), tensor))
            main, control = dist.new_group(ranks), dist.new_group(ranks, backend="gloo")
            if dist.get_rank() in ranks:
                self._data = ProcessGroups(main=main, control=control)

    def share_number(self, number: int) -> int:
        """Return rank 0's number on all ranks. A collective."""
        if self.control is None:
            return number
        shared = torch.tensor(number, dtype=torch.int64)
        dist.broadcast(shared, src=0, group=self.control)
        return int(shared)

    def close(self) -> None:
        """Destroy the groups after a clean end, when all ranks are here and nothing is in
        flight.
        """
        if self.owned and dist.is_initialized():
            dist.destroy_process_group()
        self.main = self.control = self._data = None

    def abandon(self) -> None:
        """Leave the groups after an error, without waiting for peers that may never answer.

        Destroying a group waits for its collectives, even at interpreter exit.
        """
        if not self.owned or self.main is None:
            return
        clean_exit.keep_forever(self.main, self.control, self.store, dist.distributed_c10d._world)
        self.main = self.control = self._data = None

    def meet(self, identity: Identity, key: str, *, what: str, timeout: float | None) -> None:
        """Wait for all ranks, and say after a few seconds which of them have not called `what`.

        Raises RunError if they never do.
        """
        if self.store is None:
            return
        self.store.set(f"{key}/{identity.rank}", "")
        if self.store.add(f"{key}/count", 1) == identity.world_size:
            self.store.set(f"{key}/all", "")
        limit = timeout or RENDEZVOUS_TIMEOUT
        for seconds in (min(LATE_AFTER, limit), limit):
            try:
                self.store.wait([f"{key}/all"], datetime.timedelta(seconds=seconds))
                return
            except dist.DistStoreError:
                came = [self.store.check([f"{key}/{rank}"]) for rank in range(identity.world_size)]
            if all(came):
                return
            names = format_ranks([rank for rank, has_come in enumerate(came) if not has_come])
            if identity.rank == came.index(True):
                note(
                    f"rank {identity.rank} is waiting in {what} for {names}: call it on all ranks, "
                    "not under `if run.rank == 0`"
                )
        raise RunError(
            f"{what} was not called on {names}.", hint="Call it on all ranks, at the same point."
        )

    @contextlib.contextmanager
    def rank_zero_first(self, identity: Identity, key: str) -> Iterator[None]:
        """Run the body on rank 0, then on the first rank of each other node, then on all other
        ranks.
        """
        if self.store is None:
            yield
            return
        is_first = identity.rank == 0
        leads = is_first or (identity.local_rank == 0 and identity.node > 0)
        waits_for = set() if is_first else {0} if leads else {0, identity.node}
        for who in sorted(waits_for):
            if wait_for_key(self.store, f"{key}/{who}") != "done":
                name = "Rank 0" if who == 0 else f"The first rank of node {who}"
                raise RunError(f"{name} failed in rank_zero_first.", hint="See its error.")
        outcome = "failed"
        try:
            yield
            outcome = "done"
        finally:
            if leads:
                self.store.set(f"{key}/{0 if is_first else identity.node}", outcome)


def default_backend(device: torch.device) -> str:
    """Return the backend that reduces gradients on this device."""
    if device.type == "cuda" and dist.is_nccl_available():
        return "nccl"
    if device.type == "xpu" and getattr(dist, "is_xccl_available", lambda: False)():
        return "xccl"
    return "gloo"


def open_store(identity: Identity, *, timeout: float | None) -> Any:
    """Return this session's part of the store that all ranks share; None with a single rank."""
    global _store, _sessions
    if not identity.is_distributed:
        return None
    if _store is None:
        _store = _meet_at_store(identity, datetime.timedelta(seconds=timeout or 600))
    _sessions += 1
    return torch.distributed.distributed_c10d.PrefixStore(f"paceline/{_sessions}", _store)


def _meet_at_store(identity: Identity, limit: datetime.timedelta) -> Any:
    from torch.distributed.rendezvous import rendezvous

    address = store_address(identity)
    query = f"?rank={identity.rank}&world_size={identity.world_size}"
    url = f"env://{query}" if address is None else f"tcp://{address[0]}:{address[1]}{query}"
    # Some builds of torch (Debian's, Windows') lack libuv, but use it by default.
    for option in ("", "&use_libuv=0"):
        try:
            return next(iter(rendezvous(f"{url}{option}", timeout=limit)))[0]
        except (dist.DistError, RuntimeError, ValueError) as error:
            if "libuv" not in str(error) or option:
                raise EnvironmentProblem(
                    f"Rank {identity.rank} could not reach the other ranks: "
                    f"{str(error).splitlines()[0]}",
                    hint="Set MASTER_ADDR to the host of rank 0, and MASTER_PORT to a free port "
                    "there.",
                ) from error
    raise AssertionError("unreachable")


def wait_for_key(store: Any, key: str) -> str | None:
    """Wait for a value in the store, however long a download takes; None if the store has ended
    with its owner.
    """
    try:
        store.wait([key], datetime.timedelta(days=7))
        return str(store.get(key), "utf-8")
    except dist.DistError:
        return None


def connect(
    identity: Identity,
    device: torch.device,
    *,
    store: Any,
    backend: str | None,
    timeout: float | None,
    check: bool = True,
) -> ProcessGroups:
    """Create the groups over a store, and check that they work; do not wait for any that does not.

    Raises RunError if the ranks cannot communicate.
    """
    backend = backend or default_backend(device)
    try:
        group = init_process_groups(identity, device, store=store, backend=backend, timeout=timeout)
    except RuntimeError as error:
        raise communication_error(
            identity, backend, str(error), what="creating the process group"
        ) from error
    try:
        if check:
            check_communication(group, identity, device, timeout=timeout)
    except BaseException:
        group.abandon()
        raise
    return group


def init_process_groups(
    identity: Identity, device: torch.device, *, store: Any, backend: str, timeout: float | None
) -> ProcessGroups:
    """Create the groups over a store. A group that the script has created itself is used, and not
    destroyed.
    """
    if not identity.is_distributed:
        return ProcessGroups()
    limit = None if timeout is None else datetime.timedelta(seconds=timeout)
    owned = not dist.is_initialized()
    clean_exit.keep_process_groups(dist)
    clean_exit.wait_for_torch_at_exit()
    if owned:
        # With a device id, NCCL creates its communicators now: a fault shows here and not in the
        # first step.
        dist.init_process_group(
            backend,
            store=store,
            rank=identity.rank,
            world_size=identity.world_size,
            timeout=limit,
            device_id=device if backend == "nccl" else None,
        )
    control = dist.new_group(backend="gloo", timeout=limit)
    return ProcessGroups(store=store, main=dist.group.WORLD, control=control, owned=owned)


def check_communication(
    group: ProcessGroups, identity: Identity, device: torch.device, *, timeout: float | None
) -> None:
    """Sum a 1 from every rank over each group, which finds a broken network before the first step.

    It makes the connections that the first step would make anyway. All ranks have already met at
    the store, so one that does not answer soon will not answer at all. Raises RunError if the sum
    is not the world size.
    """
    if group.main is None:
        return
    for each in (group.main, group.control):
        backend = str(dist.get_backend(each))
        place = torch.device("cpu") if backend == "gloo" else device
        try:
            total = _sum_of_ones(each, place, timeout or CHECK_TIMEOUT)
        except (RuntimeError, TimeoutError) as error:
            raise communication_error(identity, backend, str(error)) from error
        if total != identity.world_size:
            reason = f"the sum of {identity.world_size} ones came out as {total:g}"
            raise communication_error(identity, backend, reason)


def _sum_of_ones(group: Any, device: torch.device, limit: float) -> float:
    """Poll until the sum is there: waiting for NCCL would block this thread until NCCL ends the
    process.
    """
    total = torch.ones(1, device=device)
    work = dist.all_reduce(total, group=group, async_op=True)
    deadline = time.monotonic() + limit
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no answer within {limit:g} s")
        time.sleep(POLL_INTERVAL)
    work.wait()  # raises what went wrong
    return total.item()


def communication_error(
    identity: Identity, backend: str, reason: str, *, what: str = "the first all-reduce"
) -> RunError:
    """Return the error for a network that does not work, with what to try."""
    name = _INTERFACE.get(backend)
    interface = f" Set {name} (--env) to the interface that the nodes share." if name else ""
    return RunError(
        f"Rank {identity.rank} on {socket.gethostname()}: {what} of {identity.world_size} ranks "
        f"over {backend} failed: {reason.strip().partition(chr(10))[0].rstrip('.')}.",
        hint="Run with --debug (NCCL_DEBUG=INFO, TORCH_DISTRIBUTED_DEBUG=DETAIL) to see which "
        f"ranks cannot reach each other.{interface} To skip this check, use submit --no-check, or "
        "check = false in [launch].",
    )


def store_address(identity: Identity) -> tuple[str, int] | None:
    """Return host and port of the store; None if MASTER_ADDR and MASTER_PORT are set.

    The port is derived from the job. The host is the job's first one under Slurm, or this one for a
    single node.
    """
    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        return None
    if identity.source == "slurm":
        job_names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        job = "/".join(os.environ.get(name, "") for name in job_names)
        hosts = expand(os.environ.get("SLURM_STEP_NODELIST") or os.environ["SLURM_NODELIST"])
        return hosts[0], _port(job)
    if identity.num_nodes == 1:
        # All ranks of one host have the same parent (mpirun or its daemon), so they derive the same
        # port.
        names = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "HYDI_CONTROL_FD")
        job = "/".join([*(os.environ.get(name, "") for name in names), str(os.getppid())])
        return "127.0.0.1", _port(job)
    raise EnvironmentProblem(
        f"MASTER_ADDR and MASTER_PORT are not set, but there are {identity.world_size} ranks on "
        f"{identity.num_nodes} nodes ({identity.source}).",
        hint="Export MASTER_ADDR (the host of rank 0) and MASTER_PORT to all ranks, or use "
        "paceline submit.",
    )


def _port(job: str) -> int:
    """Return a port below the kernel's ephemeral range (32768 and up), the same for all ranks of a
    job.
    """
    return 20000 + zlib.crc32(job.encode()) % 12000
