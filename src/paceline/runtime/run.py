"""`Run`: what a training script works with. Plain torch objects go in and come out; the loop is
the script's own.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from paceline.contract import env
from paceline.contract.run_folder import RunFolder, write_atomically
from paceline.errors import UsageError
from paceline.runtime.checkpoint.manager import CheckpointManager, Restored
from paceline.runtime.console import note
from paceline.runtime.data.evaluation import make_evaluation_loader
from paceline.runtime.data.loader import make_loader
from paceline.runtime.distributed import collectives
from paceline.runtime.distributed.identity import Identity
from paceline.runtime.distributed.process_group import ProcessGroups
from paceline.runtime.loop import Loop, LoopBatches, count_batches
from paceline.runtime.lr_scale import LrScale
from paceline.runtime.metrics.report import TrialReporter
from paceline.runtime.randomness import derive_seed, seed_everything, seed_rank
from paceline.runtime.resumable_iterable import PlainLoader
from paceline.runtime.settings import Params, Settings
from paceline.runtime.step_boundary.boundary import Boundary
from paceline.runtime.step_boundary.stop_consensus import Pruned
from paceline.runtime.trackers.config import plain_config
from paceline.runtime.trackers.threads import Trackers
from paceline.runtime.training.capture.captured_step import CapturedStep
from paceline.runtime.training.capture.step_graph import Records
from paceline.runtime.training.fsdp import check_batch
from paceline.runtime.training.gradients import Gradients
from paceline.runtime.training.wrap import Model, Wrapper

Number = TypeVar("Number", torch.Tensor, int, float)
Value = TypeVar("Value")
DEFAULT_EXPERIMENT = "default"


class Run:
    """An open session, as the script sees it. Every rank calls the same methods in the same order.

    Attributes:
        rank: The number of this process, from 0, as in torch.distributed.
        world_size: The number of ranks.
        local_rank: The number of this process on its node.
        identity: These and more: `local_world_size`, `node`, `num_nodes`, and `source`, what
            started the ranks.
        device: The device of this rank.
        params: The script's parameters: `[params]` of paceline.toml and `--param`. Read-only.
        settings: The settings of the session, with what the command line has overridden.
        project: The project's name.
        experiment: The experiment's name.
        folder: The run folder; None without one.
        source_dir: The folder of the code that runs.
        scratch_dir: The scratch folder, which holds all runs; None if there is none.
        data_dir: The folder of staged data on this node; None if there is none.
        checkpoints_dir: The folder of this run's checkpoints; None if there is none.
        logs_dir: The folder of this run's logs; None if there is none.
    """

    def __init__(
        self,
        *,
        identity: Identity,
        device: torch.device,
        group: ProcessGroups,
        settings: Settings,
        params: Params,
        wrapper: Wrapper,
        gradients: Gradients,
        boundary: Boundary,
        folder: RunFolder | None,
        attempt: int,
        reporter: TrialReporter,
        trackers: Trackers,
    ) -> None:
        self.identity, self.device, self.settings, self.params = identity, device, settings, params
        self.rank, self.world_size, self.local_rank = (
            identity.rank,
            identity.world_size,
            identity.local_rank,
        )
        self.folder = folder.path if folder else None
        self.source_dir = _path(env.SOURCE_DIR) or _script_folder()
        self.project = os.environ.get(env.PROJECT) or self.source_dir.name
        self.experiment = os.environ.get(env.EXPERIMENT) or DEFAULT_EXPERIMENT
        self.scratch_dir = _path(env.SCRATCH_DIR) or _path(env.SCRATCH)
        self.data_dir, self.logs_dir = _path(env.DATA), _path(env.LOGS)
        self.checkpoints_dir = _path(env.CHECKPOINTS) or (folder.checkpoints if folder else None)
        # Bound here: a method of this class that forwards to them would cost a call per step.
        self.autocast, self.backward, self.update = (
            gradients.autocast,
            gradients.backward,
            gradients.update,
        )
        self._group = group
        self._run_folder = folder
        self._attempt = attempt
        self._reporter = reporter
        self._trackers = trackers
        self._wrapper = wrapper
        self._mesh = wrapper.mesh
        self._gradients = gradients
        self._boundary = boundary
        self._metrics = boundary.metrics
        plain = PlainLoader(device=device, rank=self.rank, world_size=self.world_size)
        self._loop = Loop(
            boundary, gradients, plain=plain, rank=self.rank, max_steps=settings.max_steps
        )
        boundary.loss_check.counter = self._loop
        gradients.loss_check = boundary.loss_check if boundary.loss_check.on else None
        gradients.stragglers = boundary.stragglers if boundary.stragglers.on else None
        if self.rank == 0:
            boundary.before_save = gradients.warn_of_pending
        self._restored: Restored | None = None
        self._loaders: list[Any] = []
        self._has_evaluated = False
        self._captured: list[CapturedStep] = []
        self._draws_own_numbers = False
        self._saved_by_hand = False
        # for what the script wants to save
        self._lacks_folder = folder is None and bool(settings.asks_for_saves)
        self._meetings = 0  # calls that wait for other ranks in the store
        self._config: dict[str, Any] = {}
        self._end: Callable[[], None] | None = None  # set by `paceline.start`
        self._pruned = False

    # -- models and data

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def group(self) -> Any:
        """The process group that reduces gradients; None with a single rank."""
        return self._group.main

    @property
    def dp_rank(self) -> int:
        """This rank's place among the data-parallel ranks: `rank`, unless a mesh has
        tensor-parallel ranks.
        """
        return self._mesh.data.rank

    @property
    def dp_size(self) -> int:
        """The number of data-parallel ranks: `world_size`, or with tensor parallelism a fraction
        of it.
        """
        return self._mesh.data.world_size

    @property
    def mesh(self) -> Any:
        """Torch's DeviceMesh, with the dimensions "replicate", "shard" and "tensor"; None if there
        is none.
        """
        return self._mesh.device_mesh

    def wrap(
        self,
        model: Model,
        *,
        mode: str = "auto",
        compile: bool | dict[str, Any] = False,
        layers: Any = None,
        mesh: Mapping[str, int] | None = None,
        parallelize: Callable[[Any, Any], Any] | None = None,
        init: Callable[[Any], Any] | None = None,
        comm_hook: Any = None,
        **options: Any,
    ) -> Model:
        """Move a model to the device and share it between ranks. Returns the same object.

        Its attributes and state keys are the same at every world size. Build optimizers after this
        call.

        `mode` is "auto" (DDP with several ranks, FSDP2 with a mesh), "ddp", "fsdp" (FSDP2) or
        "none". `compile` is True, or options for `torch.compile`. `layers` are the classes of
        blocks that FSDP2 gathers one at a time; by default, items of ModuleLists. `comm_hook` is a
        communication hook of DDP, or a pair (state, hook). Other options go to
        DistributedDataParallel or `fully_shard`.

        `mesh={"replicate": 2, "shard": 4}` keeps 2 copies of the model, each sharded over 4 ranks.
        "tensor" counts ranks that work on the same samples: `parallelize(model, mesh)` splits the
        layers between them, with torch's
        `parallelize_module`, before FSDP2 shards them. The sizes multiply to the world size; one
        may be -1. A run has one mesh. With a single rank, it has no effect.

        A model that was built on the meta device gets its values here, from its modules'
        `reset_parameters`, and from
        `init(module)`, which is called for each module after that.

        Raises UsageError if the mode is unknown, the mesh does not fit, the model is already
        wrapped, or it has parameters or buffers on the meta device that nothing initializes.
        """
        # called under `with torch.device("meta"):`
        on_meta = torch.get_default_device().type == "meta"
        with torch.device("cpu") if on_meta else contextlib.nullcontext():
            if mesh is not None:
                self._set_mesh(mesh)
            return self._wrapper.wrap(
                model,
                mode=mode,
                compile_options=compile,
                layers=layers,
                parallelize=parallelize,
                init=init,
                comm_hook=comm_hook,
                options=options,
            )

    def _set_mesh(self, mesh: Mapping[str, int]) -> None:
        was_set = self._mesh.sizes is not None
        in_use = bool(
            self._loaders or self._has_evaluated or self._loop.begun or self._draws_own_numbers
        )
        self._mesh.set(mesh, in_use=in_use)
        if not was_set and self._mesh.tensor > 1 and self.settings.seed is None:
            # Ranks that work on the same samples must draw the same dropout.
            seed_everything(
                derive_seed(self._group.share_number(torch.initial_seed() >> 1), self.dp_rank)
            )

    def loader(self, dataset: Any, *, batch_size: int | None = None, **options: Any) -> Any:
        """Return a loader for `steps`, with the same global batches at every world size.

        `dataset` is a map-style or iterable dataset, or a WebDataset pipeline. `batch_size` counts
        samples per step over all ranks. Options:

        - accumulate: how many micro-steps share the batch of a step.
        - shuffle, drop_last: both are True unless you say otherwise.
        - sampler, batch_sampler: the order of the samples, or the global batches themselves.
        - resident: keep the whole dataset on the device; transform is a function of its batches
          there.
        - sharded: the iterable already splits itself by rank and worker.
        - num_workers, collate_fn and most others of DataLoader.

        Raises UsageError if the ranks cannot share the batch evenly, or if an option is unknown or
        does not fit.
        """
        options.setdefault("seed", self.settings.seed or 0)
        options.setdefault("device", self.device)
        loader = make_loader(
            dataset,
            batch_size=batch_size,
            identity=self._mesh.data,
            group=self._group.data.control,
            **options,
        )
        # `resume` has registered what is saved
        if self._boundary.checkpoint_schedule.checkpoints is not None:
            self._loop.adopt(loader)
        self._loaders.append(loader)
        return loader

    def scale_lr(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        batch: Any = None,
        reference: int | None = None,
        rule: str = "linear",
        warmup: int = 0,
    ) -> LrScale:
        """Multiply the learning rates of an optimizer, as a larger global batch needs it.

        `reference` is the batch size that the rates were chosen for, and `batch` the global one of
        this run, or a loader that has it. Without both, the factor is the number of data-parallel
        ranks, for scripts with a fixed batch size per rank. `rule` is "linear", or "sqrt" for the
        square root of the factor.

        With `warmup`, the first step uses the rates unchanged; the factor then grows linearly and
        is reached after
        `warmup` steps. A factor below 1 needs no warm-up, and has none.

        The factor applies only while the optimizer steps: `param_groups`, schedulers and
        checkpoints keep the rates without it. So it works with every scheduler, and a resumed run
        continues in the middle of the warm-up, on any number of ranks. Returns an object with
        `factor`, `now` (the factor in this step) and `rates`, for `run.log`.

        Raises UsageError if one of `batch` and `reference` is missing, or if the optimizer is
        already scaled.
        """
        if (batch is None) != (reference is None):
            raise UsageError(
                "run.scale_lr needs both batch and reference, or neither.",
                hint="run.scale_lr(opt, batch=loader, reference=256)",
            )
        if isinstance(batch, torch.utils.data.DataLoader):
            raise UsageError(
                "The batch size of a DataLoader is that of one rank, and run.scale_lr needs the "
                "global one.",
                hint="Pass batch=loader.batch_size * run.dp_size.",
            )
        size = self.dp_size
        if batch is not None:
            size = batch if isinstance(batch, int) else batch.batch_size
        return LrScale(
            optimizer,
            size / (reference or 1),
            rule=rule,
            warmup=warmup,
            step=lambda: self._loop.step,
        )

    def resume(
        self,
        *,
        folder: str | Path | None = None,
        per_rank: Mapping[str, Any] | None = None,
        strict: bool = True,
        **objects: Any,
    ) -> Restored | None:
        """Load the newest complete checkpoint into these objects, if there is one. From now on they
        are saved.

        The objects are anything with `state_dict` and `load_state_dict`, by the name to save it
        under. Those in
        `per_rank` have separate state on each rank, such as a replay buffer; they resume only on
        the same number of ranks, unless they have a method `load_rank_states(states)`, which gets
        the states of all saved ranks. Checkpoints go to `folder`, or else to the run folder. With
        neither, nothing is saved. Returns what was restored (`step`, `epoch`, `folder`, ...), or
        None after a fresh start. A fresh run takes the weights of `--start-from`, or of
        `session(start_from=...)`: those of all modules among the objects whose name or keys match.
        `weights_only` is true then, and the step is 0.

        Objects that the checkpoint does not have yet keep their state, with a note. With
        `strict=False`, so does all that does not fit: parameters that are new or have another
        shape, and objects that cannot load their state.

        Raises UsageError after the first step, and CheckpointError if the state does not fit the
        objects.
        """
        own = dict(per_rank or {})
        if twice := sorted(own.keys() & objects.keys()):
            raise UsageError(
                f"run.resume got {twice[0]!r} twice.", hint="Pass it only in per_rank."
            )
        objects |= own
        checkpoints_dir = self._choose_checkpoints_dir(folder)
        if checkpoints_dir is None:
            self._draw_own_numbers()
            return None
        if self._loop.begun or self._boundary.checkpoint_schedule.checkpoints is not None:
            raise UsageError(
                "run.resume was called a second time, or after the first step.",
                hint="Pass all objects to one call before the loop.",
            )
        known = {id(each) for each in objects.values()}
        hidden = [each for each in self._loaders if id(each) not in known]
        ours = {f"loader_{number}": each for number, each in enumerate(hidden)}
        ours["plain_loader"] = self._loop.plain
        if self._gradients.scaler is not None:
            ours["scaler"] = self._gradients.scaler
        if taken := sorted(ours.keys() & objects.keys()):
            raise UsageError(
                f"run.resume saves state of its own as {taken[0]!r}.", hint="Use another name."
            )
        objects |= ours
        self._loop.register(objects)
        checkpoints = self._make_checkpoints(checkpoints_dir, objects, per_rank=own)
        restored = self._boundary.restore(checkpoints, objects, strict=strict)
        self._restored = None if restored is not None and restored.weights_only else restored
        if restored is not None and not restored.weights_only:
            position = (restored.meta or {}).get("position", {})
            self._loop.resume(step=restored.step, epoch=restored.epoch, position=position)
            if self.rank == 0:
                what = f"resumed at step {restored.step}" if restored.own else _position(restored)
                note(f"{what} from {restored.folder}")
        self._draw_own_numbers()
        return restored

    def _make_checkpoints(
        self, folder: Path, objects: Mapping[str, Any], *, per_rank: Mapping[str, Any]
    ) -> CheckpointManager:
        """Return what saves and restores these objects."""
        checkpoints = CheckpointManager(
            folder,
            rank=self.rank,
            world_size=self.world_size,
            tensor=self._mesh.tensor,
            group=self._group.control,
            attempt=self._attempt,
            policy=self._boundary.checkpoint_schedule.policy(),
            seed=self.settings.seed or 0,
            warn=note,
        )
        in_sync = [name for name, each in objects.items() if self._wrapper.keeps_in_sync(each)]
        checkpoints.declare(per_rank=per_rank, in_sync=in_sync)
        return checkpoints

    def _choose_checkpoints_dir(self, folder: str | Path | None) -> Path | None:
        """Return where checkpoints go; None if nothing is saved."""
        found = Path(folder).absolute() if folder is not None else None
        if found is None and self._run_folder is not None:
            found = self._run_folder.checkpoints
        self._lacks_folder = found is None
        if found is None and self.settings.start_from is not None:
            raise UsageError(
                "start_from needs a folder for checkpoints.",
                hint="Use `paceline run`, or session(folder=...).",
            )
        return found

    def _draw_own_numbers(self) -> None:
        """Let each rank draw its own random numbers from here on; up to here all drew the same, to
        build one model.

        A checkpoint has restored each rank's own. Ranks that work on the same samples draw the
        same.
        """
        seed = self.settings.seed
        if (
            seed is not None
            and self.world_size > 1
            and self._restored is None
            and not self._draws_own_numbers
        ):
            seed_rank(seed=seed, step=self.step, rank=self.dp_rank)
        self._draws_own_numbers = True

    def _note_lack_of_saves(self) -> None:
        """Say what keeps the checkpoints from being saved that the script asks for, by its
        settings or run.resume.
        """
        if self.rank != 0:
            return
        if self._lacks_folder:
            note(
                "no run folder: nothing is saved; pass folder=... or start the script with "
                "`paceline run`"
            )
        elif (
            self.settings.asks_for_saves and self._boundary.checkpoint_schedule.checkpoints is None
        ):
            note(
                f"{self.settings.asks_for_saves} is set, but nothing is saved: the script does "
                "not call run.resume. "
                "Call run.resume(model=model, opt=opt, ...) before the loop"
            )

    # -- the loop

    @property
    def step(self) -> int:
        """The number of steps done, over all epochs and attempts."""
        if self._captured:
            self._refuse_in_capture("run.step")
        return self._loop.step

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        if self._captured:
            self._refuse_in_capture("run.epoch")
        return self._loop.epoch

    def epochs(self, count: int) -> Iterator[int]:
        """Yield epochs up to `count` in total. After a resume, continue with the one that was
        interrupted.
        """
        return self._loop.epochs(count)

    def steps(
        self, loader: Any, *, max_steps: int | None = None, accumulate: int = 1, exact: bool = True
    ) -> LoopBatches:
        """Yield the batches of one epoch. Between two of them is the step boundary: heartbeat,
        save, stop.

        `loader` comes from `run.loader`, or is any iterable that yields the same number of batches
        on every rank;
        `accumulate` then counts batches per update. The loop ends after `max_steps` steps, if
        given; a resumed loop counts those that it did before. `len(run.steps(loader))` is the
        number of batches that are left, if the loader has a length.

        Raises CheckpointError if a resumed run gets other batches from an iterable than before,
        unless `exact` is False.
        """
        self._draw_own_numbers()
        if not self._loop.begun:
            self._note_lack_of_saves()
            self._loop.begin()
            if self.dp_size > 1:
                self._boundary.first_batch = lambda: self._loop.plain.digest
        if self._mesh.tensor > 1:
            self._loop.check_first = lambda batch: check_batch(batch, self._mesh, self.device)
        batches = self._loop.steps(loader, max_steps=max_steps, accumulate=accumulate, exact=exact)
        done = self._loop.count_done(loader)
        count = functools.partial(
            count_batches, loader, done=done, max_steps=max_steps, accumulate=accumulate
        )
        return LoopBatches(batches, count)

    def evaluate(
        self, data: Any, *, batch_size: int | None = None, num_workers: int | None = None
    ) -> LoopBatches:
        """Yield this rank's part of a dataset. Every sample is seen once.

        Call it on all ranks, with `model.eval()` and `torch.no_grad()` as usual. `data` is a
        dataset, a pipeline or a DataLoader; `batch_size` counts samples over all ranks. All ranks
        make the same number of forward passes: a rank with no samples left gets an empty batch of
        what the collate function returns. `len(run.evaluate(data))` is that number, if the data has
        a length.

        Raises UsageError if a sampler differs between ranks, or if there is no empty batch.
        """
        self._has_evaluated = True
        loader = make_evaluation_loader(
            data,
            batch_size=batch_size,
            identity=self._mesh.data,
            device=self.device,
            seed=self.settings.seed or 0,
            num_workers=num_workers,
            group=self._group.data.control,
        )
        return LoopBatches(self._loop.evaluate(loader), loader.count_batches)

    def capture(self, step: Callable[..., Any]) -> CapturedStep:
        """Return the function `step` as one CUDA graph: small steps then cost the host almost
        nothing.

        The function is what you would write into the loop: forward, `run.backward`, `run.update`,
        `run.log`. Call the result with each batch. The first calls run as they are, then one is
        captured, and the following ones replay it, with the same numbers as before. Keep
        schedulers, evaluation and everything else that needs the host outside the function.

        Batches of a different shape get their own graph or run eagerly. Everything runs eagerly if
        there is no GPU, or with fp16, FSDP, or an optimizer that cannot be captured; a note says
        why. It returns copies of what the function returns.

        Raises UsageError, with the line, if the step waits for the device (`loss.item()`,
        `print(loss)`), or if it uses numbers that only the host knows, because they would be the
        same in every step.
        """
        records = Records(self._metrics, self._gradients.loss_check)
        captured = CapturedStep(
            step, gradients=self._gradients, records=records, log=self._log_copies, rank=self.rank
        )
        self._captured.append(captured)
        return captured

    def _refuse_in_capture(self, what: str) -> None:
        if any(each.is_capturing for each in self._captured):
            raise UsageError(
                f"{what} in the step of run.capture would have the same value in every step.",
                hint="Use it outside of the function.",
            )

    @property
    def should_stop(self) -> bool:
        """Whether to stop, for hand-written loops. Read it once at the end of each step, on all
        ranks.

        Each time counts a step, and saves if a save is due. All ranks get the same answer. It is
        also true after
        `max_steps`. `run.steps` does not need it: that loop ends by itself. Inside or right after
        such a loop, this neither counts nor saves.
        """
        loop, boundary = self._loop, self._boundary
        counts = loop.micro is None and not loop.counted
        if loop.micro is None:
            loop.counted = False
        if not loop.begun:
            loop.begun = True
            self._note_lack_of_saves()
            self._draw_own_numbers()
            boundary.events.write("training", step=loop.step)
            loop.total_steps.write(None)  # only `max_steps` tells
            self._metrics.throughput.begin_loop()
        if counts and not boundary.stopping:
            self._metrics.throughput.steps += 1
            self._gradients.end_step()
            loop.step += 1
            boundary.enter_epoch(loop.epoch)
            boundary.checkpoint_schedule.count_step()
        return boundary.poll(loop.step, may_save=counts) or loop.is_complete

    def save(self, *, wait: bool = False) -> None:
        """Save a checkpoint now. Call it between steps, on all ranks. With `wait`, return when it
        is on disk.

        After the loop of an epoch in `run.epochs`, it saves what the body has done since, such as
        an update of averaged weights, and a resume begins the next epoch: call it at the end of the
        body. If nothing has changed since the loop ended, a resumed run executes the code after the
        loop again.

        In a loop that neither uses `run.steps` nor reads `run.should_stop`, each save counts as a
        step.

        Raises UsageError inside a step, and RunError if some ranks never call it.
        """
        loop, boundary = self._loop, self._boundary
        if loop.micro is not None:
            raise UsageError(
                "run.save was called inside a step.",
                hint="Set save_every_steps: run.steps saves between steps.",
            )
        schedule = boundary.checkpoint_schedule
        if schedule.checkpoints is None:
            return
        self._meetings += 1
        self._group.meet(
            self.identity,
            f"save/{self._meetings}",
            what="run.save()",
            timeout=self.settings.timeout,
        )
        changed = boundary.any_rank_changed()
        if not loop.is_after_loop:
            self._save_by_hand(changed, wait=wait)
        elif changed and loop.epoch_is_whole:
            boundary.save(self.step, wait=wait, replace=True, next_epoch=self.epoch + 1)
            boundary.saved_after_loop = True
            schedule.take_snapshot()
        else:
            # A resume enters the epoch's body again, so what it does after its loop must not be
            # part of the state.
            with schedule.at_snapshot():
                boundary.save(self.step, wait=wait)

    def _save_by_hand(self, changed: bool, *, wait: bool) -> None:
        loop, boundary = self._loop, self._boundary
        if changed and not loop.begun:  # nothing counts steps, so count this save
            loop.step += 1
        boundary.enter_epoch(self.epoch)
        boundary.save(self.step, wait=wait, replace=changed)
        self._saved_by_hand = True
        boundary.checkpoint_schedule.count_step()
        boundary.checkpoint_schedule.take_snapshot()

    # -- numbers

    def log(self, **values: Any) -> None:
        """Log numbers or text of this step. Numbers are averaged over micro-steps and ranks.

        A learning rate (`lr`, `learning_rate`, `lr/head`, `train/lr`) is not averaged over
        micro-steps: the last one's is written. For other values of the whole step, log in the last
        micro-step only: `if run.update(opt): ...`.

        Tensors stay on their device, and nothing waits for them. Rank 0 writes `metrics.jsonl`.
        Raises UsageError for anything but numbers, tensors of one element and text.
        """
        loop = self._loop
        micro = loop.micro
        if micro is None:
            if self._metrics.watched in values and not loop.counted:
                self._boundary.checkpoint_schedule.note_by_hand(loop.step)
            self._metrics.log(loop.step, loop.epoch, 1.0, values)
        else:
            self._metrics.log(loop.step + 1, loop.epoch, micro.count, values)

    def _log_copies(self, values: dict[str, torch.Tensor]) -> None:
        """Log what a replay of a captured step has computed."""
        loop = self._loop
        micro = loop.micro
        if micro is None:
            self._metrics.log_copies(loop.step, loop.epoch, 1.0, values)
        else:
            self._metrics.log_copies(loop.step + 1, loop.epoch, micro.count, values)

    def throughput(self, *, samples: float = 0, tokens: float = 0, flops: float = 0) -> None:
        """Count what this rank processes in this micro-step, for tokens/s and MFU. Call it in the
        loop, on all ranks.

        The numbers are those of this rank's batch: `run.throughput(tokens=x.numel(),
        flops=x.numel() * per_token)`. The next `run.log`, on all ranks or on rank 0 alone, writes
        the rates of all ranks. Ranks that a mesh puts along "tensor" have the same batch, and count
        once. Samples of `run.loader` are counted anyway. FLOPs are those of the model:
        `paceline.transformer_flops` and `paceline.count_flops` know how many.

        Args:
            samples: The number of samples, if the loader is not from `run.loader`.
            tokens: The number of tokens.
            flops: The FLOPs of the forward and the backward pass.
        """
        self._metrics.throughput.add(float(samples), float(tokens), float(flops))

    def config(self, settings: Any) -> None:
        """Record the script's own settings: the namespace of argparse, a data class or a mapping,
        nested or not.

        Call it on all ranks; rank 0 writes `config.json` in the run folder and sends it to W&B.
        `paceline show` and the CSV file of a sweep have it. Texts under names such as `api_key` are
        hidden. Another call adds to it.

        Raises UsageError for anything else.
        """
        values = plain_config(settings)
        if self.rank == 0:
            self._config |= values
            if self._run_folder is not None:
                write_atomically(self._run_folder.config, json.dumps(self._config, indent=1) + "\n")
        self._trackers.configure(values)

    @property
    def wandb(self) -> Any:
        """The W&B run, for what `log` does not take (images, tables, artifacts).

        On other ranks, or with W&B off, an object that accepts every call and does nothing.
        """
        return self._trackers.wandb_run()

    def report(self, value: Any = None, *, step: int | None = None, **named: Any) -> None:
        """Report how good the model is: `run.report(loss)` or `run.report(loss=loss)`, about once
        per epoch.

        Call it on all ranks; rank 0's value counts. In a sweep, the last report is the trial's
        score. If the sweep prunes the trial, the body ends here on all ranks, and nothing resumes
        it. Outside of sweeps, the value is only recorded. `step` is the current one by default.

        Raises UsageError if there is no value, or none with the name of the sweep's metric.
        """
        score = self._reporter.select(value, named)
        prune = self._reporter.record(score, self.step if step is None else step)
        if self._reporter.can_prune and self._boundary.consensus.any_rank(prune):
            self._pruned = True
            raise Pruned

    def sum(self, value: Number) -> Number:
        """Return the sum over all ranks, on all ranks. A tensor stays on its device; a number stays
        a number.

        A sum of booleans counts those that are true. Like `torch.sum`, it returns int64 for all
        tensors of integers; for halves, it returns float32. Where others have a tensor, a rank may
        have the number 0. Raises UsageError for anything but numbers and tensors, and on all ranks
        if tensors differ in dtype or shape.

        Ranks that a mesh puts along "tensor" work on the same samples, and count once.
        """
        total: Number = collectives.sum_over_ranks(value, self._group.data, self.device)
        return total

    def mean(
        self, value: torch.Tensor | float, *, weight: torch.Tensor | float | None = None
    ) -> Any:
        """Return the mean over all ranks, on all ranks.

        With `weight`, `value` is the mean over that many samples or tokens of this rank, and the
        result the mean over those of all ranks. A rank without any passes 0; its value does not
        matter, and may be NaN. If no rank has any, the result is NaN. Raises UsageError on all
        ranks if only some pass a weight.
        """
        return collectives.mean_over_ranks(value, weight, self._group.data, self.device)

    def gather(self, value: Value) -> list[Value]:
        """Return the values of all ranks, on all ranks, as a list in the order of ranks.

        They are tensors of any dtype and shape, or objects that can be pickled. Tensors arrive
        without gradients, on the device that they were on. Waits for all ranks.

        Raises UsageError on all ranks if an object cannot be pickled.
        """
        return collectives.gather(value, self._group.data, self.device)

    def print(self, *values: Any, **options: Any) -> None:
        """Print on rank 0 only. Takes the arguments of the built-in `print`."""
        if self.rank == 0:
            builtins.print(*values, **{"flush": True, **options})

    # -- ranks

    def rank_zero_first(self) -> contextlib.AbstractContextManager[None]:
        """Run the body on rank 0 first (a download, a cache), then on one rank of each other node,
        then on all others.

        So what the body makes in a shared folder is made once, and in a folder of each node once
        per node. Raises RunError on ranks that waited for one on which the body failed.
        """
        self._meetings += 1
        return self._group.rank_zero_first(self.identity, f"first/{self._meetings}")

    def join(self, *models: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Return torch's Join context over these models, or all, for loops with different numbers
        of batches per rank.

        Does nothing with a single rank. `run.steps` over a loader from `run.loader` does not need
        it.
        """
        return self._wrapper.join(models)

    @staticmethod
    def seed_everything(seed: int, deterministic: bool = False) -> None:
        """Seed Python, NumPy and torch. With `deterministic`, also ask torch for deterministic
        algorithms.
        """
        seed_everything(seed, deterministic)

    def end(self) -> None:
        """End a session that `paceline.start` opened, before the process ends: save, and leave with
        all ranks.

        While an exception is being handled, as in a `finally` clause, it leaves at once and saves
        nothing: the step may be half done.
        """
        if self._end is None:
            raise UsageError(
                "run.end is for sessions that paceline.start opened.",
                hint="Leave the `with` block instead.",
            )
        self._end()

    # -- called by the session

    def _save_at_end(self) -> None:
        """Save the last state, unless it is already saved."""
        boundary, loop = self._boundary, self._loop
        schedule = boundary.checkpoint_schedule
        if schedule.checkpoints is None:
            return
        if not loop.begun:
            if self._saved_by_hand and boundary.any_rank_changed():
                self._save_by_hand(True, wait=True)
        elif self.step > 0 and self.step != schedule.last_step:
            boundary.enter_epoch(self.epoch)
            # If `max_steps` ended the loop early, a resume runs what follows the loop again.
            with contextlib.nullcontext() if loop.epoch_is_whole else schedule.at_snapshot():
                boundary.save(self.step, wait=True)
        elif (
            schedule.snapshot is not None
            and boundary.epoch != self.epoch
            and boundary.any_rank_changed()
        ):
            # The last epoch's body has changed something after its loop.
            boundary.save(self.step, wait=True, replace=True, next_epoch=self.epoch)

    def _close(self) -> None:
        """End data-loader workers, and take all hooks off models and optimizers."""
        for captured in self._captured:
            captured.close()
        self._gradients.close()
        self._reporter.close()
        for loader in self._loaders:
            loader.close()


# for help(): each run has its own, bound to its gradients
for _name in ("autocast", "backward", "update"):
    setattr(Run, _name, getattr(Gradients, _name))


def _position(restored: Restored) -> str:
    return f"starting at step {restored.step} and epoch {restored.epoch}"


def _path(name: str) -> Path | None:
    """Return the folder that an agent has named in this variable."""
    value = os.environ.get(name)
    return Path(value) if value else None


def _script_folder() -> Path:
    """Return the folder of the running script; in a notebook or console, the current folder."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(os.path.abspath(file)).parent if file else Path.cwd()
