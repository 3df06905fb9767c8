"""Make the bundled subset from the full MNIST files: `python make_subset.py
FOLDER_WITH_FULL_IDX_FILES`.

It takes every 6th training image and every 5th test image (10,000 and 2,000), as IDX files
compressed with xz. Nothing is random, so everyone gets the same bytes.
"""

from __future__ import annotations

import lzma
import struct
import sys
from pathlib import Path

import torch
from digits import SUBSET, find, read_idx

STRIDES = {"train": 6, "t10k": 5}


def compress(rows: torch.Tensor) -> bytes:
    header = struct.pack(f">BBBB{rows.dim()}I", 0, 0, 8, rows.dim(), *rows.shape)
    return lzma.compress(
        header + rows.contiguous().numpy().tobytes(), preset=9 | lzma.PRESET_EXTREME
    )


def main(source: Path) -> None:
    SUBSET.mkdir(exist_ok=True)
    for part, stride in STRIDES.items():
        for name in (f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"):
            path = find(source, name)
            if path is None:
                raise SystemExit(f"no {name} in {source}")
            target = SUBSET / f"{name}.xz"
            target.write_bytes(compress(read_idx(path)[::stride]))
            print(f"{target.name}: {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
