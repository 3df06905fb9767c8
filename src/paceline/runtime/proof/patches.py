"""Start the recorder of this rank, and let it see what the script does, by wrapping functions of
torch that every script calls.

The wrappers call what they wrap with the same arguments, so the numbers stay the same, unless the
recorder's spec asks for a change: dropout off, or BatchNorm with the statistics of all ranks.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import os
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import dataloader

from paceline.contract import env
from paceline.contract.rank_records import BATCHNORM, DROPOUT, ProofSpec
from paceline.runtime.data.sample_recorder import wrap
from paceline.runtime.data.tensor_source import TensorSource
from paceline.runtime.distributed.identity import read_identity
from paceline.runtime.proof.calls import read_state
from paceline.runtime.proof.recorder import Recorder
from paceline.runtime.training import fsdp

DROPOUTS = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
)


_recorder: Recorder | None = None


def start_recorder() -> Recorder:
    """Start recording as the spec says that PACELINE_PROOF names. Called before the script, or by
    its session.
    """
    global _recorder
    if _recorder is None:
        identity = read_identity()
        spec = ProofSpec.read(Path(os.environ[env.PROOF]))
        _recorder = Recorder(spec, rank=identity.rank, world_size=identity.world_size)
        install(_recorder)
        atexit.register(_recorder.end_at_exit)
    return _recorder


def attach_recorder(run: Any) -> Callable[[], None]:
    """Let the recorder count steps as the session does. Returns what all ranks call at the end of
    the session.
    """
    recorder = start_recorder()
    recorder.attach(run)
    return recorder.end


def install(recorder: Recorder) -> None:
    """Wrap the functions, for good: the process is a rank of `paceline prove`."""
    register_optimizer_step_pre_hook(recorder.before_step)
    register_optimizer_step_post_hook(recorder.after_step)
    wrap(nn.Module, "__call__", functools.partial(_call, recorder))
    wrap(torch.Tensor, "backward", functools.partial(_backward, recorder))
    wrap(nn.utils, "clip_grad_norm_", functools.partial(_clip_norm, recorder))
    wrap(fsdp, "clip_gradients", functools.partial(_clip_norm, recorder))
    for name in DROPOUTS:
        wrap(F, name, functools.partial(_dropout, recorder))
    wrap(F, "scaled_dot_product_attention", functools.partial(_attention, recorder))
    wrap(F, "batch_norm", functools.partial(_batch_norm, recorder))
    wrap(dataloader._BaseDataLoaderIter, "_next_index", _next_index)
    wrap(dataloader._BaseDataLoaderIter, "__next__", functools.partial(_next_batch, recorder))
    wrap(TensorSource, "batches", functools.partial(_tensor_batches, recorder))


def _call(recorder: Recorder, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling() or not recorder.is_here:
        return original(module, *args, **kwargs)
    recorder.depth += 1
    try:
        call = recorder.note_call(module, args, kwargs) if recorder.depth == 1 else None
        output = original(module, *args, **kwargs)
    finally:
        recorder.depth -= 1
    if call is not None:
        call.watch(output)
    return output


def _backward(
    recorder: Recorder, original: Any, loss: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    if not recorder.is_here:
        return original(loss, *args, **kwargs)
    recorder.depth += 1  # checkpointed activations call modules again
    state = read_state()
    try:
        return original(loss, *args, **kwargs)
    finally:
        recorder.depth -= 1
        recorder.note_loss(loss, state)


def _clip_norm(recorder: Recorder, original: Any, *args: Any, **kwargs: Any) -> Any:
    norm = original(*args, **kwargs)
    recorder.note_clip(norm, _bind(original, args, kwargs)["max_norm"])
    return norm


def _dropout(recorder: Recorder, original: Any, *args: Any, **kwargs: Any) -> Any:
    values = _bind(original, args, kwargs)
    if not (values["training"] and values["p"] > 0):
        return original(*args, **kwargs)
    _note(recorder, DROPOUT)
    return values["input"] if DROPOUT in recorder.spec.changes else original(*args, **kwargs)


def _attention(recorder: Recorder, original: Any, *args: Any, **kwargs: Any) -> Any:
    rate = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
    if rate > 0:
        _note(recorder, DROPOUT)
        if DROPOUT in recorder.spec.changes:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = {name: 0.0 if name == "dropout_p" else value for name, value in kwargs.items()}
    return original(*args, **kwargs)


def _batch_norm(recorder: Recorder, original: Any, *args: Any, **kwargs: Any) -> Any:
    values = _bind(original, args, kwargs)
    if not values["training"]:
        return original(*args, **kwargs)
    _note(recorder, BATCHNORM)
    if BATCHNORM in recorder.spec.changes:
        return synchronized_batch_norm(
            values["input"], values["weight"], values["bias"], values["eps"]
        )
    return original(*args, **kwargs)


def _bind(original: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return all arguments of a call by name."""
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _note(recorder: Recorder, what: str) -> None:
    if not torch.compiler.is_compiling():
        recorder.note_use(what)


def _next_index(original: Any, iterator: Any) -> Any:
    """Remember which samples a DataLoader asks for; with workers, it asks some batches ahead."""
    found = original(iterator)
    if not hasattr(iterator, "_paceline_asked"):
        iterator._paceline_asked = deque()
    iterator._paceline_asked.append(found)
    return found


def _next_batch(recorder: Recorder, original: Any, iterator: Any) -> Any:
    batch = original(iterator)
    asked = getattr(iterator, "_paceline_asked", None)
    indices = asked.popleft() if asked else None
    # a stream has no indices
    if isinstance(indices, list) and indices and indices[0] is not None and recorder.is_here:
        recorder.note_batch(
            id(iterator), [each[-1] if isinstance(each, tuple) else each for each in indices]
        )
    return batch


def _tensor_batches(recorder: Recorder, original: Any, source: Any, *args: Any) -> Iterator[Any]:
    order, slices, epoch = args

    def noted() -> Iterator[Any]:
        for part in slices:
            recorder.note_batch(id(source), order.keys[part.start : part.stop].tolist())
            yield part

    return iter(original(source, order, noted(), epoch))


def synchronized_batch_norm(
    input: torch.Tensor, weight: Any, bias: Any, eps: float
) -> torch.Tensor:
    """Normalize a batch in training mode with the statistics of the global batch, on any device:
    torch's SyncBatchNorm needs a GPU. Running statistics stay as they are: training does not use
    them.
    """
    dims = [0, *range(2, input.dim())]
    count = torch.tensor([input.numel() / input.size(1)], dtype=input.dtype, device=input.device)
    count = _sum(count)
    mean = _sum(input.sum(dims)) / count
    centred = input - _channels(mean, input)
    variance = _sum(centred.square().sum(dims)) / count
    output = centred * _channels((variance + eps).rsqrt(), input)
    if weight is not None:
        output = output * _channels(weight, input)
    return output if bias is None else output + _channels(bias, input)


def _channels(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.reshape(1, -1, *[1] * (like.dim() - 2))


def _sum(values: torch.Tensor) -> torch.Tensor:
    """Return the sum over all ranks; gradients flow back to each of them."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values
    from torch.distributed.nn.functional import all_reduce

    found: torch.Tensor = all_reduce(values)  # type: ignore[no-untyped-call]
    return found
