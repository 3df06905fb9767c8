"""Build the parts of a session: identity, device, process groups, step boundary, trackers and
`Run`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from paceline.contract import env
from paceline.contract.heartbeat_file import READY
from paceline.contract.jsonl import EventWriter, LineWriter
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import RunFolder
from paceline.runtime.distributed import communication_check, rank_placement
from paceline.runtime.distributed import device as devices
from paceline.runtime.distributed import process_group as groups
from paceline.runtime.distributed.identity import Identity, read_identity
from paceline.runtime.distributed.mesh import RankMesh, resolve_sizes
from paceline.runtime.launch_context import LaunchContext
from paceline.runtime.metrics.metrics import Metrics
from paceline.runtime.metrics.progress_bar import ProgressBar
from paceline.runtime.metrics.report import TrialReporter
from paceline.runtime.metrics.throughput import Rates, peak_flops
from paceline.runtime.paths import Paths
from paceline.runtime.randomness import seed_everything
from paceline.runtime.run import Run
from paceline.runtime.settings import Params, Settings
from paceline.runtime.step_boundary.boundary import Boundary
from paceline.runtime.step_boundary.checkpoint_schedule import CheckpointSchedule
from paceline.runtime.step_boundary.heartbeat import Heartbeat
from paceline.runtime.step_boundary.nonfinite import NonFiniteLossCheck
from paceline.runtime.step_boundary.profiler import ProfilerWindow
from paceline.runtime.step_boundary.start_phases import StartPhases
from paceline.runtime.step_boundary.stragglers import StragglerDetector
from paceline.runtime.trackers.base import Tracker
from paceline.runtime.trackers.selection import Trackers, open_trackers
from paceline.runtime.trackers.thread import ForwardedMetrics
from paceline.runtime.training.gradients import AUTOCAST_DTYPES, Gradients
from paceline.runtime.training.replica_check import ReplicaCheck
from paceline.runtime.training.wrap import Wrapper


@dataclass
class SessionParts:
    """What a session has opened, and so what it closes."""

    run: Run
    group: groups.ProcessGroups
    boundary: Boundary
    lines: LineWriter
    trackers: Trackers
    # called by all ranks, after training that was not stopped
    at_end: Callable[[], None] | None = None


@dataclass(frozen=True)
class _Worker:
    """This process among its peers."""

    identity: Identity
    device: torch.device
    group: groups.ProcessGroups
    heartbeat: Heartbeat
    hosts: list[str]  # of all ranks; known to rank 0
    phases: StartPhases


def build(
    settings: Settings,
    context: LaunchContext,
    folder: RunFolder | None,
    requested: Sequence[Tracker | str],
) -> SessionParts:
    """Set up a session. All ranks call it at the same time."""
    worker = _join_world(settings, context)
    if settings.seed is not None:
        seed_everything(settings.seed, settings.deterministic)
    trackers = open_trackers(
        context, settings, worker.identity, folder=folder, given=requested, store=worker.group.store
    )
    rank_zero_folder = folder if worker.identity.rank == 0 else None
    lines = ForwardedMetrics(
        rank_zero_folder.metrics if rank_zero_folder else None, trackers.common
    )
    low = torch.bfloat16 if settings.precision == "bf16" else None
    mesh = RankMesh(worker.identity, worker.device, worker.group)
    world_size = worker.identity.world_size
    wrapper = Wrapper(
        worker.device, world_size, mesh=mesh, low_precision=low, timeout=settings.timeout
    )
    boundary = _make_boundary(
        settings, folder, worker, wrapper=wrapper, lines=lines, trackers=trackers
    )
    boundary.signals.install()
    worker.heartbeat.set_state(max(worker.heartbeat.state, READY))
    run = _make_run(
        settings, context, folder, worker, wrapper=wrapper, boundary=boundary, trackers=trackers
    )
    if settings.mesh is not None:
        run._set_mesh(settings.mesh)
    at_end = None
    if env.PROOF in os.environ:
        from paceline.runtime.proof.patches import attach_recorder

        at_end = attach_recorder(run)
    trackers.start()
    return SessionParts(run, worker.group, boundary, lines, trackers, at_end)


def _join_world(settings: Settings, context: LaunchContext) -> _Worker:
    """Find this process's identity and device, and connect it to the other ranks."""
    spec = context.launch_spec
    phases = StartPhases()
    identity = read_identity()
    rank_placement.check_world_size(identity, spec.world_size if spec else None)
    if settings.mesh is not None:
        # before anything is open that an error would leave open
        resolve_sizes(settings.mesh, identity.world_size)
    heartbeat = Heartbeat(context.heartbeat_file, identity.local_rank)
    heartbeat.mark_session()
    device = devices.choose_device(identity, cpu=settings.cpu)
    if settings.bind and spec is not None:
        devices.bind_to_device_cpus(device)
    phases.mark("device")
    store = groups.open_store(identity, timeout=settings.timeout)
    placements = rank_placement.gather_placements(
        store, rank_placement.local_placement(identity, device)
    )
    if placements and settings.report:
        rank_placement.print_placements(placements)
    phases.mark("rendezvous")
    devices.activate(device)
    group = _make_group(settings, spec, identity, device, store)
    phases.mark("process_group")
    return _Worker(identity, device, group, heartbeat, [each.host for each in placements], phases)


