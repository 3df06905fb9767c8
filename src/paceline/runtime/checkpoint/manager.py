"""The checkpoint manager: register objects, restore them, save them in the background."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.contract.checkpoint import (
    Marker,
    Score,
    checkpoint_name,
    checkpoint_step,
    is_complete,
    list_checkpoints,
)
from paceline.errors import CheckpointError, UsageError
from paceline.runtime import randomness
from paceline.runtime.checkpoint import restore, retention, state_tree, writer
from paceline.runtime.checkpoint.folder_owner import FolderOwner
from paceline.runtime.checkpoint.initial_weights import load_weights
from paceline.runtime.checkpoint.reader import CheckpointReader, RankGroup, find_newest, find_start
from paceline.runtime.checkpoint.retention import RetentionPolicy
from paceline.runtime.checkpoint.save_buffer import Image
from paceline.runtime.checkpoint.writer import SaveTask

log = logging.getLogger("paceline")

THREAD = "paceline-checkpoint"  # the name of threads that write
PAUSE = 0.01  # seconds between two questions whether all ranks have written
SAVE_TIMEOUT = 600.0  # seconds for the slowest rank to write its share


@dataclass(frozen=True)
class Saved:
    """The outcome of a save. `complete` means committed on rank 0; on others, that their part is
    written.
    """

    step: int
    folder: Path
    complete: bool
    error: str | None
    seconds: float  # from the copy to the commit, in the background


@dataclass(frozen=True)
class Restored:
    """The checkpoint that was loaded."""

    step: int
    epoch: int
    meta: Any
    folder: Path
    world_size: int  # how many ranks wrote it
    own: bool  # False if it came from `start_from`
    weights_only: bool = False  # whether all but the weights is fresh


class CheckpointManager:
    """Saves and restores registered objects.

    All ranks create one, register the same objects, and call `restore` and `save` at the same
    points. `poll` may be called at any time. `group` is a gloo group, or None for a single rank.
    `tensor` neighbouring ranks work on the same samples.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int = 0,
        world_size: int = 1,
        tensor: int = 1,
        group: Any = None,
        attempt: int = 1,
        policy: RetentionPolicy | None = None,
        seed: int = 0,
        warn: Callable[[str], None] = log.warning,
        timeout: float = SAVE_TIMEOUT,
    ) -> None:
        self.folder = Path(folder)
        self.rank, self.world_size, self.tensor, self.group = rank, world_size, tensor, group
        self.attempt, self.seed, self.timeout = attempt, seed, timeout
        self.policy = policy or RetentionPolicy()
        self.warn = warn if rank == 0 else _ignore
        self._objects: dict[str, Any] = {}
        self._per_rank: frozenset[str] = frozenset()  # declared, or found to differ between ranks
        self._in_sync: frozenset[str] = frozenset()
        self._task: SaveTask | None = None
        self._thread: threading.Thread | None = None
        self._finished: list[Saved] = []
        self._saves = 0
        self._last_step: int | None = None
        self._damaged: list[Path] = []
        self._is_failing = False  # whether the last save has failed
        # the policy's metric by step: of the last save, and the newest
        self._values: dict[int, float] = {}
        self._image: Image | None = None  # for the next save, until the state's layout changes
        self._owner: FolderOwner | None = None

    # -- what is saved

    def declare(self, *, per_rank: Collection[str] = (), in_sync: Collection[str] = ()) -> None:
        """Name the objects that have their own state on each rank, and those that DDP or FSDP keep
        in sync.
        """
        self._per_rank, self._in_sync = frozenset(per_rank), frozenset(in_sync)

    def register(self, **objects: Any) -> None:
        """Add objects with `state_dict` and `load_state_dict`. Raises an error if a state can't be
        saved.
        """
        for name, thing in objects.items():
            if not callable(getattr(thing, "state_dict", None)) or not callable(
                getattr(thing, "load_state_dict", None)
            ):
                raise UsageError(
                    f"{name}={type(thing).__name__} has no state_dict and load_state_dict.",
                    hint="Add both methods, or put its values into `meta`.",
                )
            if "/" in name:
                raise UsageError(
                    f"The object name {name!r} contains a slash.", hint="Use a name without one."
                )
            self._objects[name] = state_tree.unwrap(thing)
        self._collect().tensors.check()

    def _collect(self) -> state_tree.ObjectStates:
        return state_tree.collect(self._objects, per_rank=self._per_rank, rank=self.rank)

    def _collect_and_compare(self) -> state_tree.ObjectStates:
        """Return the state of the objects. Those that differ between ranks are saved per rank from
        now on.
        """
        states = self._collect()
        if self.world_size == 1:
            return states
        differing = self._find_differing(states)
        if not differing:
            return states
        self._per_rank |= differing
        for name in sorted(differing):
            wrap = (
                " (if it should be the same, wrap it with run.wrap)"
                if states.kinds[name] == "module"
                else ""
            )
            self.warn(
                f"the state of {name!r} differs between ranks{wrap}, so each rank saves its own. "
                "With a different "
                "number of ranks, all of them get rank 0's. If that is wrong: run.resume(..., "
                f"per_rank={{{name!r}: ...}})"
            )
        return self._collect()

    def _find_differing(self, states: state_tree.ObjectStates) -> set[str]:
        """Compare the state that nothing else keeps the same. What DDP or FSDP handle isn't
        compared.
        """
        names = [
            name
            for name, thing in self._objects.items()
            if name not in self._per_rank
            and name not in self._in_sync
            and not state_tree.is_loader(thing)
        ]
        if state_tree.find_differing(
            {"names": state_tree.digest_state([*self._objects, names], [])}, self.group
        ):
            raise CheckpointError(
                f"The ranks resumed different objects; rank {self.rank} has "
                f"{', '.join(self._objects)}.",
                hint="Call run.resume with the same names in the same order on all ranks.",
            )
        digests = {
            name: state_tree.digest_state(*states.comparable(name, self._objects[name]))
            for name in names
        }
        return state_tree.find_differing(digests, self.group) if names else set()

    # -- saving

    def save(
        self,
        step: int,
        epoch: int = 0,
        meta: Mapping[str, Any] | None = None,
        wait: bool = False,
        *,
        replace: bool = False,
    ) -> float:
        """Copy the state, write it in a thread, and return the seconds for which training was
        blocked.

        With `wait`, return once the checkpoint is committed or has failed; `poll` returns the
        outcome. A step that is already saved or being saved isn't saved again, except with
        `replace`.
        """
        start = time.perf_counter()
        if step != self._last_step or replace:
            self._finish_save()
            self._start_save(step, epoch, meta)
        if wait:
            self._finish_save(committed=True)
        return time.perf_counter() - start

    def _start_save(self, step: int, epoch: int, meta: Mapping[str, Any] | None) -> None:
        states = self._collect_and_compare()
        if self._image is None or not self._image.fits(states.tensors):
            self._release_image()
            self._image = Image(states.tensors, rank=self.rank, world_size=self.world_size)
        ready = self._image.fill(states.tensors)
        self._saves += 1
        rng_tree = state_tree.encode(randomness.capture(), "rng", state_tree.store_inline)
        marker = Marker(
            step=step,
            epoch=epoch,
            world_size=self.world_size,
            save=f"{self.attempt}-{self._saves}",
            time=0.0,
            meta=state_tree.encode(
                {**(meta or {}), **self._score_of(step)}, "meta", state_tree.store_inline
            ),
            objects=states.kinds,
            tensor=self.tensor,
        )
        task = SaveTask(
            folder=self.folder,
            marker=marker,
            attempt=self.attempt,
            number=self._saves,
            rank=self.rank,
            image=self._image,
            objects=states.replicated if self.rank == 0 else None,
            state={"rng": rng_tree, "objects": states.per_rank},
            ready=ready,
            device=torch.cuda.current_device() if ready else None,
            timeout=self.timeout,
            on_commit=partial(self._prune, step),
            before_commit=self._owner.check if self._owner is not None else None,
        )
        thread = threading.Thread(target=writer.run, args=(task,), name=THREAD, daemon=True)
        self._task, self._thread = task, thread
        self._last_step = step
        try:
            thread.start()
        except RuntimeError:  # the interpreter is shutting down, which forbids new threads
            self._thread = None
            writer.run(task)

    def _release_image(self) -> None:
        if self._image is not None:
            self._image.close()
            self._image = None

    def _prune(self, step: int) -> None:
        # A damaged checkpoint of this very step has just been replaced.
        damaged = [path for path in self._damaged if checkpoint_step(path.name) != step]
        self._damaged = []
        self._attach_value()
        retention.prune(self.folder, self.policy, damaged=damaged, attempt=self.attempt)

    # -- the best one

    def attach(self, step: int, value: float) -> None:
        """Record the value of the policy's metric at this step, now or when its checkpoint is
        committed. Rank 0.
        """
        saved = {each: known for each, known in self._values.items() if each == self._last_step}
        self._values = {**saved, step: value}
        if not self.is_saving:
            self._attach_value()

    def is_new_best(self, step: int) -> bool:
        """Return whether the value of this step is better than those of all checkpoints."""
        value = self._values.get(step)
        return value is not None and retention.is_new_best(value, self.folder, self.policy)

    def _score_of(self, step: int) -> dict[str, Any]:
        """Return what the marker of a checkpoint of this step says about its value."""
        if self.policy.best is None or step not in self._values:
            return {}
        return Score(self.policy.best, self.policy.best_mode, self._values[step]).to_meta()

    def _attach_value(self) -> None:
        """Write a value that came after its checkpoint into it. Runs while no save does, or in its
        thread.
        """
        step = self._last_step
        if step is not None and step in self._values:
            retention.attach(self.folder / checkpoint_name(step), self._score_of(step))

    def poll(self) -> list[Saved]:
        """Return the saves that have ended since the last call. Without a running save this is
        almost free.
        """
        if self._task is not None and not self.is_saving:
            self._finish_save()
        if not self._finished:
            return []
        finished, self._finished = self._finished, []
        return finished

    @property
    def is_saving(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _finish_save(self, *, committed: bool = False) -> None:
        """Wait for the running save, if any, and record its outcome; with `committed`, all ranks
        wait until rank 0 has committed it. Raises TakenOver if this run must end.
        """
        task, thread = self._task, self._thread
        if committed and self.world_size > 1:
            # Asked again and again: no rank waits in a collective for as long as a save may take.
            while self._is_any_saving():
                time.sleep(PAUSE)
        if thread is not None:
            thread.join()
        if committed and self.world_size > 1:
            outcome = [task.error if task is not None else None]
            dist.broadcast_object_list(outcome, src=0, group=self.group)
            if task is not None:
                task.error = task.error or outcome[0]
        if task is None:
            return
        self._task = self._thread = None
        if self.rank == 0:
            self._attach_value()
        self._finished.append(
            Saved(task.marker.step, task.final, task.error is None, task.error, task.seconds)
        )
        if task.taken_over is not None:
            raise task.taken_over
        self._warn_of_failure(task)

    def _is_any_saving(self) -> bool:
        saving = torch.tensor(int(self.is_saving))
        dist.all_reduce(saving, op=dist.ReduceOp.MAX, group=self.group)
        return bool(saving)

    def _warn_of_failure(self, task: SaveTask) -> None:
        """Say why a save has failed, once for as long as all saves fail."""
        before, self._is_failing = self._is_failing, task.error is not None
        if task.error is None or before:
            return
        newest = next(filter(is_complete, list_checkpoints(self.folder)), None)
        kept = (
            f"the newest complete checkpoint is {newest.name}"
            if newest
            else "there is no complete checkpoint yet"
        )
        self.warn(
            f"could not write the checkpoint of step {task.marker.step} to {self.folder}: "
            f"{task.error}; training continues, and {kept} (reported once, until a save succeeds)"
        )

    # -- restoring

    def restore(
        self,
        start_from: Path | None = None,
        *,
        weights_only: bool = False,
        strict: bool = True,
        start_strict: bool = True,
    ) -> Restored | None:
        """Load the newest complete checkpoint of this run, otherwise that of `start_from`,
        otherwise return None.

        With `weights_only`, only the modules are loaded from `start_from`, which may be a file
        then. Without `strict`, what does not fit an object is left out, with a warning; without
        `start_strict`, only of `start_from`. Damaged and partial checkpoints are skipped with a
        warning; if all are damaged, an error is raised. All ranks load the same one.
        """
        self._finish_save()
        for thread in threading.enumerate():  # an earlier session of this process has failed
            if thread.name == THREAD:
                thread.join()
        ranks = RankGroup(self.rank, self.world_size, self.group)
        self._take_folder(ranks)
        if self.rank == 0:
            retention.clean_up(self.folder, attempt=self.attempt)
        newest, damaged = find_newest(self.folder, ranks, warn=self.warn)
        self._damaged += damaged
        if newest is not None:
            return self._load(newest, own=True, strict=strict)
        strict = strict and start_strict
        if start_from is None:
            return None
        if weights_only:
            place = load_weights(
                start_from, self._objects, strict=strict, ranks=ranks, warn=self.warn
            )
            return Restored(0, 0, {}, place, self.world_size, own=False, weights_only=True)
        return self._load(
            find_start(Path(start_from), ranks, warn=self.warn), own=False, strict=strict
        )

    def _take_folder(self, ranks: RankGroup) -> None:
        """Take the folder for this run; all ranks raise an error if another live run has it."""
        error: CheckpointError | None = None
        if self.rank == 0 and self._owner is None:
            owner = FolderOwner(self.folder)
            try:
                owner.acquire()
                self._owner = owner
            except CheckpointError as refused:
                error = refused
        if any(problems := ranks.all_gather(error.message if error else None)):
            raise error or CheckpointError(str(problems[0]), hint="See the error of rank 0.")

    def _load(self, folder: Path, *, own: bool, strict: bool) -> Restored:
        with CheckpointReader(folder) as reader:
            options = restore.Options(
                per_rank=self._per_rank,
                rank=self.rank,
                world_size=self.world_size,
                tensor=self.tensor,
                seed=self.seed,
                warn=self.warn,
                strict=strict,
                own=own,
            )
            restore.load(reader, self._objects, options)
            marker = reader.marker
        self._last_step = marker.step if own else None
        meta = state_tree.decode(marker.meta)
        return Restored(marker.step, marker.epoch, meta, folder, marker.world_size, own)

    def close(self, *, wait: bool = True) -> list[Saved]:
        """Wait for the running save, or abandon it, and release the memory. Return the saves that
        have ended.
        """
        if wait:
            self._finish_save()
        ended = self.poll()
        if self._owner is not None and not self.is_saving:
            self._owner.release()
            self._owner = None
        # otherwise the process is about to exit, and releasing page-locked memory waits for the
        # device
        if wait:
            self._release_image()
        self._task = self._thread = None
        return ended


def _ignore(text: str) -> None:
    """Say nothing: rank 0 does."""
