"""`run.config`: the script's own settings, in the run folder, in W&B, in `show` and in a sweep's CSV file."""

from __future__ import annotations

import argparse
import enum
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.contract.run_folder import RunFolder
from paceline.errors import UsageError
from paceline.runtime.trackers.config import plain_config
from paceline.watch.details import flatten, read_config
from tests.runtime.training.test_wrap import quiet


class Mode(enum.Enum):
    FAST = 1


@dataclass
class Model:
    width: int = 64
    dtype: torch.dtype = torch.bfloat16


@dataclass
class Options:
    lr: float = 0.1
    model: Model = field(default_factory=Model)
    mode: Mode = Mode.FAST
    data: Path = Path("/data")
    betas: tuple[float, float] = (0.9, float("inf"))
    api_key: str = "hush"


PLAIN = {
    "lr": 0.1,
    "model": {"width": 64, "dtype": "torch.bfloat16"},
    "mode": "FAST",
    "data": "/data",
    "betas": [0.9, "Infinity"],
    "api_key": "***",
}


@pytest.mark.parametrize(
    "given", [Options(), vars(Options()), argparse.Namespace(**vars(Options()))]
)
def test_settings_become_plain_values(given: Any) -> None:
    assert plain_config(given) == PLAIN
    json.dumps(PLAIN, allow_nan=False)


class Missing(dict[str, Any]):
    def __getitem__(self, name: str) -> Any:
        raise KeyError(name)


def test_odd_settings_do_not_end_a_run() -> None:
    odd = {"names": {"b", "a"}, "classes": {(0, 1): 0.5, torch.int8: None}, "node": Missing(gpu=0)}
    assert plain_config(odd) == {
        "names": ["a", "b"],
        "classes": {"(0, 1)": 0.5, "torch.int8": None},
        "node": {"gpu": "<KeyError when read>"},
    }
    cyclic: dict[str, Any] = {"lr": 0.1}
    cyclic["self"] = cyclic
    assert plain_config(cyclic)["self"]["lr"] == 0.1


@pytest.mark.parametrize("given", [3, ["lr"], Options])
def test_other_things_are_refused(given: Any) -> None:
    with pytest.raises(UsageError, match=r"run\.config got a "):
        plain_config(given)


def test_settings_are_in_the_run_folder_and_shown(
    scratch: Path, tmp_path: Path, paceline: Callable[..., Any]
) -> None:
    folder = scratch / "demo/default/20260101-000000-abcd"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    with quiet(folder=folder) as run:
        run.config(Options())
        run.config({"epochs": 3})
    assert read_config(RunFolder(folder)) == {**PLAIN, "epochs": 3}
    assert flatten(PLAIN)["model.width"] == 64
    shown = paceline("show", str(folder), check=True).stdout
    assert 'lr=0.1 model.width=64 model.dtype="torch.bfloat16"' in " ".join(shown.split())
    assert "hush" not in shown
    assert read_config(RunFolder(tmp_path)) == {}
