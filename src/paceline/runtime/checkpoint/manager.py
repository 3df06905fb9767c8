"""The checkpoints of a run, as a rank sees them: register, restore, save, harvest."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.contract.checkpoint import marker
from paceline.contract.checkpoint.names import checkpoint_step
from paceline.errors import CheckpointError, UsageError
from paceline.runtime.checkpoint import restore, retention, rng, sharded, state_tree, writer
from paceline.runtime.checkpoint.buffers import Memory
from paceline.runtime.checkpoint.newest import Peers, damage_of, sound_one_at
from paceline.runtime.checkpoint.reader import Source
from paceline.runtime.checkpoint.retention import Policy
from paceline.runtime.checkpoint.state_tree import Taken
from paceline.runtime.checkpoint.writer import Job

log = logging.getLogger("paceline")

# Harvests at which the memory for the next save is made beside the training: optimizers have made their state by
# then, at the latest by the second time.
PREPARE_AT = (2, 8)
PATIENCE = 600.0  # seconds for the slowest rank to write its share


@dataclass(frozen=True)
class Saved:
    """How a save ended. On rank 0 `complete` means committed; on the others that their part is whole."""

    step: int
    folder: Path
    complete: bool
    error: str | None
    seconds: float  # from the copy to the commit, beside the training


@dataclass(frozen=True)
class Restored:
    step: int
    epoch: int
    meta: Any
    folder: Path
    world_size: int  # how many ranks wrote it
    own: bool  # False: it came from `start_from`


@dataclass
class _Flight:
    job: Job
    thread: threading.Thread


class Checkpoints:
    """All ranks make one, register the same objects, and call `restore` and `save` at the same places.

    `harvest` may be called at any time. `group` is a gloo group, or None for a world of one.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int = 0,
        world_size: int = 1,
        group: Any = None,
        attempt: int = 1,
        policy: Policy | None = None,
        seed: int = 0,
        warn: Callable[[str], None] = log.warning,
        patience: float = PATIENCE,
    ) -> None:
        if world_size > 1 and group is None:
            raise UsageError(
                f"checkpoints of {world_size} ranks need a process group", hint="give a gloo group"
            )
        self.folder = Path(folder)
        self.rank, self.world_size, self.group = rank, world_size, group
        self.attempt, self.seed, self.patience = attempt, seed, patience
        self.policy = policy or Policy()
        self.warn = warn
        self._objects: dict[str, Any] = {}
        self._flight: _Flight | None = None
        self._finished: list[Saved] = []
        self._count = 0
        self._last: int | None = None
        self._damaged: list[Path] = []
        self._memory = Memory(rank=rank, world_size=world_size)
        self._boundaries = 0
        self._writers: Any = None
        self._has_writers = False

    # -- what is saved ---------------------------------------------------------------------------------

    def register(self, **objects: Any) -> None:
        """Anything that has `state_dict` and `load_state_dict`. A state that cannot be saved is an error here."""
        for name, thing in objects.items():
            if not callable(getattr(thing, "state_dict", None)) or not callable(
                getattr(thing, "load_state_dict", None)
            ):
                raise UsageError(
                    f"{name}={type(thing).__name__} has no state_dict and load_state_dict",
                    hint="give it both, or put its values into `meta`",
                )
            if "/" in name:
                raise UsageError(
                    f"{name!r} is no name for an object of a checkpoint", hint="leave the slash out"
                )
            self._objects[name] = _unwrapped(thing)
        self._collect()[2].check()

    def _collect(self) -> tuple[dict[str, Any], dict[str, str], Taken, dict[str, Any]]:
        """The trees of the replicated objects, every object's kind, all tensors, and this rank's own trees."""
        taken = Taken()
        trees: dict[str, Any] = {}
        kinds: dict[str, str] = {}
        own: dict[str, Any] = {}
        for name, thing in self._objects.items():
            state = thing.state_dict()
            kind = _kind(thing)
            before = len(taken.tensors) + len(taken.sharded)
            encoded = state_tree.encode(state, name, state_tree.inline if kind == "rank" else taken.take)
            # State without a tensor is small: every rank keeps its own, and nobody has to know whose it is.
            if kind == "state" and len(taken.tensors) + len(taken.sharded) == before:
                kind = "rank"
            kinds[name] = kind
            (own if kind == "rank" else trees)[name] = encoded
        return trees, kinds, taken, own

    # -- saving ----------------------------------------------------------------------------------------

    def save(
        self, step: int, epoch: int = 0, meta: Mapping[str, Any] | None = None, wait: bool = False
    ) -> float:
        """Copy the state and let a thread write it; the seconds for which training stood still.

        With `wait`, return when the checkpoint is committed, or has failed (`harvest` tells which).
        A step that is saved already, or is just being saved, is not saved again.
        """
        began = time.perf_counter()
        if step != self._last:
            self._land()
            with _no_collection():
                self._take_off(step, epoch, meta)
        if wait:
            self._land(committed=True)
        return time.perf_counter() - began

    def _take_off(self, step: int, epoch: int, meta: Mapping[str, Any] | None) -> None:
        trees, kinds, taken, own = self._collect()
        image = self._memory.image_for(taken)
        ready = image.fill(taken)
        self._count += 1
        job = Job(
            folder=self.folder,
            step=step,
            epoch=epoch,
            meta=state_tree.encode(dict(meta or {}), "meta", state_tree.inline),
            attempt=self.attempt,
            number=self._count,
            rank=self.rank,
            world_size=self.world_size,
            image=image,
            objects=trees if self.rank == 0 else None,
            kinds=kinds,
            state={"rng": state_tree.encode(rng.capture(), "rng", state_tree.inline), "objects": own},
            ready=ready,
            device=torch.cuda.current_device() if ready else None,
            patience=self.patience,
            after=partial(self._tidy, step),
        )
        if taken.sharded:
            job.sharded = sharded.staged(image, taken.sharded)
            job.group = self._writers_group()
        thread = threading.Thread(target=writer.work, args=(job,), name="paceline-checkpoint", daemon=True)
        self._flight = _Flight(job, thread)
        self._last = step
        thread.start()

    def _tidy(self, step: int) -> None:
        # A damaged one of this very step has just been replaced by a sound one.
        damaged = [path for path in self._damaged if checkpoint_step(path.name) != step]
        self._damaged = []
        retention.tidy(self.folder, self.policy, damaged=damaged, attempt=self.attempt)

    def _writers_group(self) -> Any:
        if not self._has_writers:
            self._writers, self._has_writers = sharded.new_group(self.patience), True
        return self._writers

    def harvest(self) -> list[Saved]:
        """Saves that have ended since the last call. Nothing in flight: two comparisons."""
        self._boundaries += 1
        if self._boundaries in PREPARE_AT:
            self._prepare()
        if self._flight is not None and not self._flight.thread.is_alive():
            self._land()
        if not self._finished:
            return []
        finished, self._finished = self._finished, []
        return finished

    def _prepare(self) -> None:
        if self._objects and self._flight is None and not self._memory.is_preparing:
            with _no_collection():
                self._memory.prepare(self._collect()[2])

    @property
    def in_flight(self) -> bool:
        return self._flight is not None and self._flight.thread.is_alive()

    def _land(self, *, committed: bool = False) -> None:
        """Wait for the save in flight, if there is one, and note how it ended."""
        flight = self._flight
        if flight is None:
            return
        flight.thread.join()
        job = flight.job
        if committed and self.rank != 0:
            writer.await_commit(job)
        self._flight = None
        self._finished.append(Saved(job.step, job.final, job.error is None, job.error, job.seconds))
        if job.error is not None and self.rank == 0:
            self.warn(
                f"the checkpoint of step {job.step} could not be written to {self.folder}: {job.error}. "
                "Training goes on; the last complete checkpoint stays."
            )

    # -- restoring -------------------------------------------------------------------------------------

    def restore(self, start_from: Path | None = None) -> Restored | None:
        """Load the newest complete checkpoint of this run; else that of `start_from`; else None.

        A damaged or half-written one is skipped by name; where all of them are, it is an error. All ranks take the
        same one, or none.
        """
        self._land()
        if self.rank == 0:
            retention.sweep(self.folder, attempt=self.attempt)
        peers = Peers(self.rank, self.world_size, self.group)
        own = peers.from_first(lambda: marker.checkpoints(self.folder))
        told = []
        for folder in own:
            damage = damage_of(folder, peers, warn=self.warn)
            if damage is None:
                return self._load(folder, own=True)
            self._damaged.append(folder)
            told.append(f"{folder.name}: {damage}")
        if own:
            # A run that had come this far is not to begin again behind its owner's back.
            raise CheckpointError(
                f"none of the {len(own)} checkpoints in {self.folder} is usable ({'; '.join(told)})",
                hint=f"to begin again from nothing (or from start_from), remove them: rm -r {self.folder}/step-*",
            )
        if start_from is None:
            return None
        return self._load(sound_one_at(Path(start_from), peers, warn=self.warn), own=False)

    def _load(self, folder: Path, *, own: bool) -> Restored:
        with Source(folder) as source:
            restore.load(
                source, self._objects, rank=self.rank, world_size=self.world_size, seed=self.seed,
                new_group=self._writers_group,
            )  # fmt: skip
            found = source.marker
        self._last = found.step if own else None
        meta = state_tree.decode(found.meta, state_tree.outline)
        return Restored(found.step, found.epoch, meta, folder, found.world_size, own)

    def close(self, *, wait: bool = True) -> list[Saved]:
        """Let the save in flight end (or abandon it: it stays absent), and give the memory back."""
        if wait or not self.in_flight:
            self._land()
        if wait:  # else the process is about to end, and giving page-locked memory back waits for the device
            self._memory.release()
        self._flight = None
        finished, self._finished = self._finished, []
        return finished


@contextmanager
def _no_collection() -> Iterator[None]:
    """A walk over thousands of tensors makes the garbage collector run, and finds it nothing to do."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _kind(thing: Any) -> str:
    if getattr(thing, "per_rank_state", hasattr(thing, "micro_batches")):
        return "rank"
    if isinstance(thing, torch.nn.Module):
        return "module"
    return "optimizer" if hasattr(thing, "param_groups") else "state"


def _unwrapped(thing: Any) -> Any:
    """The user's own module: wrappers put a prefix on every key, and another world size has other wrappers."""
    while True:
        if isinstance(thing, torch.nn.parallel.DistributedDataParallel):
            thing = thing.module
        elif isinstance(thing, torch.nn.Module) and "_orig_mod" in thing._modules:
            thing = thing._modules["_orig_mod"]
        else:
            return thing
