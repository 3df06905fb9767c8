"""What `--start-from` names is found and checked before a run starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import UsageError
from paceline.launch.launch_spec import runtime_settings
from paceline.launch.resume import resolve_start
from paceline.runtime.checkpoint.manager import CheckpointManager
from paceline.spec.job import Program
from paceline.spec.load import load_job
from paceline.spec.option import Flag


def resolve(
    tmp_path: Path, source: str | None, *, after: tuple[str, ...] = (), **more: Any
) -> dict[str, Any]:
    """Return the settings that the ranks get."""
    flags = [Flag("--start-from", "runtime.start_from", source)] if source else []
    flags += [Flag(f"--{key}", f"runtime.start_{key}", value) for key, value in more.items()]
    job = load_job(Program("train.py"), flags=flags, cwd=tmp_path)
    return runtime_settings(
        resolve_start(job, {"PACELINE_SCRATCH": str(tmp_path / "scratch")}, after=after)
    )


def make_run(tmp_path: Path, run_id: str, *, name: str = "", saves: bool = True) -> Path:
    folder = tmp_path / "scratch" / "project" / "default" / run_id
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"run_id": run_id, "name": name}))
    if saves:
        manager = CheckpointManager(folder / "checkpoints")
        manager.register(model=nn.Linear(2, 2))
        manager.save(1, wait=True)
        manager.close()
    return folder


def test_runs_and_files_are_found_and_checked(tmp_path: Path) -> None:
    first = make_run(tmp_path, "20260101-000000-aaaa", name="teacher")
    second = make_run(tmp_path, "20260102-000000-bbbb", saves=False)
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "w.pt")
    (tmp_path / "notes.txt").write_text("")
    for name in (
        "teacher",
        first.name,
        "20260101",
        str(first),
        str(first / "checkpoints" / "step-00000001"),
    ):
        found = resolve(tmp_path, name)["start_from"]
        assert Path(found).is_relative_to(first), name
    assert resolve(tmp_path, "w.pt", strict=False) == {
        "start_from": str(tmp_path / "w.pt"),
        "start_strict": False,
    }
    assert resolve(tmp_path, "teacher", **{"continue": True})["start_continue"] is True
    gpt = tmp_path / "gpt"
    gpt.mkdir()
    torch.save({}, gpt / "pytorch_model-00001-of-00002.bin")
    with pytest.raises(UsageError, match="only 1 of 2 files"):
        resolve(tmp_path, "gpt")
    torch.save({}, gpt / "pytorch_model-00002-of-00002.bin")
    assert resolve(tmp_path, "gpt")["start_from"] == str(gpt)
    with pytest.raises(UsageError, match="only weights"):
        resolve(tmp_path, "gpt", **{"continue": True})
    problems = {
        "last": "it has no complete checkpoint",
        "nobody": "There is no run 'nobody'",
        "other.pt": "no such file",
        "notes.txt": "not a weights file",
    }
    for name, text in problems.items():
        with pytest.raises(UsageError, match=text):
            resolve(tmp_path, name)
    with pytest.raises(UsageError, match="only weights"):
        resolve(tmp_path, "w.pt", **{"continue": True})
    with pytest.raises(UsageError, match="--continue needs --start-from"):
        resolve(tmp_path, None, **{"continue": True})
    # A run that the job waits for will have a checkpoint then.
    assert resolve(tmp_path, "last", after=("last",))["start_from"] == str(second)
