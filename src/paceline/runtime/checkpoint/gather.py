"""`python -m paceline.runtime.checkpoint.gather FOLDER OBJECT OUTPUT NAMES`: whole weights of a sharded checkpoint.

What `paceline export` becomes when the state was cut over a device mesh. NAMES is JSON: state key -> name in the file.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path

import torch

from paceline.contract.checkpoint.safetensors import Piece, header
from paceline.errors import PacelineError
from paceline.runtime.checkpoint import sharded
from paceline.runtime.checkpoint.reader import Source
from paceline.runtime.checkpoint.state_tree import DTYPE_NAMES


def gather(folder: Path, name: str, names: dict[str, str]) -> dict[str, torch.Tensor]:
    """The tensors of an object, whole, under their plain names."""
    with Source(folder) as source:
        refs = {key: each for key, each in source.json("objects.json")[name].items() if key in names}
        whole = {each["$sharded"]: sharded.target(each, None) for each in refs.values() if "$sharded" in each}
        sharded.read(folder, whole, group=None)
        return {
            names[key]: whole[each["$sharded"]] if "$sharded" in each else source.tensor(each["$tensor"])
            for key, each in refs.items()
        }


def write(output: Path, tensors: dict[str, torch.Tensor]) -> None:
    pieces, offset = [], 0
    for name, tensor in tensors.items():
        pieces.append(
            Piece(
                name=name, dtype=DTYPE_NAMES[tensor.dtype], shape=tuple(tensor.shape), start=0, stop=tensor.numel(),
                offset=offset, nbytes=tensor.nbytes, is_whole=True,
            )
        )  # fmt: skip
        offset += tensor.nbytes
    partial = output.with_name(f".{output.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(header(pieces))
            for tensor in tensors.values():
                file.write(ctypes.string_at(tensor.contiguous().data_ptr(), tensor.nbytes))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, output)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def main(words: list[str]) -> int:
    folder, name, output, names = words
    try:
        tensors = gather(Path(folder), name, json.loads(names))
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return error.exit_code
    write(Path(output), tensors)
    size = os.stat(output).st_size
    print(f"paceline: {output}: {len(tensors)} tensors, {size / 1e6:.1f} MB", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
