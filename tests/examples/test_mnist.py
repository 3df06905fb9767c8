"""The MNIST example: alone, under torchrun and under Paceline, unchanged; its digits; its download."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

MNIST = Path(__file__).parents[2] / "examples" / "mnist"
TRAIN = MNIST / "train.py"
SHORT = ["--cpu", "--dry-run", "--test-batch-size", "1000"]

Completed = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def digits() -> ModuleType:
    spec = importlib.util.spec_from_file_location("digits", MNIST / "digits.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def idx(*values: int) -> bytes:
    return struct.pack(">BBBBI", 0, 0, 8, 1, len(values)) + bytes(values)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random digits in the layout of the full set: enough to go through all of the script."""
    folder = tmp_path_factory.mktemp("tiny")
    for part, count in (("train", 128), ("t10k", 37)):
        pixels = os.urandom(count * 784)
        images = struct.pack(">BBBBIII", 0, 0, 8, 3, count, 28, 28) + pixels
        (folder / f"{part}-images-idx3-ubyte").write_bytes(images)
        labels = idx(*(pixels[784 * row] % 10 for row in range(count)))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    return folder


def run_command(*args: str, cwd: Path) -> Completed:
    done = subprocess.run(
        args,
        cwd=cwd,
        text=True,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=150,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def check_whole_test_set(output: str, images: int) -> None:
    found = re.findall(r"final test accuracy: (\d+\.\d+)% of (\d+) images", output)
    assert len(found) == 1, f"one line, by rank 0 alone:\n{output}"
    assert int(found[0][1]) == images


def test_one_process_trains_and_resumes(tmp_path: Path, tiny: Path) -> None:
    args = [
        sys.executable,
        str(TRAIN),
        "--cpu",
        "--batch-size",
        "32",
        "--data-dir",
        str(tiny),
        "--checkpoint-dir",
        str(tmp_path / "saved"),
    ]
    first = run_command(*args, "--epochs", "1", cwd=tmp_path)
    check_whole_test_set(first.stdout, 37)
    again = run_command(*args, "--epochs", "2", cwd=tmp_path)
    check_whole_test_set(again.stdout, 37)
    assert "resumed at step 4" in again.stderr
    assert "epoch 2:" in again.stdout
    assert "epoch 1:" not in again.stdout


@pytest.mark.slow  # tests/guests run other scripts under torchrun
def test_under_torchrun(tmp_path: Path, tiny: Path) -> None:
    done = run_command(
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(TRAIN),
        *SHORT,
        "--backend",
        "gloo",
        "--data-dir",
        str(tiny),
        cwd=tmp_path,
    )
    check_whole_test_set(done.stdout, 37)


def test_under_paceline(paceline: Callable[..., Completed], tiny: Path) -> None:
    done = paceline(
        "run", "--nproc", "2", "--cpu", str(TRAIN), *SHORT, "--data-dir", str(tiny), check=True
    )
    check_whole_test_set(done.stdout, 37)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_reads_its_digits(paceline: Callable[..., Completed]) -> None:
    done = paceline(
        "run", "--nproc", "2", "--cpu", str(TRAIN), "--epochs", "2", check=True, timeout=900
    )
    check_whole_test_set(done.stdout, 2000)
    accuracy = re.search(r"final test accuracy: (\d+\.\d+)%", done.stdout)
    assert accuracy is not None
    assert float(accuracy[1]) > 95


def test_the_network_is_the_standard_one(
    digits: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "digits", digits)
    spec = importlib.util.spec_from_file_location("mnist_train", TRAIN)
    assert spec is not None
    assert spec.loader is not None
    train = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train)
    assert sum(each.numel() for each in train.Net().parameters()) == 1_199_882


def test_the_bundled_digits(digits: ModuleType) -> None:
    for part, count in (("train", 10_000), ("t10k", 2_000)):
        images, labels = digits.load(digits.SUBSET, part).tensors
        assert images.shape == (count, 1, 28, 28)
        assert abs(images.mean().item()) < 0.05
        shares = labels.bincount(minlength=10) / count
        assert 0.07 < shares.min() < shares.max() < 0.13
    assert sum(each.stat().st_size for each in digits.SUBSET.iterdir()) < 3_000_000


def test_the_subset_matches_its_script(digits: ModuleType, tmp_path: Path) -> None:
    """Strides and packing, on a small full set."""
    full, copy = tmp_path / "full", tmp_path / "copy"
    full.mkdir()
    copy.mkdir()
    for name in ("digits.py", "make_subset.py"):
        (copy / name).write_bytes((MNIST / name).read_bytes())
    for part in ("train", "t10k"):
        (full / f"{part}-images-idx3-ubyte").write_bytes(idx(*range(30)))
        (full / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(*range(30))))
    run_command(sys.executable, "make_subset.py", str(full), cwd=copy)
    made = {path.name: digits.read_idx(path).tolist() for path in (copy / "data").iterdir()}
    by_six, by_five = list(range(0, 30, 6)), list(range(0, 30, 5))
    assert made == {
        "train-images-idx3-ubyte.xz": by_six,
        "train-labels-idx1-ubyte.xz": by_six,
        "t10k-images-idx3-ubyte.xz": by_five,
        "t10k-labels-idx1-ubyte.xz": by_five,
    }


def test_a_download_tries_mirrors_and_verifies_checksums(
    digits: ModuleType, tmp_path: Path
) -> None:
    content = idx(1, 2, 3)
    bad, cut, good, target = (tmp_path / name for name in ("bad", "cut", "good", "target"))
    for folder, packed in (
        (bad, gzip.compress(b"something else")),
        (cut, gzip.compress(content)[:-9]),
        (good, gzip.compress(content)),
    ):
        folder.mkdir()
        (folder / "some-idx1-ubyte.gz").write_bytes(packed)
    mirrors = [
        f"{(tmp_path / 'absent').as_uri()}/",
        *(f"{each.as_uri()}/" for each in (bad, cut, good)),
    ]
    sums: dict[str, Any] = {"some-idx1-ubyte": hashlib.sha256(content).hexdigest()}
    with pytest.raises(OSError, match="could not be fetched") as caught:
        digits.download(target, mirrors=mirrors[:3], sums=sums)
    assert "expected " + sums["some-idx1-ubyte"] in str(caught.value)
    assert list(target.iterdir()) == []
    digits.download(target, mirrors=mirrors, sums=sums)
    assert digits.read_idx(target / "some-idx1-ubyte.gz").tolist() == [1, 2, 3]
    digits.download(target, mirrors=[], sums=sums)  # it is there already


def test_missing_or_foreign_files_are_named(digits: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="train-images-idx3-ubyte"):
        digits.load(tmp_path, "train")
    (tmp_path / "x").write_bytes(b"PK\x03\x04")
    with pytest.raises(ValueError, match="50 4b 03 04"):
        digits.read_idx(tmp_path / "x")