def _make_group(
    settings: Settings,
    spec: LaunchSpec | None,
    identity: Identity,
    device: torch.device,
    store: object,
) -> groups.ProcessGroups:
    """Create the process groups and check that they work; do not wait for any that does not."""
    backend = settings.backend or groups.default_backend(device)
    try:
        group = groups.init_process_groups(
            identity, device, store=store, backend=backend, timeout=settings.timeout
        )
    except RuntimeError as error:
        what = "creating the process group"
        raise communication_check.communication_error(
            identity, backend, str(error), what=what
        ) from error
    try:
        if spec is None or spec.check:
            communication_check.check_communication(
                group, identity, device, timeout=settings.timeout
            )
    except BaseException:
        group.abandon()
        raise
    return group


def _rates(settings: Settings, worker: _Worker, wrapper: Wrapper) -> Rates:
    def find_peak() -> float | None:
        """Return the peak for the precision that the model computes in."""
        dtype = AUTOCAST_DTYPES.get(settings.precision)
        if dtype is None:
            dtype = next(
                (each.dtype for model in wrapper.models for each in model.model.parameters()), None
            )
        return peak_flops(worker.device, dtype)

    return Rates(find_peak=find_peak, find_copies=lambda: wrapper.mesh.tensor, device=worker.device)


def _make_boundary(
    settings: Settings,
    folder: RunFolder | None,
    worker: _Worker,
    *,
    wrapper: Wrapper,
    lines: LineWriter,
    trackers: Trackers,
) -> Boundary:
    rank, control = worker.identity.rank, worker.group.control
    events = EventWriter(folder.rank_events if folder and rank == 0 else None)
    stop_on_nonfinite = settings.on_nonfinite == "stop" and settings.precision != "fp16"
    return Boundary(
        group=control,
        heartbeat=worker.heartbeat,
        events=events,
        metrics=Metrics(
            lines,
            group=control,
            rank=rank,
            own=trackers.own,
            rates=_rates(settings, worker, wrapper),
        ),
        loss_check=NonFiniteLossCheck(rank=rank, on=stop_on_nonfinite),
        checkpoint_schedule=CheckpointSchedule(settings, rank=rank, events=events),
        progress=ProgressBar(settings.progress and rank == 0),
        stragglers=StragglerDetector(
            lines,
            rank=rank,
            hosts=worker.hosts,
            world_size=worker.identity.world_size,
            factor=settings.straggler_factor,
            device=worker.device,
        ),
        profiler=ProfilerWindow(
            settings.profile, folder=folder.path if folder else None, rank=rank
        ),
        replicas=ReplicaCheck(wrapper, group=control, every=settings.replica_check),
        sync_buffers=wrapper.sync_buffers,
        phases=worker.phases,
    )


def _make_run(
    settings: Settings,
    context: LaunchContext,
    folder: RunFolder | None,
    worker: _Worker,
    *,
    wrapper: Wrapper,
    boundary: Boundary,
    trackers: Trackers,
) -> Run:
    identity, spec = worker.identity, context.launch_spec
    return Run(
        identity=identity,
        device=worker.device,
        group=worker.group,
        settings=settings,
        params=Params(spec.params if spec else {}),
        wrapper=wrapper,
        gradients=Gradients(
            wrapper,
            precision=settings.precision,
            world_size=identity.world_size,
            skip_nonfinite=settings.on_nonfinite == "skip",
        ),
        boundary=boundary,
        folder=folder,
        paths=Paths.read(os.environ, folder),
        attempt=context.attempt,
        reporter=TrialReporter(
            folder.path if folder else None, trial=spec.trial if spec else {}, rank=identity.rank
        ),
        trackers=trackers,
    )
