"""How `paceline doctor` reads its arguments, and draws what it finds."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import dispatch
from paceline.cli.commands.doctor import command, names_a_run, report
from paceline.cli.parser import single_command
from paceline.contract.fitness import Judgement, Measurement
from paceline.contract.run_folder import RunFolder
from paceline.errors import ClusterError, NotConfigured
from paceline.launch import checks as machine
from paceline.spec.findings import GOOD, NOTE, PROBLEM, WARNING, Finding
from paceline.watch.diagnosis.pace import describe

FINDINGS = [
    Finding("run", GOOD, "1a2b is running"),
    Finding(
        "hang",
        PROBLEM,
        "Rank 3 is stuck.",
        "Look there.",
        ("rank 3 is at [train.py:3]",),
        "docs/x.md#it-hangs",
    ),
]


def test_what_is_wrong_is_followed_by_evidence_and_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert report(FINDINGS) == 1
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "✓ run         1a2b is running",
        "✗ hang        Rank 3 is stuck.",
        "              - rank 3 is at [train.py:3]",
        "              Fix: Look there.",
        "              More in the documentation: docs/x.md#it-hangs",
    ]


def test_further_lines_are_in_the_column_of_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    report(
        [Finding("error", PROBLEM, "NonFinite: nan\n  at step 7", "Stop.", ("rank 1: no\nspace",))]
    )
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "✗ error       NonFinite: nan",
        "              at step 7",
        "              - rank 1: no",
        "              space",
        "              Fix: Stop.",
    ]


def test_a_run_that_is_lost_is_not_ticked_off(paceline: Callable[..., Any], tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "project" / "default" / "20260101-000000-aaaa")
    folder.job_start("pid-1-a").path.mkdir(parents=True)
    folder.run_json.write_text("{}")
    done = paceline("doctor", "last", PACELINE_SCRATCH=str(tmp_path))
    assert done.stdout.startswith(f"· run         {folder.path.name} is lost"), done.stdout


def test_a_run_has_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(tmp_path / "project" / "default" / "20260101-000000-aaaa")
    started = folder.job_start("pid-1-a")
    started.path.mkdir(parents=True)
    folder.run_json.write_text("{}")
    started.verdict.write_text("failed\n")
    folder.claims.mkdir()
    (folder.claims / "1").symlink_to(started.path.name)
    dispatch(["doctor", str(folder.path)])
    assert f"{folder.path.name} has failed" in capsys.readouterr().out


def test_warnings_do_not_fail(capsys: pytest.CaptureFixture[str]) -> None:
    assert report([Finding("data", WARNING, "slow")]) == 0
    assert capsys.readouterr().out.startswith("! data")


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(FINDINGS, as_json=True) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["findings"][1] == {
        "about": "hang",
        "level": "problem",
        "text": "Rank 3 is stuck.",
        "hint": "Look there.",
        "evidence": ["rank 3 is at [train.py:3]"],
        "docs": "docs/x.md#it-hangs",
    }


def test_a_run_is_told_from_a_script(tmp_path: Path) -> None:
    script = tmp_path / "train"
    script.touch()
    assert names_a_run("last")
    assert names_a_run(str(tmp_path)), "a run's folder"
    assert not names_a_run("train.py")
    assert not names_a_run(str(script))


OPTIONS_AFTER_A_RUN = {
    "last --json --scratch=/a": ["--json", "--scratch=/a", "last"],
    "--json last --scratch /a": ["--json", "--scratch", "/a", "last"],
    "-m train --lr 0.1": ["-m", "--", "train", "--lr", "0.1"],
    "--job -m train --json": ["--job", "-m", "--", "train", "--json"],
    "train.py --json": ["train.py", "--json"],
}


@pytest.mark.parametrize("typed", OPTIONS_AFTER_A_RUN)
def test_options_may_follow_a_run_but_those_of_a_script_are_its_own(typed: str) -> None:
    parser = single_command(command)
    expected = parser.make_context("doctor", OPTIONS_AFTER_A_RUN[typed]).params
    assert parser.make_context("doctor", typed.split()).params == expected
    assert expected["args"] == OPTIONS_AFTER_A_RUN[typed][-1:] or not expected["as_json"]


def test_scratch_says_where_the_run_is(paceline: Callable[..., Any], tmp_path: Path) -> None:
    for name in ("here", "there"):
        folder = tmp_path / name / "project" / "default" / f"20260101-000000-{name}"
        folder.mkdir(parents=True)
        (folder / "run.json").write_text("{}")
    for options, expected in (([], "here"), (["--scratch", str(tmp_path / "there")], "there")):
        done = paceline("doctor", *options, "last", PACELINE_SCRATCH=str(tmp_path / "here"))
        assert f"20260101-000000-{expected} is" in done.stdout, done.stderr


def test_slurm_without_a_cluster_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """A laptop may only have Slurm's commands. A controller that does not respond is one."""
    monkeypatch.setattr(machine.slurm, "available", lambda: True)
    monkeypatch.setattr(machine.slurm, "version", lambda: (23, 11))
    for kind, level in ((NotConfigured, WARNING), (ClusterError, PROBLEM)):
        monkeypatch.setattr(machine, "query_partitions", partial(fail, kind("sinfo says why.")))
        (found,) = machine.inspect_slurm()
        assert found.level == level
        assert "sinfo says why." in found.text


def fail(error: ClusterError) -> None:
    raise error


def test_speeds_are_shown_beside_what_is_slow() -> None:
    measured = [
        Measurement(node, f"node{node}", node, "cpu", tflops=0.1 * (1 + node), complete=True)
        for node in (0, 1)
    ]
    slow, speeds = describe(measured, [Judgement("node0", "half as fast as others", unfit=True)])
    assert (slow.level, speeds.level) == (PROBLEM, NOTE)
    assert speeds.text == "2 x cpu 100 to 200 GFLOP/s"
    assert [each.level for each in describe(measured, [])] == [GOOD]
