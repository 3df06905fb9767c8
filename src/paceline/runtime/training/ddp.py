"""Replicate a model on all ranks with DistributedDataParallel, and make sure that every gradient is
averaged.

DDP goes *inside* the model: calls of its forward are routed through DDP, while the script keeps its
own object. DDP averages gradients in the backward that follows its forward. What it does not see is
averaged before the optimizer steps: a loss from another method, a second backward after one
forward, a rank without a loss, and parameters that the script has frozen or unfrozen since DDP was
built.
"""

from __future__ import annotations

import copy
import functools
import types
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.fx import _symbolic_trace
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import UsageError

BUCKET_BYTES = 25 * 2**20
_NONE, _DENSE, _SPARSE = 0, 1, 2

# Updates with the same changed set of trainable parameters before DDP is built anew. Until then,
# gradients are averaged after the backward instead of during it. Networks that take turns must not
# cause a build per step.
REBUILD_AFTER = 8


# Newer versions of torch have names of their own for these.
_is_traced = getattr(_symbolic_trace, "is_fx_symbolic_tracing", _symbolic_trace.is_fx_tracing)
_is_exported = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)


def ignored_names(model: nn.Module) -> set[str]:
    """Return the parameters and buffers that the script has told DDP to leave alone: other ranks
    have others, as of experts.
    """
    return set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))


class _DDPModule(nn.Module):
    """The module that DDP wraps. It owns the model's parameters and calls the model's original
    forward.
    """

    def __init__(self, model: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self._forward = forward
        self._ddp_params_and_buffers_to_ignore = [f"model.{name}" for name in ignored_names(model)]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)


def _route_forward(model: nn.Module, target: Callable[..., Any]) -> None:
    """Replace `model.forward` by a method with the same signature that calls `target`.

    A copy of the model (an EMA, a snapshot) takes this method with it, and replaces it by a forward
    of its own when it is first called.
    """
    original, was_patched = model.forward, "forward" in vars(model)

    @functools.wraps(getattr(original, "__func__", type(model).forward))
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self is model:
            return target(*args, **kwargs)
        # what deepcopy makes of a forward that is an attribute: the copy's modules take their
        # places
        if was_patched:
            replaced = {
                id(old): new for old, new in zip(model.modules(), self.modules(), strict=False)
            }
            object.__setattr__(self, "forward", copy.deepcopy(original, replaced))
        else:
            del self.forward
        return self.forward(*args, **kwargs)

    object.__setattr__(model, "forward", types.MethodType(forward, model))


