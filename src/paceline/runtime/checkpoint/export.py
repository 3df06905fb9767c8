"""Export weights: `paceline export` continues here, in a Python that has torch.

python -m paceline.runtime.checkpoint.export FOLDER OBJECT OUTPUT
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import torch

from paceline.contract.checkpoint import plain_names, read_marker
from paceline.contract.files import open_output, show_size
from paceline.errors import CheckpointError, PacelineError
from paceline.runtime.checkpoint.reader import CheckpointReader
from paceline.runtime.checkpoint.safetensors import DTYPE_NAMES, Piece, make_header


def gather(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """Return an object's full tensors under their plain names."""
    with CheckpointReader(folder) as reader:
        try:
            tree = reader.objects()[name]
            keys = [
                key
                for key, value in tree.items()
                if isinstance(value, dict) and value.keys() & {"$tensor", "$sharded"}
            ]
        except (LookupError, AttributeError) as error:
            raise CheckpointError(f"{folder.name} has no state of {name!r}: {error}.") from None
        wanted = {plain: tree[key] for key, plain in plain_names(keys).items()}
        tensors: dict[str, torch.Tensor] = reader.read(wanted, lambda _: None)
        return tensors


def write_tensors(output: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a safetensors file or, by its name, one that `torch.load` reads."""
    if output.suffix.lower() != ".safetensors":
        with open_output(output) as file:
            torch.save(tensors, file)
        return
    pieces: list[Piece] = []
    offset = 0
    for name, tensor in tensors.items():
        dtype, shape = DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)
        pieces.append(Piece(name, dtype, shape, 0, tensor.numel(), offset))
        offset = pieces[-1].end
    chunks = (
        ctypes.string_at(tensor.contiguous().data_ptr(), tensor.nbytes)
        for tensor in tensors.values()
    )
    with open_output(output) as file:
        file.write(make_header(pieces))
        file.writelines(chunks)


def main(argv: list[str]) -> int:
    folder, name, output = argv
    try:
        step = read_marker(Path(folder)).step
        tensors = gather(Path(folder), name)
    except PacelineError as error:
        print(f"paceline: error: {error}", file=sys.stderr)
        return error.exit_code
    replaced = ", replaced" if os.path.exists(output) else ""
    write_tensors(Path(output), tensors)
    text = f"{len(tensors)} tensors, {show_size(os.stat(output).st_size)}, step {step}{replaced}"
    print(f"paceline: {output}: {text}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
