"""One model on many ranks, and still the user's own object: same class, attributes and state keys everywhere.

DDP is put *inside* the model: its forward is led through DistributedDataParallel, while the object that the script
holds stays the one that it made. FSDP2 works in place by itself. So no `module.` and no `_orig_mod.` ever
appears, and code that asks the model for an attribute works at every world size.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import UsageError

Model = TypeVar("Model", bound=nn.Module)
MODES = ("auto", "none", "ddp", "fsdp")


class _DDPModule(nn.Module):
    """What DDP wraps: it owns the model's parameters, and its forward is the model's original one."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self._forward = forward

    def forward(self, *args: Any, **options: Any) -> Any:
        return self._forward(*args, **options)


class _DDPForward:
    """Stands in for `model.forward`, and leads calls that will be differentiated through DDP."""

    def __init__(self, model: nn.Module, replica: DDPModel) -> None:
        self._model = model
        self._replica = replica

    def __call__(self, *args: Any, **options: Any) -> Any:
        replica = self._replica
        # Without gradients there is nothing to reduce: a forward on one rank alone (a sample, a quick check)
        # must not wait for the others.
        if torch.is_grad_enabled() and replica.is_trained:
            replica.prepared = True
            return replica.through(*args, **options)
        return replica.alone(*args, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy (an EMA, a snapshot) computes by itself: it must not lead back into the original."""
        copied = memo.get(id(self._model))
        return types.MethodType(type(copied).forward, copied) if copied is not None else self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled with its model (`torch.save(model)`), it comes back as the plain forward."""
        return _plain_forward, (self._model,)


def _plain_forward(model: nn.Module) -> Any:
    return types.MethodType(type(model).forward, model)


class DDPModel:
    """A model that DDP keeps equal on all ranks."""

    def __init__(
        self, model: nn.Module, *, device: torch.device, compiling: Any, options: dict[str, Any]
    ) -> None:
        self.model = model
        self.prepared = False  # whether DDP has seen a forward since the last update
        shell = _DDPModule(model, model.forward)
        index = [device] if device.type in ("cuda", "xpu") else None
        deterministic = torch.are_deterministic_algorithms_enabled()
        if deterministic and dist.get_world_size() > 2 and "static_graph" not in options:
            # After its first step DDP puts gradients into other buckets, which changes the order of sums over three
            # ranks and more: a resumed run would differ in the last bit. Looking for unused parameters prevents it
            # (torch then says once that it found none).
            options = {"find_unused_parameters": True, **options}
        self.ddp = DistributedDataParallel(shell, device_ids=index, **options)
        self.through: Callable[..., Any] = self.ddp
        self.alone: Callable[..., Any] = shell
        if compiling:
            # Around DDP, so that the compiler cuts its graph at DDP's buckets and reductions overlap the backward.
            self.through = torch.compile(self.ddp, **_compile_options(compiling))
            self.alone = torch.compile(shell, **_compile_options(compiling))
        self._trained = [p for p in model.parameters() if p.requires_grad]
        object.__setattr__(model, "forward", _DDPForward(model, self))

    @property
    def is_trained(self) -> bool:
        """False while the script has frozen the model (`requires_grad_(False)`): DDP would wait for its gradients."""
        return self._trained[0].requires_grad

    def set_sync(self, on: bool) -> None:
        """Whether the next backward reduces. It must be said before the forward."""
        self.ddp.require_backward_grad_sync = on

    def sync_missed(self) -> None:
        """Average gradients that DDP has not seen, because the loss did not come by way of `forward`."""
        if not self.prepared:
            grads = [p.grad for p in self._trained if p.grad is not None]
            for grad in grads:
                dist.all_reduce(grad)
            if grads:
                torch._foreach_div_(grads, float(dist.get_world_size()))

    def sync_buffers(self) -> None:
        """Give every rank rank 0's buffers: before evaluation and saves, which read them on all ranks."""
        for buffer in self.model.buffers():
            dist.broadcast(buffer, src=0)


class FSDPModel:
    """A model whose parameters FSDP2 has cut over the ranks."""

    prepared = True

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def set_sync(self, on: bool) -> None:
        self.model.set_requires_gradient_sync(on)  # type: ignore[operator]

    def sync_missed(self) -> None:
        """FSDP2's hooks sit on the modules themselves: nothing is missed."""

    def sync_buffers(self) -> None:
        for buffer in self.model.buffers():
            dist.broadcast(buffer, src=0)


class LocalModel:
    """A model in a world of one, or one that the script keeps for itself."""

    prepared = True

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def set_sync(self, on: bool) -> None:
        pass

    def sync_missed(self) -> None:
        pass

    def sync_buffers(self) -> None:
        pass


WrappedModel = DDPModel | FSDPModel | LocalModel


class Wrapper:
    """All models of a session."""

    def __init__(self, device: torch.device, world_size: int, *, low_precision: torch.dtype | None) -> None:
        self.device = device
        self.world_size = world_size
        self.low_precision = low_precision
        self.wrapped: list[WrappedModel] = []
        self._mine: dict[int, weakref.ref[nn.Parameter]] = {}
        self._replaced: dict[int, weakref.ref[nn.Parameter]] = {}

    def wrap(
        self,
        model: Model,
        *,
        mode: str,
        compiling: bool | dict[str, Any],
        layers: Any,
        options: dict[str, Any],
    ) -> Model:
        if mode not in MODES:
            raise UsageError(f"mode={mode!r} is not known to wrap", hint=f"One of {', '.join(MODES)}.")
        if any(each.model is model for each in self.wrapped):
            raise UsageError("this model is wrapped already", hint="Wrap it once; use the object everywhere.")
        model.to(self.device)
        before = list(model.parameters())
        trained = any(parameter.requires_grad for parameter in before)
        if mode == "fsdp":
            wrapped = self._shard(model, layers, options)
            if compiling:
                model.compile(**_compile_options(compiling))
        elif mode == "none" or self.world_size == 1 or not trained:
            wrapped = LocalModel(model)
            if compiling:
                model.compile(**_compile_options(compiling))
        else:
            wrapped = DDPModel(model, device=self.device, compiling=compiling, options=options)
        now = {id(parameter): weakref.ref(parameter) for parameter in model.parameters()}
        self._mine.update(now)
        self._replaced.update({id(old): weakref.ref(old) for old in before if id(old) not in now})
        self.wrapped.append(wrapped)
        return model

    def _shard(self, model: nn.Module, layers: Any, options: dict[str, Any]) -> WrappedModel:
        if self.world_size == 1:
            # As with several ranks: the parameters are new objects, so the same mistakes show on a laptop.
            _renew_parameters(model)
            return LocalModel(model)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        # Each rank keeps a part of its own initial values: they must be parts of one and the same model.
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.data, src=0)
        options.setdefault("mesh", init_device_mesh(self.device.type, (self.world_size,)))
        if self.low_precision is not None:
            options.setdefault(
                "mp_policy", MixedPrecisionPolicy(param_dtype=self.low_precision, reduce_dtype=torch.float32)
            )
        # Inner blocks first: what a block around them has taken is no longer theirs. A shared one comes once.
        for block in reversed(list(dict.fromkeys(blocks(model, layers)))):
            fully_shard(block, **options)
        fully_shard(model, **options)
        return FSDPModel(model)

    def check(self, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
        """The parameters of an optimizer, all of which must belong to a wrapped model."""
        found = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        name = type(optimizer).__name__
        for parameter in found:
            old = self._replaced.get(id(parameter))
            if old is not None and old() is parameter:
                raise UsageError(
                    f"{name} holds parameters from before wrap: it would train nothing",
                    hint="Wrap first, then build the optimizer: opt = Optimizer(model.parameters()).",
                )
            mine = self._mine.get(id(parameter))
            if self.world_size > 1 and (mine is None or mine() is not parameter):
                raise UsageError(
                    f"{name} holds a parameter of shape {tuple(parameter.shape)} that no wrapped model owns: "
                    "it would drift apart on the ranks",
                    hint="Put it into a module, wrap that module, and build the optimizer after it.",
                )
        return found

    def sync_buffers(self) -> None:
        """Before evaluation and saves: the buffers of all models as on rank 0."""
        for each in self.wrapped:
            each.sync_buffers()

    def parameters(self) -> Iterator[nn.Parameter]:
        for each in self.wrapped:
            yield from each.model.parameters()


def blocks(model: nn.Module, layers: Any) -> Iterable[nn.Module]:
    """What FSDP2 gathers at a time: modules of the given classes, or else the entries of each list of layers."""
    if layers is not None:
        kinds = tuple(layers) if isinstance(layers, Iterable) else (layers,)
        return [each for each in model.modules() if isinstance(each, kinds) and each is not model]
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
    entries = [
        entry for each in lists for entry in each if not isinstance(entry, (nn.ModuleList, nn.ModuleDict))
    ]
    return [entry for entry in entries if any(True for _ in entry.parameters())]


def _renew_parameters(model: nn.Module) -> None:
    renewed: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                fresh = nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
                module._parameters[name] = renewed.setdefault(id(parameter), fresh)


def _compile_options(compiling: bool | dict[str, Any]) -> dict[str, Any]:
    return dict(compiling) if isinstance(compiling, dict) else {}