class DDPModel:
    """A model that DDP replicates on all ranks."""

    def __init__(
        self,
        model: nn.Module,
        *,
        device: torch.device,
        control: Any,
        compile_options: Any,
        comm_hook: Any,
        options: dict[str, Any],
    ) -> None:
        self.model = model
        self.ddp: DistributedDataParallel | None = None  # None until there is something to train
        self.reductions = 0  # how often gradients have been averaged
        self._unreduced = False  # whether gradients have accumulated since
        # whether any of them belong to parameters that DDP does not know
        self._unknown_unreduced = False
        # the gradients after `_reduce_now`
        self._reduced: list[tuple[int, int] | None] | None = None
        self._expects_reduction = False  # whether DDP averages in the next backward
        self._ending = False  # whether a callback waits for the end of that backward
        # whether that backward has ended, and DDP still waits for gradients
        self._unfinished = False
        self._sync = True
        # exchanges a few numbers; its own group, so that they meet nothing else
        self._control = control
        self._device = device
        self._compile_options = compile_options
        self._comm_hook = comm_hook
        self._options = options
        ignored = ignored_names(model)
        self._parameters = [each for name, each in model.named_parameters() if name not in ignored]
        self._original = model.forward
        self._was_patched = "forward" in vars(model)  # by the script, or a library
        self._module = _DDPModule(model, model.forward)
        self._local = self._compiled(self._module)
        self._replicated: Callable[..., Any] = self._local
        self._built_for = b""  # the trainable parameters that DDP knows
        self._unknown = {id(parameter) for parameter in self._parameters}  # those that it does not
        self._changed_to, self._changed_for = b"", 0
        trainable = self._trainable()
        if any(trainable):
            self._build(trainable)
        else:
            self._broadcast_state()
        self._hooks = [
            self._watch(each)
            for each in self._parameters
            if each.is_floating_point() or each.is_complex()
        ]
        _route_forward(model, self._forward)

    # -- forward
    # ---------------------------------------------------------------------------------------

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if _is_traced() or _is_exported():
            return self._original(*args, **kwargs)
        # Without gradients there is nothing to reduce: a forward on a single rank (a sample, a
        # quick check) must not wait for the others.
        if not torch.is_grad_enabled():
            return self._local(*args, **kwargs)
        trainable = self._trainable()
        if trainable != self._built_for:
            if (
                self._changed_for < REBUILD_AFTER
                or trainable != self._changed_to
                or not any(trainable)
            ):
                return self._local(*args, **kwargs)
            self._build(trainable)
        output = self._replicated(*args, **kwargs)
        if self._sync:
            self._expects_reduction, self._ending = True, False
        return output

    def _trainable(self) -> bytes:
        return bytes([parameter.requires_grad for parameter in self._parameters])

    def _build(self, trainable: bytes) -> None:
        """Create DDP for the parameters that are trainable now."""
        options = self._options
        deterministic = torch.are_deterministic_algorithms_enabled()
        if deterministic and dist.get_world_size() > 2 and "static_graph" not in options:
            # After its first step DDP regroups gradients into other buckets, which changes the
            # order of sums over three or more ranks: a resumed run would differ in the last bit.
            # Searching for unused parameters prevents that (torch then reports once that it found
            # none).
            options = {"find_unused_parameters": True, **options}
        if self.ddp is not None:
            # Parameters and buffers are the same on all ranks. Without these, nothing holds the old
            # reducer, which would keep its buckets.
            options = {**options, "init_sync": False}
            self.ddp.reducer = self.ddp.logger = None  # type: ignore[assignment]
            self._expects_reduction = self._unfinished = False
            self._unknown_unreduced = self._unreduced  # the new DDP may not know their parameters
        index = [self._device] if self._device.type in ("cuda", "xpu") else None
        self.ddp = DistributedDataParallel(self._module, device_ids=index, **options)
        self.ddp.require_backward_grad_sync = self._sync
        if self._comm_hook is not None:
            pair = isinstance(self._comm_hook, tuple)
            state, hook = self._comm_hook if pair else (None, self._comm_hook)
            self.ddp.register_comm_hook(state, hook)
        # Around DDP, so that the compiler splits its graph at DDP's buckets and reductions overlap
        # the backward.
        self._replicated = self._compiled(self.ddp)
        self._built_for = trainable
        self._unknown = {
            id(each) for each, known in zip(self._parameters, trainable, strict=True) if not known
        }

    def rebuild(self) -> None:
        """Create DDP anew, on the current stream."""
        if self.ddp is not None:
            self._build(self._trainable())

    def _compiled(self, module: nn.Module) -> Callable[..., Any]:
        chosen = self._compile_options
        return (
            torch.compile(module, **(chosen if isinstance(chosen, dict) else {}))
            if chosen
            else module
        )

    def _broadcast_state(self) -> None:
        """Make a frozen model the same on all ranks, as DDP does with others: it may be unfrozen
        later.
        """
        with torch.no_grad():
            for parameter in self._parameters:
                dist.broadcast(parameter.data, src=0)
        self.sync_buffers()

    # -- gradients
    # -------------------------------------------------------------------------------------

    def set_gradient_sync(self, on: bool) -> None:
        """Set whether the next backward reduces gradients. Called before the forward."""
        self._sync = on
        if self.ddp is not None:
            self.ddp.require_backward_grad_sync = on

    def _watch(self, parameter: nn.Parameter) -> Any:
        frozen = not parameter.requires_grad
        if frozen:  # torch accepts a hook only while it requires gradients
            parameter.requires_grad_(True)
        hook = parameter.register_post_accumulate_grad_hook(self._after_accumulation)  # type: ignore[no-untyped-call]
        if frozen:
            parameter.requires_grad_(False)
        return hook

    def _after_accumulation(self, parameter: torch.Tensor) -> None:
        self._unreduced = True
        if self._unknown and id(parameter) in self._unknown:
            self._unknown_unreduced = True
        if self._expects_reduction and not self._ending:
            self._ending = True
            # DDP queues its own callback later in this backward: the second one runs after it.
            Variable._execution_engine.queue_callback(self._queue_end)

    def _queue_end(self) -> None:
        Variable._execution_engine.queue_callback(self._after_backward)

    def _after_backward(self) -> None:
        """Note whether DDP has averaged all gradients in the backward that ends now."""
        assert self.ddp is not None
        self._ending = False
        try:
            self.ddp.reducer._check_reducer_finalized()
        except RuntimeError:
            self._unfinished = True  # unless the backward is part of another one, which goes on
            return
        self._expects_reduction = self._unfinished = False
        self._unreduced = self._unknown_unreduced
        self._reduced = None
        self.reductions += 1
        self._changed_for = 0

    def reduce_gradients(self, seen: int) -> int:
        """Average the gradients, unless that has been done since reduction number `seen` and none
        has been added.

        Called before an optimizer steps, on all ranks. Averaging gradients that are already
        averaged changes nothing. Returns the number of reductions.
        """
        if (
            self._unreduced
            or self.reductions == seen
            or (self._reduced is not None and self._has_new_gradients())
        ):
            self._reduce_now()
        return self.reductions

    def _has_new_gradients(self) -> bool:
        """Return whether the script has set gradients itself since `_reduce_now`, which no hook
        can see.
        """
        assert self._reduced is not None
        now = self._gradient_versions()
        return any(
            new is not None and new != old for new, old in zip(now, self._reduced, strict=True)
        )

    def _gradient_versions(self) -> list[tuple[int, int] | None]:
        return [
            None if (grad := each.grad) is None else (id(grad), grad._version)
            for each in self._parameters
        ]

    def _reduce_now(self) -> None:
        name = type(self.model).__name__
        if self._unfinished:
            raise self._unused_parameters_error(name)
        if self.ddp is not None and self.ddp._join_config.enable:
            raise UsageError(
                f"Inside run.join, the gradients of {name} must come from one call of the model "
                "per backward.",
                hint="Compute the loss in the model's forward, and run one backward per update.",
            )
        trainable = self._trainable()
        used = agree_on_used(
            self._parameters,
            name=name,
            reductions=self.reductions,
            trainable=trainable,
            group=self._control,
        )
        chosen = [
            parameter for parameter, is_used in zip(self._parameters, used, strict=True) if is_used
        ]
        group = (
            self.ddp.process_group if self.ddp is not None else self._options.get("process_group")
        )
        _average(chosen, group)
        self._unreduced = self._unknown_unreduced = False
        self._reduced = self._gradient_versions()
        self.reductions += 1
        self._count_change(trainable)

    def _count_change(self, trainable: bytes) -> None:
        """Count updates since the trainable parameters have changed, to build DDP anew if they
        stay as they are.
        """
        if torch.are_deterministic_algorithms_enabled() and dist.get_world_size() > 2:
            # a resumed run, which may build DDP for these parameters at once, would sum in another
            # order
            return
        self._changed_for = self._changed_for + 1 if trainable == self._changed_to else 1
        self._changed_to = trainable

    def _unused_parameters_error(self, name: str) -> UsageError:
        named = [
            each for each, p in self.model.named_parameters() if p.requires_grad and p.grad is None
        ]
        shown = ", ".join(named[:3]) + (", ..." if len(named) > 3 else "")
        return UsageError(
            f"The loss of this step does not depend on {shown} of {name}, so DDP has not averaged "
            "all gradients.",
            hint="Use run.wrap(model, find_unused_parameters=True), or freeze what is unused: "
            "requires_grad_(False).",
        )

    # -- the rest
    # --------------------------------------------------------------------------------------

    def sync_buffers(self) -> None:
        """Copy rank 0's buffers to all ranks, unless the script has asked not to."""
        requested = (
            self._options.get("broadcast_buffers"),
            self._options.get("forward_sync_buffers"),
        )
        if False not in requested:
            ignored = ignored_names(self.model)
            for name, buffer in self.model.named_buffers():
                if name not in ignored:
                    dist.broadcast(buffer, src=0)

    def close(self) -> None:
        """Give the script its model back: a plain forward, and no hooks."""
        for hook in self._hooks:
            hook.remove()
        if self._was_patched:
            object.__setattr__(self.model, "forward", self._original)
        else:
            del self.model.forward


