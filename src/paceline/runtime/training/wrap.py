"""Wrap a model for several ranks, and keep it the script's own object: same class, attributes and state keys.

DistributedDataParallel goes *inside* the model: calls of its forward are routed through DDP, while the script keeps the
object that it made. FSDP2 works in place anyway. So no `module.` or `_orig_mod.` ever appears in names, and code that
reads attributes of the model works at every world size.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import UsageError
from paceline.runtime.distributed.mesh import RankMesh
from paceline.runtime.training.fsdp import FSDPModel, check_parallelize, replace_parameters, shard

Model = TypeVar("Model", bound=nn.Module)
MODES = ("auto", "none", "ddp", "fsdp")


class _DDPModule(nn.Module):
    """The module that DDP wraps. It owns the model's parameters and calls the model's original forward."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self._forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)


class _DDPForward:
    """Replaces `model.forward`: routes calls that need gradients through DDP."""

    def __init__(self, model: nn.Module, owner: DDPModel) -> None:
        self._model = model
        self._owner = owner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner = self._owner
        # Without gradients there is nothing to reduce: a forward on a single rank (a sample, a quick check) must not
        # wait for the others.
        if torch.is_grad_enabled() and owner.is_trainable:
            owner.saw_forward = True
            return owner.ddp_forward(*args, **kwargs)
        return owner.local_forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Give a copy (an EMA, a snapshot) its own plain forward, which does not call the original."""
        copied = memo.get(id(self._model))
        return types.MethodType(type(copied).forward, copied) if copied is not None else self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the plain forward, for `torch.save(model)`."""
        return _plain_forward, (self._model,)


def _plain_forward(model: nn.Module) -> Any:
    return types.MethodType(type(model).forward, model)


class DDPModel:
    """A model that DDP replicates on all ranks."""

    def __init__(
        self, model: nn.Module, *, device: torch.device, compile_options: Any, options: dict[str, Any]
    ) -> None:
        self.model = model
        self.saw_forward = False  # whether DDP has run a forward since the last update
        module = _DDPModule(model, model.forward)
        index = [device] if device.type in ("cuda", "xpu") else None
        deterministic = torch.are_deterministic_algorithms_enabled()
        if deterministic and dist.get_world_size() > 2 and "static_graph" not in options:
            # After its first step DDP regroups gradients into other buckets, which changes the order of sums over
            # three or more ranks: a resumed run would differ in the last bit. Searching for unused parameters prevents
            # that (torch then reports once that it found none).
            options = {"find_unused_parameters": True, **options}
        self.ddp = DistributedDataParallel(module, device_ids=index, **options)
        self.ddp_forward: Callable[..., Any] = self.ddp
        self.local_forward: Callable[..., Any] = module
        if compile_options:
            # Around DDP, so that the compiler splits its graph at DDP's buckets and reductions overlap the backward.
            self.ddp_forward = torch.compile(self.ddp, **_compile_kwargs(compile_options))
            self.local_forward = torch.compile(module, **_compile_kwargs(compile_options))
        self._trainable = [p for p in model.parameters() if p.requires_grad]
        object.__setattr__(model, "forward", _DDPForward(model, self))

    @property
    def is_trainable(self) -> bool:
        """False while the script has frozen the model (`requires_grad_(False)`): DDP would wait for gradients."""
        return self._trainable[0].requires_grad

    def set_gradient_sync(self, on: bool) -> None:
        """Set whether the next backward reduces gradients. Called before the forward."""
        self.ddp.require_backward_grad_sync = on

    def reduce_missed_gradients(self) -> None:
        """Average gradients that DDP has not seen because the loss did not go through `forward`."""
        if not self.saw_forward:
            grads = [p.grad for p in self._trainable if p.grad is not None]
            for grad in grads:
                dist.all_reduce(grad)
            if grads:
                torch._foreach_div_(grads, float(dist.get_world_size()))

    def sync_buffers(self) -> None:
        for buffer in self.model.buffers():
            dist.broadcast(buffer, src=0)


class LocalModel:
    """A model that is not shared: there is one rank, it has no trainable parameters, or mode is "none"."""

    saw_forward = True

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def set_gradient_sync(self, on: bool) -> None:
        pass

    def reduce_missed_gradients(self) -> None:
        pass

    def sync_buffers(self) -> None:
        pass


WrappedModel = DDPModel | FSDPModel | LocalModel


