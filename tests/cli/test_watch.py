"""Commands that watch runs: `logs`, `submit --wait` and `submit --follow`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import cli
from paceline.cli import logs, submit
from paceline.contract.run_folder import RunFolder
from paceline.watch import logs as watch_logs


@pytest.fixture
def folder(scratch: Path, tmp_path: Path) -> Iterator[RunFolder]:
    """The folder of a run, in the scratch folder of this process."""
    made = RunFolder(scratch / "project" / "default" / "20260101-120000-1a2b")
    made.events.mkdir(parents=True)
    made.run_json.write_text(json.dumps({"run_id": made.path.name, "nodes": 1, "nproc": 2, "host": "here"}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_SCRATCH", str(scratch))
        patch.chdir(tmp_path)
        yield made


def interrupt(*_: Any, **__: Any) -> Iterator[str]:
    yield "loss 1.5\n"
    raise KeyboardInterrupt


@pytest.mark.parametrize("command", ["logs", "follow", "wait"])
def test_ctrl_c_says_that_the_run_goes_on(
    command: str, folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = folder.path.name
    monkeypatch.setattr(logs, "stream", interrupt)
    monkeypatch.setattr(watch_logs, "follow", interrupt)
    monkeypatch.setattr(watch_logs, "wait_until_over", lambda _: list(interrupt()))
    watch: Callable[[], object] = lambda: submit.wait_until_done(folder, follow=command == "follow")  # noqa: E731
    if command == "logs":
        with pytest.raises(SystemExit) as left:
            cli.main(["logs", "-f", run])
        assert left.value.code == 130
    else:
        with pytest.raises(KeyboardInterrupt):
            watch()
    assert (
        f"{run} goes on; watch it: paceline logs -f {run}; cancel it: paceline cancel {run}" in capsys.readouterr().err
    )
