"""Wrap a model for several ranks in place: the script keeps its object, with the same class,
attributes and state keys.

DistributedDataParallel goes inside the model, and FSDP2 works in place. So no `module.` or
`_orig_mod.` ever appears in names, and code that reads attributes of the model works at every world
size.
"""

from __future__ import annotations

import contextlib
import datetime
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import UsageError
from paceline.runtime.distributed.mesh import RankMesh
from paceline.runtime.training.ddp import DDPModel
from paceline.runtime.training.fsdp import (
    FSDPModel,
    check_parallelize,
    fsdp_blocks,
    replace_parameters,
    shard,
)
from paceline.runtime.training.meta_device import allocate, find_meta_tensors, initialize

Model = TypeVar("Model", bound=nn.Module)
MODES = ("auto", "none", "ddp", "fsdp")


class LocalModel:
    """A model that is not shared: there is one rank, mode is "none", or there is nothing to
    share.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def set_gradient_sync(self, on: bool) -> None:
        pass

    def sync_buffers(self) -> None:
        pass


WrappedModel = DDPModel | FSDPModel | LocalModel


class Wrapper:
    """Wraps and keeps all models of a session."""

    def __init__(
        self,
        device: torch.device,
        world_size: int,
        *,
        mesh: RankMesh,
        low_precision: torch.dtype | None = None,
        timeout: float | None = None,
    ) -> None:
        self.device = device
        self.world_size = world_size
        self.mesh = mesh
        self.low_precision = low_precision
        self._timeout = None if timeout is None else datetime.timedelta(seconds=timeout)
        # the group over which ranks agree on gradients that DDP has not seen
        self._control: Any = None
        self.models: list[WrappedModel] = []
        self._owned: dict[int, weakref.ref[nn.Parameter]] = {}
        self._replaced: dict[int, weakref.ref[nn.Parameter]] = {}

    def wrap(
        self,
        model: Model,
        *,
        mode: str,
        compile_options: bool | dict[str, Any],
        layers: Any,
        parallelize: Callable[[Any, Any], Any] | None,
        init: Callable[[Any], Any] | None,
        comm_hook: Any,
        options: dict[str, Any],
    ) -> Model:
        """Wrap a model in place and return it. See `Run.wrap`."""
        if mode not in MODES:
            raise UsageError(
                f"Unknown mode {mode!r} for run.wrap.", hint=f"Use one of {', '.join(MODES)}."
            )
        if any(each.model is model for each in self.models):
            raise UsageError("This model is already wrapped.", hint="Call run.wrap once per model.")
        if mode == "auto" and self.mesh.sizes is not None:
            mode = "fsdp"
        if mode == "fsdp" or parallelize is not None:
            check_parallelize(model, self.mesh, parallelize, mode=mode)
        has_values = not find_meta_tensors(model)
        if init is not None and has_values:
            raise UsageError(
                "run.wrap(..., init=...) is for models on the meta device, but this one already "
                "has values.",
                hint='Build it under `with torch.device("meta"):`, or call model.apply(init) '
                "before run.wrap.",
            )
        if comm_hook is not None and mode in ("fsdp", "none"):
            raise UsageError(
                f"comm_hook needs DDP, but mode is {mode!r}.", hint="Leave out comm_hook."
            )
        before = list(model.parameters())
        initialize_sharded = mode == "fsdp" and self.world_size > 1 and not has_values
        if not has_values and not initialize_sharded:
            self._initialize(model, layers, init)
        if not initialize_sharded:
            model.to(self.device)
        if mode == "fsdp":
            wrapped = self._shard(model, layers, parallelize, options)
            if initialize_sharded:
                self._initialize(model, layers, init)
        elif (
            mode == "none"
            or self.world_size == 1
            or not (before or any(True for _ in model.buffers()))
        ):
            wrapped = LocalModel(model)
        else:
            wrapped = self._replicate(model, compile_options, comm_hook, options)
        if compile_options and not isinstance(wrapped, DDPModel):
            model.compile(**(compile_options if isinstance(compile_options, dict) else {}))
        now = {id(parameter): weakref.ref(parameter) for parameter in model.parameters()}
        self._owned.update(now)
        self._replaced.update({id(old): weakref.ref(old) for old in before if id(old) not in now})
        self.models.append(wrapped)
        return model

    def _replicate(
        self,
        model: nn.Module,
        compile_options: bool | dict[str, Any],
        comm_hook: Any,
        options: dict[str, Any],
    ) -> DDPModel:
        if self._control is None:
            self._control = dist.new_group(backend="gloo", timeout=self._timeout)
        return DDPModel(
            model,
            device=self.device,
            control=self._control,
            compile_options=compile_options,
            comm_hook=comm_hook,
            options=options,
        )

    def owns(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter belongs to a wrapped model, as it is now."""
        found = self._owned.get(id(parameter))
        return found is not None and found() is parameter

    def _shard(
        self,
        model: nn.Module,
        layers: Any,
        parallelize: Callable[[Any, Any], Any] | None,
        options: dict[str, Any],
    ) -> WrappedModel:
        if self.world_size == 1:
            replace_parameters(model)
            return LocalModel(model)
        if self.low_precision is not None:
            from torch.distributed.fsdp import MixedPrecisionPolicy

            policy = MixedPrecisionPolicy(
                param_dtype=self.low_precision, reduce_dtype=torch.float32
            )
            options.setdefault("mp_policy", policy)
        return shard(model, mesh=self.mesh, layers=layers, parallelize=parallelize, options=options)

    def _initialize(self, model: nn.Module, layers: Any, init: Callable[[Any], Any] | None) -> None:
        """Give a model on the meta device its initial values."""
        blocks = list(fsdp_blocks(model, layers))
        seed = self.mesh.group.share_number(int(torch.randint(1 << 62, ())))
        tensors = find_meta_tensors(model)
        allocate(model, tensors, self.device)
        initialize(model, tensors, blocks=blocks, init=init, seed=seed, device=self.device)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
        """Return an optimizer's parameters. Raises UsageError if one does not belong to a wrapped
        model.
        """
        found = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        name = type(optimizer).__name__
        for parameter in found:
            old = self._replaced.get(id(parameter))
            if old is not None and old() is parameter:
                raise UsageError(
                    f"{name} holds parameters from before run.wrap, so it would train nothing.",
                    hint="Wrap the model first, then build the optimizer: opt = "
                    "Optimizer(model.parameters()).",
                )
            if self.world_size > 1 and not self.owns(parameter):
                raise UsageError(
                    f"{name} holds a parameter of shape {tuple(parameter.shape)} that belongs to "
                    "no wrapped model, so "
                    "its values would drift apart between ranks.",
                    hint="Put it into a module, wrap that module, and build the optimizer after "
                    "that.",
                )
        return found

    def keeps_in_sync(self, thing: Any) -> bool:
        """Return whether DDP or FSDP2 handles this model, or all parameters of this optimizer."""
        if isinstance(thing, DistributedDataParallel):
            return True
        models = [each.model for each in self.models if not isinstance(each, LocalModel)]
        handled = {id(parameter) for model in models for parameter in model.parameters()}
        groups = getattr(thing, "param_groups", ())
        parameters = (
            thing.parameters()
            if isinstance(thing, nn.Module)
            else (p for g in groups for p in g["params"])
        )
        found = [id(parameter) in handled for parameter in parameters]
        return bool(found) and all(found)

    def sync_buffers(self) -> None:
        """Copy rank 0's buffers to all ranks: evaluation and saves read them everywhere."""
        for each in self.models:
            each.sync_buffers()

    def parameters(self) -> Iterator[nn.Parameter]:
        for each in self.models:
            yield from each.model.parameters()

    def close(self) -> None:
        """Take the hooks off the models, which work on without the session."""
        for each in self.models:
            if isinstance(each, DDPModel):
                each.close()

    def join(self, models: tuple[nn.Module, ...]) -> contextlib.AbstractContextManager[Any]:
        """Return torch's Join context over these DDP models, or over all of them."""
        joinable: list[Any] = [
            each.ddp
            for each in self.models
            if isinstance(each, DDPModel)
            and each.ddp is not None
            and (not models or any(each.model is model for model in models))
        ]
        if not joinable:
            return contextlib.nullcontext()
        from torch.distributed.algorithms.join import Join

        return Join(joinable)
