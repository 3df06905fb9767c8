"""The beginning and the end of a sandbox: what is started in which order, and how all of it is taken down again."""

from __future__ import annotations

import shutil
import signal

from paceline.errors import PacelineError
from paceline.sandbox import addresses, daemons, network
from paceline.sandbox.processes import Process, kill_all, of_node
from paceline.sandbox.settings import NAMESPACES, Record, SandboxPaths, Settings


def start_all(paths: SandboxPaths, settings: Settings, *, owner: int | None) -> None:
    """Choose a place, write the files, start the daemons; each is written down as soon as it runs."""
    with addresses.one_at_a_time():
        named = ["slurmctld", "slurmdbd", *settings.names]
        apart = settings.network == NAMESPACES
        record = Record(
            settings=settings,
            ports=dict(zip(named, addresses.free_ports(paths.folder, len(named)), strict=True)),
            subnet=addresses.free_subnet(paths.folder) if apart else "",
            bridge=addresses.bridge_name(paths.folder) if apart else "",
            owner=Process.of(owner) if owner else None,
        )
        record.save(paths)
        daemons.write_files(paths, record)
        if apart:
            network.make_bridge(record)
        daemons.start_munged(paths, record)
        if settings.accounting:
            daemons.start_accounting(paths, record)
        daemons.start_controller(paths, record)
        for node in settings.names:
            daemons.start_node(paths, record, node)


def take_down(paths: SandboxPaths) -> bool:
    """End all that is written down; whether there was anything. What cannot be ended stays written down."""
    record = Record.load(paths)
    if record is None:
        return False
    for node in record.settings.names:
        power_off(paths, record, node)
    for name in ("slurmctld", "slurmdbd", "mariadbd", "munged"):
        if process := record.processes.get(name):
            process.end()
    network.remove(record)
    for folder in paths.created:
        shutil.rmtree(folder, ignore_errors=True)
    paths.record.unlink(missing_ok=True)
    return True


def power_off(paths: SandboxPaths, record: Record, name: str) -> None:
    process = record.processes.pop(name, None)
    if record.settings.network == NAMESPACES:
        if process is not None:
            # The kernel ends all that lives in a process namespace together with its first process.
            kill_all([*process.children(), process])
        return
    if process is not None:
        process.signal(signal.SIGKILL)  # first, so that it starts nothing more
    log = paths.log(f"slurmd-{name}")
    for _ in range(10):  # what is ended may just have started another
        found = of_node(node=name, log=log, slurm_conf=paths.slurm_conf)
        if not found:
            break
        kill_all(found)
    else:
        raise PacelineError(f"{name} cannot be ended: processes {[each.pid for each in found]}")
    if process is not None:
        process.gone_within(30.0)