class Wrapper:
    """Wraps and keeps all models of a session."""

    def __init__(
        self, device: torch.device, world_size: int, *, mesh: RankMesh, low_precision: torch.dtype | None
    ) -> None:
        self.device = device
        self.world_size = world_size
        self.mesh = mesh
        self.low_precision = low_precision
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
        options: dict[str, Any],
    ) -> Model:
        """Wrap a model in place and return it. See `Run.wrap`."""
        if mode not in MODES:
            raise UsageError(f"Unknown mode {mode!r} for run.wrap.", hint=f"Use one of {', '.join(MODES)}.")
        if any(each.model is model for each in self.models):
            raise UsageError("This model is already wrapped.", hint="Call run.wrap once per model.")
        if mode == "auto" and self.mesh.sizes is not None:
            mode = "fsdp"
        if mode == "fsdp" or parallelize is not None:
            check_parallelize(model, self.mesh, parallelize, mode=mode)
        model.to(self.device)
        before = list(model.parameters())
        trainable = any(parameter.requires_grad for parameter in before)
        if mode == "fsdp":
            wrapped = self._shard(model, layers, parallelize, options)
            if compile_options:
                model.compile(**_compile_kwargs(compile_options))
        elif mode == "none" or self.world_size == 1 or not trainable:
            wrapped = LocalModel(model)
            if compile_options:
                model.compile(**_compile_kwargs(compile_options))
        else:
            wrapped = DDPModel(model, device=self.device, compile_options=compile_options, options=options)
        now = {id(parameter): weakref.ref(parameter) for parameter in model.parameters()}
        self._owned.update(now)
        self._replaced.update({id(old): weakref.ref(old) for old in before if id(old) not in now})
        self.models.append(wrapped)
        return model

    def _shard(
        self, model: nn.Module, layers: Any, parallelize: Callable[[Any, Any], Any] | None, options: dict[str, Any]
    ) -> WrappedModel:
        if self.world_size == 1:
            replace_parameters(model)
            return LocalModel(model)
        if self.low_precision is not None:
            from torch.distributed.fsdp import MixedPrecisionPolicy

            policy = MixedPrecisionPolicy(param_dtype=self.low_precision, reduce_dtype=torch.float32)
            options.setdefault("mp_policy", policy)
        return shard(model, mesh=self.mesh, layers=layers, parallelize=parallelize, options=options)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
        """Return an optimizer's parameters. Raises UsageError if one does not belong to a wrapped model."""
        found = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        name = type(optimizer).__name__
        for parameter in found:
            old = self._replaced.get(id(parameter))
            if old is not None and old() is parameter:
                raise UsageError(
                    f"{name} holds parameters from before run.wrap, so it would train nothing.",
                    hint="Wrap the model first, then build the optimizer: opt = Optimizer(model.parameters()).",
                )
            owned = self._owned.get(id(parameter))
            if self.world_size > 1 and (owned is None or owned() is not parameter):
                raise UsageError(
                    f"{name} holds a parameter of shape {tuple(parameter.shape)} that belongs to no wrapped model, so "
                    "its values would drift apart between ranks.",
                    hint="Put it into a module, wrap that module, and build the optimizer after that.",
                )
        return found

    def keeps_in_sync(self, thing: Any) -> bool:
        """Return whether DDP or FSDP2 handles this model, or all parameters of this optimizer."""
        if isinstance(thing, DistributedDataParallel):
            return True
        models = [each.model for each in self.models if not isinstance(each, LocalModel)]
        handled = {id(parameter) for model in models for parameter in model.parameters()}
        groups = getattr(thing, "param_groups", ())
        parameters = thing.parameters() if isinstance(thing, nn.Module) else (p for g in groups for p in g["params"])
        found = [id(parameter) in handled for parameter in parameters]
        return bool(found) and all(found)

    def sync_buffers(self) -> None:
        """Copy rank 0's buffers to all ranks: evaluation and saves read them everywhere."""
        for each in self.models:
            each.sync_buffers()

    def parameters(self) -> Iterator[nn.Parameter]:
        for each in self.models:
            yield from each.model.parameters()

    def join(self, models: tuple[nn.Module, ...]) -> contextlib.AbstractContextManager[Any]:
        """Return torch's Join context over these DDP models, or over all of them."""
        joinable: list[Any] = [
            each.ddp
            for each in self.models
            if isinstance(each, DDPModel) and (not models or any(each.model is model for model in models))
        ]
        if not joinable:
            return contextlib.nullcontext()
        from torch.distributed.algorithms.join import Join

        return Join(joinable)


def _compile_kwargs(compile_options: bool | dict[str, Any]) -> dict[str, Any]:
    return dict(compile_options) if isinstance(compile_options, dict) else {}
