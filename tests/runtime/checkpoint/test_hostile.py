"""Nothing in a checkpoint is unpickled, and one that makes no sense is skipped, like a damaged one."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from paceline.contract.checkpoint import CHECKPOINT_MARKER, compute_checksum, read_marker
from paceline.contract.safetensors import LENGTH
from paceline.errors import CheckpointError
from paceline.runtime.checkpoint import CheckpointManager
from paceline.runtime.checkpoint.sharded import export
from tests.forked_ranks import Ranks
from tests.runtime.checkpoint import test_sharded
from tests.runtime.checkpoint.trainer import Trainer, make


class Hostile:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def put(folder: Path, names: list[str], content: bytes) -> None:
    """Write the content to these files of a checkpoint, with checksums that fit."""
    marker = read_marker(folder)
    for name in names:
        (folder / name).write_bytes(content)
    files = {name: compute_checksum(folder / name) for name in {*marker.files, *names}}
    (folder / CHECKPOINT_MARKER).write_text(dataclasses.replace(marker, files=files).to_json())


def attacks(checkpoints: Path, copies: Path) -> list[Path]:
    """Copies of a checkpoint: one file replaced in each, all in one, and a `.metadata` that torch would unpickle."""
    original = checkpoints / "step-00000002"
    names = [[name] for name in sorted(read_marker(original).files)]
    folders = []
    for number, replaced in enumerate(
        [*names, [name for each in names for name in each], ["sharded/.metadata"]]
    ):
        folder = copies / str(number) / original.name
        shutil.copytree(original, folder)
        (folder / "sharded").mkdir(exist_ok=True)
        put(folder, replaced, pickle.dumps(Hostile(copies / "executed")))
        folders.append(folder.parent)
    return folders


def load_all(folders: list[Path]) -> list[list[Any]]:
    """Resume, start from and export each of the folders, sharded; return the errors and the exit code."""
    dist.init_process_group("gloo")
    outcomes = []
    for folder in folders:
        outcome: list[Any] = []
        for own, start in ((folder, None), (folder / "new", folder)):
            model, optimizer = test_sharded.build(1, sharded=True)
            manager = CheckpointManager(own, warn=lambda _: None)
            manager.register(model=model, opt=optimizer)
            try:
                manager.restore(start)
                outcome.append(None)
            except CheckpointError as error:
                outcome.append(str(error))
            manager.close()
        arguments = [
            str(folder / "step-00000002"),
            "model",
            str(folder / "out"),
            '{"0.weight": "0.weight"}',
        ]
        outcomes.append([*outcome, export.main(arguments)])
    dist.destroy_process_group()
    return outcomes


def test_sharded_state(ranks: Ranks, tmp_path: Path) -> None:
    ranks(test_sharded.train, 2, tmp_path / "checkpoints", 2, True, 1)
    *damaged, harmless = ranks(load_all, 1, attacks(tmp_path / "checkpoints", tmp_path))[0]
    assert not (tmp_path / "executed").exists()
    assert all(outcome[0] and outcome[1] for outcome in damaged)
    assert damaged[-1][2] != 0
    assert harmless == [None, None, 0]  # a file that nothing reads


def test_replicated_state(paceline: Callable[..., Any], tmp_path: Path) -> None:
    make(tmp_path / "checkpoints", 2)
    folders = attacks(tmp_path / "checkpoints", tmp_path)
    for folder in folders[:-1]:
        for own, start in ((folder, None), (tmp_path / "new", folder)):
            trainer = Trainer(own)
            with pytest.raises(CheckpointError):
                trainer.checkpoints.restore(start)
            trainer.close()
    done = paceline("export", str(folders[-2]), "-o", str(tmp_path / "out.safetensors"))
    assert done.returncode not in (0, None)
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "executed").exists()


def edit_header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Return a function that edits the header of a checkpoint's share."""

    def apply(folder: Path) -> None:
        path = next(folder.glob("share-*"))
        raw = path.read_bytes()
        (length,) = LENGTH.unpack(raw[: LENGTH.size])
        header = json.loads(raw[LENGTH.size : LENGTH.size + length])
        change(header[next(iter(header))])
        text = json.dumps(header).encode()
        put(folder, [path.name], LENGTH.pack(len(text)) + text + raw[LENGTH.size + length :])

    return apply


