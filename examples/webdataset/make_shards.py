"""Write handwritten digits as tar files: `python make_shards.py ../mnist/data shards`.

The first folder contains MNIST's IDX files, such as those bundled in examples/mnist. In the tar
files, each sample is two files with the same stem: `000042.npy` is the image and `000042.cls` the
label.
"""

from __future__ import annotations

import argparse
import io
import lzma
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np


def read_idx(path: Path) -> np.ndarray:
    """Read an IDX file of bytes: four bytes, the last of which counts the dimensions, then these,
    then the data.
    """
    content = lzma.decompress(path.read_bytes())
    head = 4 + 4 * content[3]
    return np.frombuffer(content[head:], np.uint8).reshape(
        np.frombuffer(content[4:head], ">u4").astype(int)
    )


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def write_shards(
    source: Path, target: Path, *, part: str, samples: int | None, shards: int
) -> None:
    images = read_idx(source / f"{part}-images-idx3-ubyte.xz")[:samples]
    labels = read_idx(source / f"{part}-labels-idx1-ubyte.xz")[:samples]
    for number in range(shards):
        with tarfile.open(target / f"{part}-{number:03d}.tar", "w") as archive:
            for index in range(number, len(labels), shards):
                image = io.BytesIO()
                np.save(image, images[index])
                add(archive, f"{index:06d}.npy", image.getvalue())
                add(archive, f"{index:06d}.cls", str(labels[index]).encode())


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write handwritten digits as tar files.")
    parser.add_argument(
        "source", type=Path, help="folder with MNIST as IDX files, compressed with xz"
    )
    parser.add_argument("target", type=Path, help="folder for the tar files")
    parser.add_argument("--samples", type=int, help="take only the first ones (all)")
    parser.add_argument("--shards", type=int, default=16, help="number of training shards (16)")
    args = parser.parse_args(given)
    args.target.mkdir(parents=True, exist_ok=True)
    write_shards(args.source, args.target, part="train", samples=args.samples, shards=args.shards)
    write_shards(args.source, args.target, part="t10k", samples=args.samples, shards=2)


if __name__ == "__main__":
    main()
