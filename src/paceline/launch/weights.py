"""The weights in a checkpoint: which object has them, and their names without those of wrappers."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.contract.checkpoint import OBJECTS_FILE, Marker
from paceline.errors import CheckpointError, UsageError


def choose_object(marker: Marker, name: str | None) -> str:
    """Return the object to export: the requested one, `model`, or the only module."""
    modules = [module for module, kind in marker.objects.items() if kind == "module"]
    if name is not None:
        if marker.objects.get(name) == "rank":
            raise UsageError(
                f"{name!r} has separate state on each rank, so it cannot be exported to one file.",
                hint=f"Choose one of {', '.join(modules) or 'none'}.",
            )
        if name in marker.objects:
            return name
        raise UsageError(
            f"The checkpoint has no object {name!r}.",
            hint=f"Use one of {', '.join(marker.objects)}.",
        )
    if "model" in modules:
        return "model"
    if len(modules) == 1:
        return modules[0]
    raise UsageError(
        f"The checkpoint has {len(modules)} modules: {', '.join(modules) or 'none'}.",
        hint="Choose one with --object NAME.",
    )


def plain_names(keys: list[str]) -> dict[str, str]:
    """Map each state key to its name without the prefixes that wrappers add."""
    plain = {key: ".".join(part for part in key.split(".") if part != "_orig_mod") for key in keys}
    weights = [name for name in plain.values() if name != "n_averaged"]
    while weights and all(name.startswith("module.") for name in weights):
        plain = {key: name.removeprefix("module.") for key, name in plain.items()}
        weights = [name for name in plain.values() if name != "n_averaged"]
    return plain


def tensor_keys(folder: Path, name: str) -> list[str]:
    """Return an object's state keys that are tensors."""
    try:
        tree = json.loads((folder / OBJECTS_FILE).read_bytes())[name]
        return [
            key
            for key, value in tree.items()
            if isinstance(value, dict) and ("$tensor" in value or "$sharded" in value)
        ]
    except (OSError, ValueError, LookupError, AttributeError) as error:
        raise CheckpointError(f"{OBJECTS_FILE} of {folder.name} can't be read: {error}.") from None