def edit_json(pattern: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = next(folder.glob(pattern))
        table = json.loads(path.read_text())
        change(table)
        put(folder, [path.name], json.dumps(table).encode())

    return apply


def edit_marker(**values: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        marker = dataclasses.replace(read_marker(folder), **values)
        (folder / CHECKPOINT_MARKER).write_text(marker.to_json())

    return apply


def replace_with_pipe(folder: Path) -> None:
    name = next(folder.glob("state-*")).name
    put(folder, [name], b"")  # a pipe has this size too
    (folder / name).unlink()
    os.mkfifo(folder / name)


HUGE = {"$sharded": "a", "dtype": "F32", "shape": [2**40], "placements": ["S0"]}
INLINE = {"$inline": "AAAA", "dtype": "F32", "shape": [2**40]}
HOSTILE = {
    "a huge shape": edit_header(lambda entry: entry.update(shape=[2**40, 2**10])),
    "no tensor in the file": edit_header(
        lambda entry: entry.update(data_offsets=[2**40, 2**40 + 4])
    ),
    "a shape for other bytes": edit_header(lambda entry: entry.update(dtype="U8")),
    "a negative step": edit_marker(step=-5),
    "another step": edit_marker(step=7),
    "no ranks": edit_marker(world_size=0),
    "many ranks": edit_marker(world_size=10**9),
    "tensor is 0": edit_marker(tensor=0),
    "a position that is text": edit_marker(meta={"position": "x"}),
    "a loop that is text": edit_marker(meta={"position": {"loop": "x"}}),
    "an unknown kind": edit_marker(objects={"model": "x"}),
    "deep nesting": lambda folder: put(folder, ["objects.json"], b"[" * 10**5 + b"]" * 10**5),
    "a list": lambda folder: put(folder, ["objects.json"], b"[1]"),
    "no model": edit_json("objects.json", lambda trees: trees.pop("model")),
    "a model that is a number": edit_json("objects.json", lambda trees: trees.update(model=3)),
    "an unknown device": edit_json(
        "objects.json", lambda trees: trees.update(opt={"$device": "zzz"})
    ),
    "an unknown tag": edit_json("objects.json", lambda trees: trees.update(opt={"$zzz": 5})),
    "a tuple of a number": edit_json("objects.json", lambda trees: trees.update(opt={"$tuple": 5})),
    "a huge sharded tensor": edit_json("objects.json", lambda trees: trees.update(opt=HUGE)),
    "a huge small tensor": edit_json("objects.json", lambda trees: trees.update(opt=INLINE)),
    "no generators": edit_json("state-*", lambda state: state.pop("rng")),
    "a pipe": replace_with_pipe,
}


@pytest.mark.timeout(60)
def test_what_makes_no_sense_is_skipped(tmp_path: Path) -> None:
    make(tmp_path / "checkpoints", 1, 2)
    trainer = Trainer(tmp_path / "none")
    found = {}
    for number, (name, attack) in enumerate(HOSTILE.items()):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "checkpoints", folder)
        attack(folder / "step-00000002")
        trainer.checkpoints.folder = folder
        restored = trainer.checkpoints.restore()
        found[name] = restored and restored.step
        trainer.checkpoints.close()
        shutil.rmtree(folder)
    assert found == dict.fromkeys(HOSTILE, 1)
    trainer.close()


@pytest.mark.parametrize(
    "change",
    [
        {"sizes": [2**40]},
        {"sizes": ["a"]},
        {"sizes": [-1, -1]},
        {"begin": -8},
        {"begin": 2**40},
        {"begin": "0"},
        {"offsets": [2**40, 0]},
        {"offsets": None},
        {"file": "../x"},
        {"file": "missing"},
    ],
)
def test_a_hostile_index_is_one_error(tmp_path: Path, change: dict[str, Any]) -> None:
    storage = pytest.importorskip("paceline.runtime.checkpoint.sharded.storage")
    chunk = {"offsets": [0, 0], "sizes": [2, 2], "file": "shard", "begin": 0}
    (tmp_path / "shard").write_bytes(bytes(16))
    for table in (chunk, {**chunk, **change}):
        index = {"w": {"dtype": "F32", "shape": [2, 2], "chunks": [table]}}
        (tmp_path / "index.json").write_text(json.dumps(index))
        if table is chunk:
            storage.ShardReader(tmp_path)
        else:
            with pytest.raises(CheckpointError):
                storage.ShardReader(tmp_path)
