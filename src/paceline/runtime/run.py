"""`Run`: what a training script holds. Plain torch objects go in and come out; the loop is the script's own."""

from __future__ import annotations

import builtins
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, overload

import torch
import torch.distributed as dist

from paceline.contract.run_folder import RunFolder
from paceline.errors import RunError, UsageError
from paceline.runtime.boundary.boundary import Boundary
from paceline.runtime.boundary.checkpoint_schedule import warn
from paceline.runtime.boundary.stop import Pruned
from paceline.runtime.checkpoint import CheckpointManager, Restored
from paceline.runtime.data.evaluation import make_evaluation_loader
from paceline.runtime.data.loader import make_loader
from paceline.runtime.data.randomness import seed_everything
from paceline.runtime.distributed import process_group as groups
from paceline.runtime.distributed.identity import Identity
from paceline.runtime.loop import Loop
from paceline.runtime.metrics.report import TrialReporter
from paceline.runtime.paths import Paths
from paceline.runtime.settings import Params, Settings
from paceline.runtime.trackers.selection import Trackers
from paceline.runtime.trackers.wandb.noop import NoopRun
from paceline.runtime.training.gradients import Gradients
from paceline.runtime.training.wrap import DDPModel, Model, Wrapper

KEPT_EVALUATIONS = 8  # data sets whose workers stay for the next evaluation


