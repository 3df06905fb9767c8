"""`paceline export`: plain weights under the model's own names."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.contract.checkpoint import (
    CHECKPOINT_MARKER,
    Marker,
    Score,
    checkpoint_name,
    find_best,
    list_checkpoints,
    plain_names,
)
from paceline.runtime.checkpoint.manager import CheckpointManager
from paceline.runtime.checkpoint.retention import RetentionPolicy
from paceline.runtime.checkpoint.state_tree import TORCH_DTYPES
from tests.forked_ranks import Ranks
from tests.runtime.checkpoint import test_sharded
from tests.runtime.checkpoint.trainer import Trainer


def read_plain(path: Path) -> dict[str, torch.Tensor]:
    """Read a safetensors file by the format's specification."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    table = json.loads(raw[8 : 8 + length])
    assert set(table.pop("__metadata__")) >= {"format"}
    data = raw[8 + length :]
    tensors = {}
    for name, entry in table.items():
        begin, end = entry["data_offsets"]
        dtype = TORCH_DTYPES[entry["dtype"]]
        flat = (
            torch.frombuffer(bytearray(data[begin:end]), dtype=dtype)
            if end > begin
            else torch.empty(0, dtype=dtype)
        )
        tensors[name] = flat.reshape(entry["shape"])
    return tensors


def save_and_return_weights(folder: Path) -> dict[str, list[float]]:
    trainer = Trainer(folder)
    trainer.step(1)
    trainer.checkpoints.save(1, wait=True)
    weights = {
        key: value.double().flatten().tolist() for key, value in trainer.model.state_dict().items()
    }
    trainer.close()
    return weights


