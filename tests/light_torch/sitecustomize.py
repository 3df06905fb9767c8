"""The real torch, but it loads what a training rarely uses only on demand: its imports take less than half the time.

Python imports this module at its start, in every process that a test starts with this folder in PYTHONPATH. Optimizers
and DDP import torch's compiler for a few functions that do nothing outside of a compilation. Here these are at hand,
and the compiler is imported when somebody uses anything else of it. Quantization and export wait in the same way, and
so do the kernels of the meta device. Imports little itself: it runs in every process.
"""

from __future__ import annotations

import atexit
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from typing import Any

DYNAMO, INDUCTOR = "torch._dynamo", "torch._inductor"
SETTINGS = f"{INDUCTOR}.config"
ModuleType = type(sys)

# Each module that nobody has used yet, with what optimizers, process groups and DDP call of it without compiling.
COMPILER: dict[str, dict[str, Any]] = {
    DYNAMO: {
        "disable": lambda function=None, *_, **__: function,
        "graph_break": lambda *_, **__: None,
    },
    f"{DYNAMO}.trace_rules": {"clear_lru_cache": lambda: None},
    f"{DYNAMO}.utils": {"get_optimize_ddp_mode": lambda: "ddp_optimizer"},
    INDUCTOR: {},
    SETTINGS: {},
}
META = "torch._meta_registrations"
META_KERNELS: dict[str, dict[str, Any]] = {META: {}}
EXPORT: dict[str, dict[str, Any]] = {
    "torch.export": {},
    "torch.ao": {},
    "torch.quantization": {},
    "torch.nn.intrinsic": {},
    "torch.nn.qat": {},
    "torch.nn.quantizable": {},
    "torch.nn.quantized": {},
}
# Modules that compute with tensors on the meta device.
USE_META = ("torch._decomp", "torch.distributed.tensor", "torch.utils.flop_counter")
stand_ins: dict[str, Postponed] = {}


class Postponed(ModuleType):
    """Stands in for a module, and imports it when somebody reads an attribute that it does not have."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(name)
        load(self.__name__)
        import importlib

        return getattr(importlib.import_module(self.__name__), name)


def make_stand_ins() -> None:
    for name, known in (COMPILER | META_KERNELS | EXPORT).items():
        stand_ins[name] = Postponed(name)
        stand_ins[name].__dict__.update(known)
        parent, _, leaf = name.rpartition(".")
        if parent in stand_ins:
            stand_ins[parent].__dict__[leaf] = stand_ins[name]


def load(name: str) -> None:
    """Import a module and what belongs to it. Whoever keeps a stand-in gets everything from its module from now on."""
    import importlib

    groups = (
        [META_KERNELS]
        if name in META_KERNELS
        else [EXPORT]
        if name in EXPORT
        else [META_KERNELS, COMPILER]
    )
    replaced = {
        each: stand_ins.pop(each) for group in groups for each in group if each in stand_ins
    }
    for each in replaced:
        sys.modules.pop(each, None)
    for each, stand_in in replaced.items():
        module = importlib.import_module(each)
        known = {
            key: stand_in.__dict__.pop(key)
            for key in list(vars(stand_in))
            if not key.startswith("__")
        }
        if each == SETTINGS:
            for key, value in known.items():
                setattr(module, key, value)


class Finder:
    """Finds the stand-ins, and is their loader."""

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parent = name.rpartition(".")[0]
        if name in USE_META and META in stand_ins and META in sys.modules:
            load(META)
        if name not in stand_ins and parent not in stand_ins:
            return None
        from importlib.machinery import ModuleSpec, PathFinder

        if name in stand_ins:
            return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        load(parent)
        return PathFinder.find_spec(name, sys.modules[parent].__path__)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return stand_ins[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        # these come with what a generator of random numbers needs
        if module.__name__ in META_KERNELS:
            from torch import _C, _opaque_base

            _C._set_generator_metaclass(_opaque_base.OpaqueBaseMeta)


def keep_torch() -> None:
    """Spare Python the work of taking thousands of torch's objects apart before the process ends."""
    if "torch._C" not in sys.modules:
        return
    import ctypes
    import gc

    kept = {
        name: sys.modules.pop(name)
        for name in list(sys.modules)
        if name.partition(".")[0] in ("torch", "numpy")
    }
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    gc.freeze()


atexit.register(keep_torch)  # the first one runs last
make_stand_ins()
sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
