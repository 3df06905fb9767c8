"""`--json`: one object with the number of its format, for every command that lists or shows."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import cli
from paceline.cli.console import print_json
from paceline.contract.files import own_folder_name
from paceline.contract.run_folder import RunFolder
from paceline.staging.cleanup import Owner, make_run_folder, this_process
from tests.sweep.folders import begin, end, grid, make_sweep


@pytest.fixture(autouse=True)
def project(scratch: Path, tmp_path: Path) -> Iterator[Path]:
    """A project folder, in which commands run."""
    path = tmp_path / "project"
    path.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_SCRATCH", str(scratch))
        patch.chdir(path)
        yield path


def ask(capsys: pytest.CaptureFixture[str], *args: str, code: int | None = 0) -> dict[str, Any]:
    found = cli.dispatch([*args, "--json"])
    assert code is None or found == code
    answer = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert answer.pop("format") == 1
    return dict(answer)


def test_show(scratch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(scratch / "p" / "e" / "20260101-000001-aaaa")
    folder.path.mkdir(parents=True)
    folder.run_json.write_text(json.dumps({"name": "first", "nodes": 1}))
    folder.config.write_text('{"lr": NaN, "list": [Infinity, 1.0]}')
    answer = ask(capsys, "show", "first")
    assert answer["overview"]["name"] == "first"
    assert answer["config"]["lr"] is None


def test_sweep_show(scratch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = make_sweep(
        scratch / "p" / "e" / "digits",
        grid({"lr": 0.1 * n} for n in range(3)),
        direction="maximize",
    )
    end(sweep, 0, value=0.5)
    end(sweep, 1, state="failed", error="RuntimeError: \x1b[2Jno")
    begin(sweep, 2)
    answer = ask(capsys, "sweep", "show", "digits")
    assert (answer["sweep"]["best"], answer["sweep"]["best_trial"], answer["sweep"]["trials"]) == (
        0.5,
        0,
        3,
    )
    assert [(each["number"], each["state"]) for each in answer["trials"]] == [
        (0, "done"),
        (1, "failed"),
        (2, "missing"),
    ]
    assert answer["trials"][0].keys() == {
        "number",
        "point",
        "state",
        "folder",
        "group",
        "seed",
        "value",
        "seconds",
        "step",
        "error",
        "job",
    }
    assert answer["trials"][1]["point"] == {"lr": 0.1}


def test_clean(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    left = tmp_path / own_folder_name() / "run-1-0"
    left.parent.mkdir(mode=0o700)
    ended = {**this_process(), "started": "another boot 1"}
    make_run_folder(left, Owner(run="r", job_start="l", node=0, host=os.uname().nodename, **ended))
    reason = f"process {os.getpid()} has ended"
    listed = {"path": str(left), "reason": reason, "removed": False}
    assert ask(capsys, "clean", "--folder", str(tmp_path)) == {"leftovers": [listed]}
    assert left.exists()
    removed = ask(capsys, "clean", "--folder", str(tmp_path), "--yes")
    assert removed == {"leftovers": [{**listed, "removed": True}]}
    assert not left.exists()
    assert ask(capsys, "clean", "--folder", str(tmp_path)) == {"leftovers": []}


def test_no_number_and_no_text_breaks_it(capsys: pytest.CaptureFixture[str]) -> None:
    print_json(values=[math.nan, {"a": math.inf}, 1.5], text="\x1b]0;x\x07 \u009b ö \ud800")
    printed = capsys.readouterr().out
    assert printed.isascii()
    assert "\x1b" not in printed
    assert json.loads(printed, parse_constant=pytest.fail)["values"] == [None, {"a": None}, 1.5]
