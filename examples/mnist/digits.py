"""MNIST digits: read IDX files (plain, .gz or .xz), from the bundled subset or a download of the
full dataset.
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
import sys
import urllib.request
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy
import torch
from torch.utils.data import TensorDataset

SUBSET = Path(__file__).parent / "data"  # every 6th training image and every 5th test image
MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
# Checksums of the content, because mirrors compress it differently.
SHA256 = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
OPENERS = {"": open, ".gz": gzip.open, ".xz": lzma.open}


def find(folder: Path, name: str) -> Path | None:
    """Return the file with this name, compressed or not, also where torchvision puts it."""
    for parent in (folder, folder / "MNIST" / "raw"):
        for stem in (name, name.replace("-idx", ".idx")):
            for suffix in OPENERS:
                if (parent / (stem + suffix)).exists():
                    return parent / (stem + suffix)
    return None


def read_idx(path: Path) -> torch.Tensor:
    """Read an IDX file of bytes: two zeros, type 8, the number of dimensions, each dimension, then
    the data.
    """
    with OPENERS[path.suffix if path.suffix in OPENERS else ""](path, "rb") as file:
        content = file.read()
    if content[:3] != b"\0\0\x08":
        raise ValueError(
            f"{path} is not an IDX file of bytes: it begins with {content[:4].hex(' ')}"
        )
    head = 4 + 4 * content[3]
    shape = [int(size) for size in numpy.frombuffer(content[4:head], ">u4")]
    return torch.from_numpy(numpy.frombuffer(content[head:], numpy.uint8).copy()).reshape(shape)


def load(folder: Path, part: str) -> TensorDataset:
    """Return `train` or `t10k` as normalized images [n, 1, 28, 28] and labels [n]."""
    tensors = []
    for name in (f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"):
        path = find(folder, name)
        if path is None:
            raise FileNotFoundError(
                f"no {name} (plain, .gz or .xz) in {folder}; --download fetches it there"
            )
        tensors.append(read_idx(path))
    images = (tensors[0].unsqueeze(1).float() / 255 - 0.1307) / 0.3081
    return TensorDataset(images, tensors[1].long())


def download(
    folder: Path,
    *,
    mirrors: Iterable[str] = MIRRORS,
    sums: Mapping[str, str] = SHA256,
    timeout: float = 30,
) -> None:
    """Download the files that are missing. A file gets its name once it is complete and its
    checksum is right.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, expected in sums.items():
        if find(folder, name) is not None:
            continue
        problems = []
        for mirror in mirrors:
            try:
                packed = fetch(f"{mirror}{name}.gz", timeout)
                found = hashlib.sha256(gzip.decompress(packed)).hexdigest()
            except (OSError, EOFError, zlib.error) as error:
                problems.append(f"{mirror}: {error}")
                continue
            if found != expected:
                problems.append(f"{mirror}: sha256 {found}, expected {expected}")
                continue
            partial = folder / f".{name}.partial"
            partial.write_bytes(packed)
            partial.rename(folder / f"{name}.gz")
            break
        else:
            raise OSError(f"{name} could not be fetched:\n  " + "\n  ".join(problems))


def fetch(url: str, timeout: float) -> bytes:
    """Download a URL, and show progress on a terminal."""
    parts: list[bytes] = []
    with urllib.request.urlopen(url, timeout=timeout) as answer:
        total = int(answer.headers.get("Content-Length") or 0)
        while part := answer.read(1 << 18):
            parts.append(part)
            if sys.stderr.isatty():
                done = sum(map(len, parts))
                print(f"\r{url}  {done / 1e6:.1f} / {total / 1e6:.1f} MB", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return b"".join(parts)