def test_weights_split_between_four_ranks(
    ranks: Ranks, paceline: Callable[..., Any], tmp_path: Path
) -> None:
    """They are assembled from four files, with tied weights under both names."""
    expected = ranks(save_and_return_weights, 4, tmp_path / "run" / "checkpoints")[0]
    done = paceline("export", "run", "-o", "model.safetensors", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = {
        key: value.double().flatten().tolist()
        for key, value in read_plain(tmp_path / "model.safetensors").items()
    }
    assert found == expected
    assert {"embed.weight", "head.weight"} <= set(found)
    done = paceline("export", "run", "-o", "model.pt", cwd=tmp_path, check=True)
    (line,) = done.stderr.splitlines()
    assert re.search(r"model\.pt: \d+ tensors, \d.* MB, step 1$", line)
    for name in ("model.safetensors", "model.pt"):
        assert paceline("export", "run", "-o", name, cwd=tmp_path, check=True).stderr.endswith(
            ", step 1, replaced\n"
        )
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    assert {key: value.double().flatten().tolist() for key, value in loaded.items()} == expected
    assert loaded["embed.weight"].data_ptr() == loaded["head.weight"].data_ptr()
    assert not list(tmp_path.glob(".*partial"))


@pytest.mark.parametrize("output", ["model.onnx", "model"])
def test_a_file_of_another_kind(paceline: Callable[..., Any], tmp_path: Path, output: str) -> None:
    done = paceline("export", ".", "-o", output, cwd=tmp_path)
    assert done.returncode == 2
    assert (
        f"can't write '{output}': the name has to end in .safetensors, .pt, .pth or .bin"
        in done.stderr
    )
    assert not (tmp_path / output).exists()


def test_the_newest_intact_checkpoint_or_an_error(
    paceline: Callable[..., Any], tmp_path: Path
) -> None:
    model = nn.Linear(2, 2)
    checkpoints = CheckpointManager(tmp_path / "checkpoints")
    checkpoints.register(net=model, other=nn.Linear(1, 1))
    for step in (1, 2):
        with torch.no_grad():
            model.weight.fill_(step)
        checkpoints.save(step, wait=True)
    chosen = paceline("export", ".", "-o", "two.safetensors", "--object", "net", cwd=tmp_path)
    assert chosen.returncode == 0, chosen.stderr
    assert read_plain(tmp_path / "two.safetensors")["weight"].tolist() == [[2.0, 2.0], [2.0, 2.0]]
    share = next((tmp_path / "checkpoints/step-00000002").glob("share-*"))
    content = share.read_bytes()
    share.write_bytes(content[:-1] + bytes([content[-1] ^ 255]))
    older = paceline("export", ".", "-o", "one.safetensors", "--object", "net", cwd=tmp_path)
    assert "skipping checkpoint step-00000002" in older.stderr
    assert read_plain(tmp_path / "one.safetensors")["weight"].tolist() == [[1.0, 1.0], [1.0, 1.0]]
    several = paceline("export", ".", "-o", "x.safetensors", cwd=tmp_path)
    assert several.returncode == 2
    assert "2 modules: net, other" in several.stderr
    absent = paceline("export", ".", "--step", "7", "--object", "net", cwd=tmp_path)
    assert absent.returncode == 1
    assert "no complete checkpoint of step 7" in absent.stderr


def test_the_best_checkpoint(paceline: Callable[..., Any], scratch: Path, tmp_path: Path) -> None:
    run = scratch / "demo/default/20260101-000000-abcd"
    model = nn.Linear(1, 1, bias=False)
    checkpoints = CheckpointManager(
        run / "checkpoints", policy=RetentionPolicy(keep_last=1, best="val_loss")
    )
    checkpoints.register(model=model)
    for step, loss in enumerate([9.0, 8.0, 7.0, 3.01372, 5.0, float("nan")], 1):
        with torch.no_grad():
            model.weight.fill_(step)
        checkpoints.attach(step, loss)
        checkpoints.save(step, wait=True)
    checkpoints.close()
    newest = paceline("export", str(run), check=True)
    assert "the best by val_loss is step 4: --best" in newest.stderr
    assert newest.stderr.endswith("step 6\n")
    assert read_plain(tmp_path / "model.safetensors")["weight"].item() == 6
    best = paceline("export", str(run), "--best", check=True)
    assert "--best" not in best.stderr
    assert best.stderr.endswith("step 4, replaced\n")
    assert read_plain(tmp_path / "model.safetensors")["weight"].item() == 4
    (run / "run.json").write_text("{}")
    assert re.search(
        r"^best +step 4 \(val_loss 3\.0137\)$", paceline("show", str(run), check=True).stdout, re.M
    )
    shutil.rmtree(run / "checkpoints/step-00000004")
    absent = paceline("export", str(run), "--best")
    assert absent.returncode == 1
    assert "There is no best checkpoint" in absent.stderr


def test_the_best_by_the_metric_and_direction_of_the_newest_score(tmp_path: Path) -> None:
    scores = {
        1: Score("loss", "min", 0.1),
        2: Score("acc", "max", 0.7),
        3: Score("acc", "max", 0.9),
        4: None,
    }
    scores[5] = Score("acc", "max", 0.9)  # as good, and trained longer
    scores[6] = Score("acc", "max", 0.2)
    for step, score in scores.items():
        folder = tmp_path / checkpoint_name(step)
        folder.mkdir()
        marker = Marker(step, 0, 1, "1-1", 0.0, meta=score.to_meta() if score else {"best": "?"})
        (folder / CHECKPOINT_MARKER).write_text(marker.to_json())
    assert find_best(list_checkpoints(tmp_path)) == (5, scores[5])
    assert find_best([tmp_path / checkpoint_name(4)]) is None


def test_sharded_weights_are_assembled(
    ranks: Ranks, paceline: Callable[..., Any], tmp_path: Path
) -> None:
    left = ranks(test_sharded.train, 2, tmp_path / "checkpoints", 2, True, 1)[0]["left"]
    done = paceline("export", str(tmp_path), "-o", str(tmp_path / "whole.safetensors"))
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()  # and no warning of torch's
    assert "whole.safetensors: " in line
    assert line.endswith("step 2")
    found = read_plain(tmp_path / "whole.safetensors")
    assert {key: value.double().flatten().tolist() for key, value in found.items()} == {
        key: value for key, value in left.items() if "/" not in key
    }


@pytest.mark.parametrize(
    ("keys", "plain"),
    [
        (["module.a.weight", "module.b"], ["a.weight", "b"]),
        (["_orig_mod.module.a", "_orig_mod.module.b"], ["a", "b"]),
        (["a._orig_mod.weight", "b"], ["a.weight", "b"]),
        (["n_averaged", "module.a"], ["n_averaged", "a"]),
        (["module.a", "head"], ["module.a", "head"]),  # a submodule with that name
    ],
)
def test_prefixes_of_wrappers(keys: list[str], plain: list[str]) -> None:
    assert list(plain_names(keys).values()) == plain
