"""A folder with a model's weights in one or several files, as Hugging Face's `save_pretrained`
writes it.
"""

from __future__ import annotations

from pathlib import Path

from paceline.contract.checkpoint.marker import find_checkpoints
from paceline.contract.checkpoint.names import is_weights_file
from paceline.contract.files.foreign_records import read_object
from paceline.errors import CheckpointError

SINGLE = ("model.safetensors", "pytorch_model.bin")
INDEX = ".index.json"  # after a name of `SINGLE`: which of several files has which tensor


def find_weight_files(path: Path) -> list[Path]:
    """Return the files of weights in such a folder, or that an index names; empty for anything
    else.

    A folder of checkpoints is none, whatever else it has. Raises CheckpointError for an index that
    cannot be read.
    """
    if path.name.endswith(INDEX):
        return _indexed(path)
    if not path.is_dir() or find_checkpoints(path):
        return []
    for name in SINGLE:
        if (path / name).is_file():
            return [path / name]
        if (path / f"{name}{INDEX}").is_file():
            return _indexed(path / f"{name}{INDEX}")
    return []


def _indexed(index: Path) -> list[Path]:
    try:
        places = read_object(index)["weight_map"]
        names = sorted({str(name) for name in places.values()})
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{index} cannot be read: {error}.", hint="Download or save the model again."
        ) from None
    for name in names:
        if Path(name).name != name or not is_weights_file(name):
            raise CheckpointError(
                f"{index} lists {name!r}, which is not a weights file next to it."
            )
        if not (index.parent / name).is_file():
            raise CheckpointError(
                f"{index.parent} has no {name}, which its index lists.",
                hint="Check that the download is complete.",
            )
    if not names:
        raise CheckpointError(f"{index} lists no files.")
    return [index.parent / name for name in names]
