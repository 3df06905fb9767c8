"""One kernel for an optimizer's update of all parameters, instead of one for each operation.

A small model's update takes longer than its backward pass if every operation launches a separate
kernel. Adam and SGD have fused kernels in torch. For the others, torch's compiler makes one, if the
script has its models compiled as well.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from paceline.runtime.console import note

# more of them take longer to compile, and gain less: each operation keeps the device busy
MAX_TENSORS = 100
# In lower precision, each operation rounds; one kernel for all of them does not, and would train
# differently.
_UNROUNDED = (torch.float32, torch.float64)


def has_fused_kernel(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Return whether torch's fused kernel may update this group: the script has not chosen another
    way.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or group["differentiable"]:
        return False
    is_open = group["fused"] is None and group["foreach"] is None
    return is_open and all(parameter.dtype in _UNROUNDED for parameter in group["params"])


class CompiledUpdate:
    """The function that computes an optimizer's updates, compiled. In force between `install` and
    `remove`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._name = type(optimizer).__name__.lower()
        self._module = sys.modules[type(optimizer).__module__]
        self._plain: Callable[..., Any] = getattr(self._module, self._name)
        self._compiled: Callable[..., Any] | None = torch.compile(self._plain, dynamic=False)

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> CompiledUpdate | None:
        """Return it for those of torch's optimizers that have no fused kernel, unless the script
        chose another way.
        """
        kind = type(optimizer)
        groups = optimizer.param_groups
        if (
            kind.__module__ != f"torch.optim.{kind.__name__.lower()}"
            or "fused" in optimizer.defaults
        ):
            return None
        if not callable(getattr(sys.modules[kind.__module__], kind.__name__.lower(), None)):
            return None
        if any(group.get("foreach") is False or group.get("differentiable") for group in groups):
            return None
        parameters = [parameter for group in groups for parameter in group["params"]]
        if len(parameters) > MAX_TENSORS or any(
            type(each.data) is not torch.Tensor for each in parameters
        ):
            return None
        return cls(optimizer) if all(each.dtype == torch.float32 for each in parameters) else None

    def install(self) -> None:
        if self._compiled is not None:
            setattr(self._module, self._name, self._update)

    def remove(self) -> None:
        setattr(self._module, self._name, self._plain)

    def _update(self, *args: Any, **kwargs: Any) -> None:
        if self._compiled is not None:
            try:
                self._compiled(*args, **kwargs)
                return
            except torch._dynamo.exc.TorchDynamoException as error:  # nothing has been computed
                self._compiled = None
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                note(f"run.capture: {self._name} is not compiled, because that failed: {reason}")
        self._plain(*args, **kwargs)