class Run:
    """A session, seen from the script. Every rank calls the same methods in the same order."""

    def __init__(
        self,
        *,
        identity: Identity,
        device: torch.device,
        group: groups.ProcessGroups,
        settings: Settings,
        params: Params,
        wrapper: Wrapper,
        gradients: Gradients,
        boundary: Boundary,
        folder: RunFolder | None,
        places: Paths,
        attempt: int,
        reports: TrialReporter,
        trackers: Trackers,
    ) -> None:
        self.identity = identity
        self.device = device
        self.settings = settings
        self.params = params
        self.folder = folder.path if folder else None
        self.source_dir, self.scratch_dir, self.data_dir = (
            places.source_dir,
            places.scratch_dir,
            places.data_dir,
        )
        self.checkpoints_dir, self.logs_dir = places.checkpoints_dir, places.logs_dir
        self.project, self.experiment = places.project, places.experiment
        self.rank, self.world_size = identity.rank, identity.world_size
        self.local_rank = identity.local_rank
        self.autocast = gradients.autocast
        self.backward = gradients.backward
        self.update = gradients.update
        self._group = group
        self._run_folder = folder
        self._attempt = attempt
        self._reports = reports
        self._trackers = trackers
        self._wrapper = wrapper
        self._gradients = gradients
        self._boundary = boundary
        self._metrics = boundary.metrics
        self._loop = Loop(boundary, gradients, device=device, rank=self.rank, max_steps=settings.max_steps)
        boundary.loss_check.counter = self._loop
        gradients.loss_check = boundary.loss_check if boundary.loss_check.on else None
        gradients.stragglers = boundary.stragglers if boundary.stragglers.on else None
        self._restored: Restored | None = None
        self._loaders: list[Any] = []
        self._evaluations: dict[tuple[int, Any, Any], tuple[Any, Any]] = {}
        self._first_calls = 0

    # -- models and data -------------------------------------------------------------------------------

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0

    @property
    def group(self) -> Any:
        """The process group of the gradients; None in a world of one."""
        return self._group.main

    def wrap(
        self,
        model: Model,
        *,
        mode: str = "auto",
        compile: bool | dict[str, Any] = False,
        layers: Any = None,
        **options: Any,
    ) -> Model:
        """Move a model to the device and keep it equal on all ranks. Returns the same object.

        mode: "auto" (DDP with several ranks), "ddp", "fsdp" (FSDP2) or "none". `options` go to
        DistributedDataParallel or `fully_shard`; `compile` takes True or the options of `torch.compile`;
        `layers` names the classes that FSDP2 gathers one at a time. Build optimizers after it.
        """
        return self._wrapper.wrap(model, mode=mode, compiling=compile, layers=layers, options=options)

    def loader(self, dataset: Any, *, batch_size: int, **options: Any) -> Any:
        """Batches for `steps`: `batch_size` is the global one, the order is the same at every world size.

        Options: accumulate, shuffle, drop_last, num_workers, collate_fn, resident, ... (see `MapLoader`).
        """
        options.setdefault("seed", self.settings.seed or 0)
        options.setdefault("device", self.device)
        made = make_loader(
            dataset, batch_size=batch_size, identity=self.identity, group=self._group.control, **options
        )
        self._loaders.append(made)
        return made

    def resume(self, *, folder: str | Path | None = None, **objects: Any) -> Restored | None:
        """Load the newest complete checkpoint into these objects, or begin afresh; from now on they are saved.

        Anything that has `state_dict` and `load_state_dict`. Checkpoints go to the run folder, or to `folder`;
        with neither there are none.
        """
        place = (
            Path(folder) if folder is not None else self._run_folder.checkpoints if self._run_folder else None
        )
        if place is None:
            return None
        if self._loop.begun:
            raise UsageError("run.resume after the first step", hint="Call it once, ahead of the loop.")
        if self._gradients.scaler is not None:
            objects.setdefault("scaler", self._gradients.scaler)
        known = {id(thing) for thing in objects.values()}
        for number, each in enumerate(loader for loader in self._loaders if id(loader) not in known):
            objects.setdefault(f"loader_{number}", each)
        checkpoint_schedule = self._boundary.checkpoint_schedule
        checkpoints = CheckpointManager(
            place, rank=self.rank, world_size=self.world_size, group=self._group.control, attempt=self._attempt,
            policy=checkpoint_schedule.policy(), seed=self.settings.seed or 0, warn=warn,
        )  # fmt: skip
        self._restored = found = checkpoint_schedule.resume(checkpoints, objects)
        if found is not None:
            self._loop.step, self._loop.epoch = found.step, found.epoch
            self._loop.skip = int(found.meta.get("plain_batches", 0))
            self.print(f"paceline: resumed at step {found.step} from {found.folder}", file=sys.stderr)
        return found

    # -- the loop --------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Steps done, over all epochs and attempts."""
        return self._loop.step

    @property
    def epoch(self) -> int:
        return self._loop.epoch

    def epochs(self, count: int) -> Iterator[int]:
        """Epochs up to `count` in all; after a resume it goes on with the one that was interrupted."""
        return self._loop.epochs(count)

    def steps(self, loader: Any, *, max_steps: int | None = None, accumulate: int = 1) -> Iterator[Any]:
        """Batches of one epoch; between two of them lies the step boundary: beat, save when due, stop when asked.

        Takes what `run.loader` made, or any iterable of batches (then every rank must have equally many, and
        `accumulate` counts batches per update). `max_steps` limits this loop.
        """
        apart = self.settings.seed if self.world_size > 1 and self._restored is None else None
        self._loop.begin(seed=apart)
        return self._loop.steps(loader, max_steps=max_steps, accumulate=accumulate)

    def evaluate(
        self, data: Any, *, batch_size: int | None = None, num_workers: int | None = None
    ) -> Iterator[Any]:
        """This rank's part of a data set: every sample once over all ranks, equally many forwards on each.

        `batch_size` is global. Call `model.eval()` and `torch.no_grad()` around it as usual. All ranks call it.
        """
        key = (id(data), batch_size, num_workers)
        if key not in self._evaluations:
            made = make_evaluation_loader(
                data, batch_size=batch_size, identity=self.identity, device=self.device,
                seed=self.settings.seed or 0, num_workers=num_workers, group=self._group.control,
            )  # fmt: skip
            self._evaluations[key] = (data, made)
            if len(self._evaluations) > KEPT_EVALUATIONS:  # a script that makes its data anew in every epoch
                self._evaluations.pop(next(iter(self._evaluations)))[1].close()
        self._boundary.begin_evaluation()
        for batch in self._evaluations[key][1]:
            yield batch
            self._boundary.after_forward(self.step, in_a_step=self._loop.micro is not None)

    # -- numbers ---------------------------------------------------------------------------------------

    def log(self, **values: Any) -> None:
        """Numbers of this step, averaged over micro-steps and ranks (by samples, in the loop), written by rank 0.

        Tensors stay on their device: nothing waits for them.
        """
        loop = self._loop
        micro = loop.micro
        if micro is None:
            self._metrics.log(loop.step, loop.epoch, 0, 1.0, values)
        else:
            samples = micro.global_count if loop.weighted else 0
            self._metrics.log(loop.step + 1, loop.epoch, samples, micro.count, values)

    @property
    def wandb(self) -> Any:
        """The live W&B run, for what `log` does not take (images, tables, artifacts).

        Where there is none (other ranks, W&B off), an object that takes every call and does nothing.
        """
        found = self._trackers.wandb_run()
        return found if found is not None else NoopRun()

    def report(self, value: Any = None, *, step: int | None = None, **named: Any) -> None:
        """Say how good the model is: `run.report(loss)`, once per epoch or so. Called on all ranks; rank 0's counts.

        In a sweep the last report is the trial's value, and a trial that is not worth going on ends here: on all
        ranks together, and for good. Nothing after it runs. Outside of sweeps it is only written down.
        """
        chosen = self._reports.chosen(value, named)
        gives_up = self._reports.add(chosen, self.step if step is None else step)
        if self._reports.can_prune and self._boundary.consensus.any_rank(gives_up):
            raise Pruned

    @overload
    def sum(self, value: torch.Tensor) -> torch.Tensor: ...
    @overload
    def sum(self, value: int) -> int: ...
    @overload
    def sum(self, value: float) -> float: ...
    def sum(self, value: torch.Tensor | float) -> torch.Tensor | float:
        """The sum over all ranks, on all ranks. A tensor stays where it is; a number comes back as a number."""
        if isinstance(value, torch.Tensor):
            total = value.detach().clone()
            if self.world_size > 1:
                on_device = total.device.type == self.device.type
                dist.all_reduce(total, group=self._group.main if on_device else self._group.control)
            return total
        if self.world_size == 1:
            return value
        number = torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)
        dist.all_reduce(number, group=self._group.control)
        return number.item()

    def mean(self, value: torch.Tensor | float) -> Any:
        """The mean over all ranks, on all ranks."""
        return self.sum(value) / self.world_size

    def print(self, *words: Any, **options: Any) -> None:
        """Print on rank 0 only."""
        if self.rank == 0:
            builtins.print(*words, **{"flush": True, **options})

    # -- together and apart ----------------------------------------------------------------------------

    @property
    def should_stop(self) -> bool:
        """For hand-written loops: ask once per step, on all ranks; the answer is the same on all of them.

        Inside `run.steps` it is not needed: the loop ends by itself.
        """
        if self._loop.micro is None and not self._boundary.stopping:
            self._loop.step += 1
        self._loop.begun = True
        return self._boundary.poll(self.step)

    def save(self, *, wait: bool = False) -> None:
        """Save now, between steps. Called on all ranks.

        Within `run.epochs`, after the loop over its steps, the state is that of the last step's end: a resume does
        once more what follows the loop (a scheduler's step), and saves it with the next step.
        """
        if self._loop.micro is not None:
            raise UsageError(
                "run.save inside a step", hint="run.steps saves between steps; set save_every_steps."
            )
        after_its_loop = self._loop.in_epochs and self._boundary.epoch == self.epoch
        self._boundary.enter_epoch(self.epoch)
        # An epoch's body is entered again after a resume: what it does after its loop must not have been done.
        with self._boundary.checkpoint_schedule.at_snapshot() if after_its_loop else contextlib.nullcontext():
            self._boundary.save(self.step, wait=wait)

    @contextlib.contextmanager
    def rank_zero_first(self) -> Iterator[None]:
        """Rank 0 runs the body first (a download, a cache), then all others at once."""
        self._first_calls += 1
        key = f"first/{self._first_calls}"
        store = self._group.store
        if store is None:
            yield
        elif self.rank == 0:
            word = "failed"
            try:
                yield
                word = "done"
            finally:
                store.set(key, word)
        else:
            if groups.wait_for_key(store, key) != "done":
                raise RunError("rank 0 failed in rank_zero_first", hint="Its own error says why.")
            yield

    def join(self, *models: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
        """For loops whose ranks have unequally many batches: ranks that are through shadow the others' reductions.

        `run.steps` over `run.loader` does not need it. A no-op in a world of one.
        """
        replicas = [each for each in self._wrapper.wrapped if isinstance(each, DDPModel)]
        asked: list[Any] = [
            each.ddp for each in replicas if not models or any(each.model is model for model in models)
        ]
        if not asked:
            return contextlib.nullcontext()
        from torch.distributed.algorithms.join import Join

        return Join(asked)

    @staticmethod
    def seed_everything(seed: int, deterministic: bool = False) -> None:
        """Seed Python, NumPy and torch; `deterministic` also asks torch for repeatable kernels."""
        seed_everything(seed, deterministic)

    # -- the session's calls ---------------------------------------------------------------------------

    def _save_at_end(self) -> None:
        """What a finished run leaves: its last state, unless that is saved already."""
        checkpoint_schedule = self._boundary.checkpoint_schedule
        if self.step > 0 and self.step != checkpoint_schedule.last_step:
            self._boundary.enter_epoch(self.epoch)
            self._boundary.save(self.step, wait=True)

    @property
    def _current_step(self) -> int:
        """The step that is being done: what an error names."""
        return self._loop.current

    def _close(self) -> None:
        """End data-loader workers, and the profiler's window."""
        self._reports.close()
        self._boundary.profiler.close()
        for made in [*self._loaders, *(made for _, made in self._evaluations.values())]:
            made.close()
