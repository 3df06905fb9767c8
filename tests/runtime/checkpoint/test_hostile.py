"""Nothing in a checkpoint is unpickled."""

from __future__ import annotations

import dataclasses
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from paceline.contract.checkpoint import CHECKPOINT_MARKER, compute_checksum, read_marker
from paceline.errors import CheckpointError
from paceline.runtime.checkpoint import export
from paceline.runtime.checkpoint.manager import CheckpointManager
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
        arguments = [str(folder / "step-00000002"), "model", str(folder / "out")]
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