def agree_on_used(
    parameters: Sequence[nn.Parameter], *, name: str, reductions: int, trainable: bytes, group: Any
) -> list[bool]:
    """Return which parameters have a gradient on any rank.

    Ranks also compare how often they have averaged the model's gradients, and which parameters they
    train: with another answer, they would add up gradients of different losses or parameters.

    Raises:
        UsageError: The ranks differ, or a gradient is sparse.
    """
    pattern = zlib.crc32(trainable)
    kinds = [
        _NONE if (grad := p.grad) is None else _DENSE if grad.layout is torch.strided else _SPARSE
        for p in parameters
    ]
    answers = torch.tensor([*kinds, reductions, -reductions, pattern, -pattern])
    dist.all_reduce(answers, op=dist.ReduceOp.MAX, group=group)
    *used, most, minus_least, pattern, minus_pattern = answers.tolist()
    if most != -minus_least:
        raise UsageError(
            f"Gradients of {name} have been averaged {-minus_least} times on one rank, but {most} "
            "times on another.",
            hint="Run the same backward passes on all ranks. A rank that has no loss can use 0.0 "
            "* model(x).sum().",
        )
    if pattern != -minus_pattern:
        raise UsageError(
            f"Ranks differ in which parameters of {name} require gradients.",
            hint="Freeze and unfreeze the same parameters on all ranks, in the same step.",
        )
    if _SPARSE in used:
        raise UsageError(
            f"{name} has sparse gradients that DDP has not averaged.",
            hint="Compute the loss by calling the model, once per backward, or use dense "
            "gradients (sparse=False).",
        )
    return [kind != _NONE for kind in used]


@torch.no_grad()
def _average(parameters: Sequence[nn.Parameter], group: Any) -> None:
    """Average these parameters' gradients over the ranks. A missing gradient counts as zero."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    size = dist.get_world_size(group)
    pending = []
    for bucket in _buckets(
        [parameter.grad for parameter in parameters if parameter.grad is not None]
    ):
        flat = torch.cat([grad.reshape(-1) for grad in bucket]).div_(size)
        pending.append((bucket, flat, dist.all_reduce(flat, group=group, async_op=True)))
    for bucket, flat, work in pending:
        work.wait()
        parts = torch.split(flat, [grad.numel() for grad in bucket])
        torch._foreach_copy_(
            bucket, [part.view(grad.shape) for part, grad in zip(parts, bucket, strict=True)]
        )


def _buckets(grads: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield gradients of one type and device, in groups of at most BUCKET_BYTES."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for grad in grads:
        kinds.setdefault((grad.dtype, grad.device), []).append(grad)
    for members in kinds.values():
        bucket, size = list[torch.Tensor](), 0
        for grad in members:
            if bucket and size + grad.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(grad)
            size += grad.nbytes
        yield bucket
