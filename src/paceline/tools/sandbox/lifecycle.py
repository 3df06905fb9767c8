"""Start and stop all processes of a sandbox, in the right order."""

from __future__ import annotations

import shutil
import signal

from paceline.errors import PacelineError
from paceline.tools.sandbox import addresses, daemons, database, network
from paceline.tools.sandbox.processes import Process, kill_all, node_processes, unrecorded_daemons
from paceline.tools.sandbox.settings import NAMESPACES, SandboxPaths, SandboxRecord, Settings


def start_all(paths: SandboxPaths, settings: Settings, *, owner: int | None) -> None:
    """Allocate addresses, write the files and start the daemons, recording each one as soon as it
    runs.
    """
    with addresses.allocation_lock():
        names = ["slurmctld", "slurmdbd", *settings.names]
        isolated = settings.network == NAMESPACES
        record = SandboxRecord(
            settings=settings,
            ports=dict(zip(names, addresses.free_ports(paths.path, len(names)), strict=True)),
            subnet=addresses.free_subnet(paths.path) if isolated else "",
            bridge=addresses.bridge_name(paths.path) if isolated else "",
            database=database.make_folder() if settings.accounting else "",
            owner=Process.of(owner) if owner else None,
        )
        record.save(paths)
        daemons.write_files(paths, record)
        if isolated:
            network.create_bridge(record)
        daemons.start_munged(paths, record)
        if settings.accounting:
            daemons.start_accounting(paths, record)
        daemons.start_controller(paths, record)
        for node in settings.names:
            daemons.start_node(paths, record, node)


def stop_all(paths: SandboxPaths) -> bool:
    """Stop everything in the record, and return whether there was one. It remains if something
    cannot be stopped.
    """
    record = SandboxRecord.load(paths)
    if record is None:
        return False
    for node in record.settings.names:
        power_off(paths, record, node)
    for name in ("slurmctld", "slurmdbd", "mariadbd", "munged"):
        if process := record.processes.get(name):
            process.end()
    kill_all(unrecorded_daemons(paths.slurm_conf))
    network.remove(record)
    database.remove_folder(record)
    for folder in paths.created:
        shutil.rmtree(folder, ignore_errors=True)
    paths.record.unlink(missing_ok=True)
    return True


def power_off(paths: SandboxPaths, record: SandboxRecord, name: str) -> None:
    process = record.processes.pop(name, None)
    if record.settings.network == NAMESPACES:
        if process is not None:
            # The kernel kills all processes of a namespace together with its first one.
            kill_all([*process.children(), process])
        return
    if process is not None:
        process.signal(signal.SIGKILL)  # first, so that it starts no more processes
    log = paths.log(f"slurmd-{name}")
    for _ in range(10):  # a process may have started another just before it was killed
        found = node_processes(node=name, log=log, slurm_conf=paths.slurm_conf)
        if not found:
            break
        kill_all(found)
    else:
        raise PacelineError(
            f"Cannot stop {name}: processes {[each.pid for each in found]} are still running."
        )
    if process is not None:
        process.wait(30.0)
