"""wandb, which the server of forked ranks imports once too. It is not in sys.modules until a rank imports it."""

from __future__ import annotations

import gc
import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

PACKAGE = "wandb"


class ImportedBefore:
    """Finds the package again, with all its modules."""

    def __init__(self) -> None:
        self.modules = {
            name: sys.modules.pop(name)
            for name in list(sys.modules)
            if name.split(".")[0] == PACKAGE
        }

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == PACKAGE else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python make one, which `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        sys.modules.update(self.modules)


gc.disable()
for name in (PACKAGE, "wandb.apis.public", "wandb.sdk.launch"):
    importlib.import_module(name)
sys.meta_path.insert(0, ImportedBefore())  # type: ignore[arg-type]
gc.freeze()
gc.enable()
