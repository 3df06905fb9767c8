"""Runs of other users in a shared scratch folder: you can read them, but nothing of them acts in your name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.cli.commands import cancel, export, logs, shell, show, sweep, sync
from paceline.cli.commands.clean import find_ended_secrets
from paceline.contract.environment_file import SECRETS_MARK
from paceline.contract.sweep_folder import Search
from paceline.errors import EnvironmentProblem, UsageError
from paceline.launch.resume import Typed, find_earlier_run
from paceline.launch.run_folder import find_run
from paceline.spec.job import Program
from paceline.spec.load import load_job
from paceline.spec.run_path import RunPath
from paceline.sweep.folder import SweepWriter
from tests.adversary.second_user import STRANGER

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can give files to another user"
)

OWN, FOREIGN = "20300101-000000-aaaa", "20300102-000000-bbbb"


def give(*paths: Path) -> None:
    for path in paths:
        os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


def make_run(scratch: Path, run_id: str, **record: object) -> Path:
    folder = scratch / "p" / "e" / run_id
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"run_id": run_id, **record}))
    (folder / "launch.json").write_text("{}")
    return folder


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """A scratch folder with an older run of ours and a newer one of a stranger's."""
    make_run(tmp_path, OWN)
    folder = make_run(tmp_path, FOREIGN, name="baseline")
    (folder / "job").write_text("4711\n")
    give(folder, *folder.iterdir())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_SCRATCH", str(tmp_path))
        patch.chdir(tmp_path)
        yield tmp_path


def path_of(scratch: Path, run_id: str) -> Path:
    return scratch / "p" / "e" / run_id


def test_last_names_and_parts_of_ids_find_own_runs(scratch: Path) -> None:
    assert find_run("last", scratch).path.name == OWN
    assert find_run("20300101-", scratch).path.name == OWN
    for name in ("bbbb", "20300102", "baseline", "4711"):
        with pytest.raises(UsageError, match="There is no run"):
            find_run(name, scratch)
    # A whole id and a path are meant.
    assert (
        find_run(FOREIGN, scratch).path
        == find_run(f"p/e/{FOREIGN}", scratch).path
        == path_of(scratch, FOREIGN)
    )
    give(path_of(scratch, OWN))
    with pytest.raises(UsageError, match="You have no runs"):
        find_run("last", scratch)


def test_a_stranger_cannot_take_a_name_or_pass_off_a_folder(scratch: Path) -> None:
    for name in ("last", "best"):
        folder = make_run(scratch, name)
        give(folder, *folder.iterdir())
    assert find_run("last", scratch).path.name == OWN
    with pytest.raises(UsageError, match="There is no run 'best'"):
        find_run("best", scratch)
    # Their link to our folder, and their record in a folder of ours that is open to everybody.
    link = path_of(scratch, "20300103-000000-cccc")
    link.symlink_to(path_of(scratch, OWN))
    give(link, make_run(scratch, "20300104-000000-dddd") / "launch.json")
    assert find_run("last", scratch).path.name == OWN


@pytest.mark.parametrize("by_path", [False, True])
def test_whatever_acts_refuses_a_foreign_run(by_path: bool, scratch: Path) -> None:
    name = str(path_of(scratch, FOREIGN)) if by_path else FOREIGN
    acts = {
        "cancel": lambda: cancel.command([name]),
        "shell": lambda: shell._inside(name, None, terminal=False),
        "sync": lambda: sync.command(name),
        "--resume": lambda: find_earlier_run(
            name, None, typed=Typed(), here=load_job(Program(""), cwd=scratch), backend="slurm"
        ),
    }
    for what, act in acts.items():
        with pytest.raises(UsageError, match=r"is not yours: .* belongs to") as error:
            act()
        assert FOREIGN in error.value.message, what
    assert not (path_of(scratch, FOREIGN) / "cancelled").exists()


def test_a_foreign_run_can_be_read(scratch: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (path_of(scratch, FOREIGN) / "slurm.log").write_text("their output\n")
    assert show.command(FOREIGN) == 0
    assert logs.command(FOREIGN) == 0
    out = capfd.readouterr().out
    assert FOREIGN in out
    assert "their output" in out


def test_cancel_does_not_signal_a_process_that_a_stranger_names(scratch: Path) -> None:
    from paceline.contract.claims import describe_processes

    folder = path_of(scratch, FOREIGN)
    (folder / "job").unlink()
    with subprocess.Popen(["sleep", "60"]) as victim:
        try:
            start = folder / "job-starts" / "1"
            start.mkdir(parents=True)
            (start / "process").write_text(describe_processes([victim.pid]) + "\n")
            (folder / "claims").mkdir()
            (folder / "claims" / "1").symlink_to("../job-starts/1")
            with pytest.raises(UsageError, match="is not yours"):
                cancel.command([str(folder)])
            assert victim.poll() is None
        finally:
            victim.send_signal(signal.SIGKILL)


def test_export_does_not_execute_the_python_of_a_foreign_run(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executed: list[str] = []
    monkeypatch.setattr(export.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(export.os, "execvpe", lambda python, argv, environ: executed.append(python))
    monkeypatch.setattr(
        export, "read_launch_spec", lambda run: SimpleNamespace(python=run.path.name)
    )
    export._export_with_torch(path_of(scratch, OWN), [])
    with pytest.raises(EnvironmentProblem, match="this Python does not have"):
        export._export_with_torch(path_of(scratch, FOREIGN), [])
    assert executed == [OWN]


def test_sweeps_of_others(scratch: Path) -> None:
    folder = scratch / "p" / "e" / "digits"
    folder.mkdir()
    search = Search("digits", metric="loss", sampler="grid", file=str(scratch / "sweep.toml"))
    (folder / "sweep.json").write_text(search.to_json())
    (scratch / "sweep.toml").write_text("")
    assert sweep.find_file("last")[0] == scratch / "sweep.toml"
    give(folder, *folder.iterdir())
    for name in ("last", "digits", "dig"):
        with pytest.raises(UsageError, match="You have no sweep"):
            sweep.find_file(name)
    with pytest.raises(UsageError, match="Sweep digits is not yours"):
        sweep.cancel(str(folder))
    assert not (folder / "cancelled").exists()
    with pytest.raises(UsageError, match="Sweep digits is not yours"):
        SweepWriter(RunPath(scratch, "p", "e", "digits")).check_search(search)


def test_clean_keeps_the_secrets_of_others(scratch: Path) -> None:
    for run_id in (OWN, FOREIGN):
        (path_of(scratch, run_id) / "environment.sh").write_text(
            f"{SECRETS_MARK} TOKEN\nexport TOKEN=x\n"
        )
        (path_of(scratch, run_id) / "cancelled").write_text("1\n")
    found = {Path(each.path).parent.name for each in find_ended_secrets(scratch, lambda jobs: {})}
    assert found == {OWN}
