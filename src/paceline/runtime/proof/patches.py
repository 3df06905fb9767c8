"""Start the recorder of this rank, and let it see what the script does, by wrapping functions of
torch that every script calls.

The wrappers call what they wrap with the same arguments, so the numbers stay the same, unless the
recorder's spec asks for a change: dropout off, or the statistics of each sample for BatchNorm.
"""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import _VF, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import dataloader

from paceline.contract import env
from paceline.contract.rank_records import BATCHNORM, DROPOUT, ProofSpec
from paceline.runtime.data.inspection import note_asked, wrap
from paceline.runtime.data.tensor_source import TensorSource
from paceline.runtime.distributed.identity import read_identity
from paceline.runtime.proof.calls import read_state
from paceline.runtime.proof.recorder import Recorder

DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")

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
    recorder.loop = run._loop
    return recorder.end


def install(recorder: Recorder) -> None:
    """Wrap the functions, for good: the process is a rank of `paceline prove`."""
    register_optimizer_step_pre_hook(recorder.before_step)
    register_optimizer_step_post_hook(recorder.after_step)
    wrap(nn.Module, "__call__", functools.partial(_call, recorder))
    wrap(torch.Tensor, "backward", functools.partial(_backward, recorder))
    # what all functions of torch.nn.functional call
    for name in DROPOUTS:
        wrap(_VF, name, functools.partial(_dropout, recorder))
        wrap(_VF, f"{name}_", functools.partial(_dropout, recorder))
    wrap(torch, "batch_norm", functools.partial(_batch_norm, recorder))
    wrap(F, "scaled_dot_product_attention", functools.partial(_attention, recorder))
    wrap(dataloader._BaseDataLoaderIter, "_next_index", note_asked)
    wrap(dataloader._BaseDataLoaderIter, "__next__", functools.partial(_next_batch, recorder))
    wrap(TensorSource, "batches", functools.partial(_tensor_batches, recorder))


def _call(recorder: Recorder, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not recorder.is_here:
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


def _dropout(
    recorder: Recorder, original: Any, values: torch.Tensor, rate: float, is_training: bool
) -> Any:
    if not is_training or rate == 0:
        return original(values, rate, is_training)
    recorder.note_use(DROPOUT)
    is_off = DROPOUT in recorder.spec.changes
    return values if is_off else original(values, rate, is_training)


def _attention(recorder: Recorder, original: Any, *args: Any, **kwargs: Any) -> Any:
    if len(args) > 4:
        kwargs.update(zip(("dropout_p", "is_causal"), args[4:], strict=False))
        args = args[:4]
    if kwargs.get("dropout_p", 0.0) > 0:
        recorder.note_use(DROPOUT)
        if DROPOUT in recorder.spec.changes:
            kwargs["dropout_p"] = 0.0
    return original(*args, **kwargs)


def _batch_norm(recorder: Recorder, original: Any, *args: Any) -> Any:
    values, weight, bias, _, _, is_training, _, eps, *_ = args
    if is_training:
        recorder.note_use(BATCHNORM)
        if BATCHNORM in recorder.spec.changes:
            return F.group_norm(values, 1, weight, bias, eps)  # of each sample by itself
    return original(*args)


def _next_batch(recorder: Recorder, original: Any, iterator: Any) -> Any:
    batch = original(iterator)
    asked = getattr(iterator, "_paceline_asked", None)
    indices = asked.popleft() if asked else None
    # a stream has no indices
    if isinstance(indices, list) and indices and indices[0] is not None and recorder.is_here:
        numbers = [each[-1] if isinstance(each, tuple) else each for each in indices]
        recorder.note_batch(id(iterator), numbers)
    return batch


def _tensor_batches(recorder: Recorder, original: Any, source: Any, *args: Any) -> Iterator[Any]:
    order, slices, epoch = args

    def noted() -> Iterator[Any]:
        for part in slices:
            recorder.note_batch(id(source), order.keys[part.start : part.stop].tolist())
            yield part

    return iter(original(source, order, noted(), epoch))
