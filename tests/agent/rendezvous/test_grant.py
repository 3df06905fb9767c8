"""Permission to start: one decision about a run, whoever makes it, and it stays."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline.agent.rendezvous import grant as waits
from paceline.agent.rendezvous.grant import GrantWait
from paceline.agent.stop.received_signals import Requests
from paceline.contract.files import grant_file
from paceline.contract.files.grant_file import (
    EXPIRED,
    GRANTED,
    REFUSED,
    decide_grant,
    read_grant,
    read_winner,
)
from paceline.contract.jsonl import EventWriter
from paceline.contract.run_folder import RunFolder
from paceline.contract.verdict import STOPPED
from paceline.errors import UsageError
from paceline.launch.claims import require_permission
from paceline.watch.failure import resume_command


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    (folder.path / "job-starts" / "1").mkdir(parents=True)
    folder.events.mkdir()
    return folder


def make_wait(run: RunFolder, requests: Requests | None = None) -> GrantWait:
    events = EventWriter(run.events / "agent-0.jsonl")
    return GrantWait(run, run.job_start("1"), requests or Requests(), events, lambda _: None)


@pytest.mark.parametrize("links", [True, False])
def test_the_first_decision_counts(
    run: RunFolder, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not links:  # as on file systems without hard links

        def refuse(*_: object) -> None:
            raise PermissionError

        monkeypatch.setattr(grant_file.os, "link", refuse)
    assert read_grant(run) is None
    barrier = threading.Barrier(8)

    def decide(number: int) -> str:
        barrier.wait()
        return decide_grant(run, (GRANTED, REFUSED, EXPIRED)[number % 3])

    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(decide, range(8)))
    assert found == {read_grant(run)}
    assert decide_grant(run, GRANTED) == read_grant(run)
    assert not list(run.path.glob(".grant-*[0-9a-f]")) or not links


def test_a_decision_whose_maker_was_killed_is_finished(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system without hard links, between the lock and the file."""

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(grant_file.os, "link", refuse)
    (run.path / ".grant-lock").symlink_to("refused alps")
    assert read_grant(run) is None
    assert decide_grant(run, GRANTED) == REFUSED
    assert read_winner(run) == "alps"


@pytest.mark.parametrize(
    ("decision", "winner", "why"),
    [
        (REFUSED, "alps", "alps started first"),
        (REFUSED, "al\x1b[1mps\n", "al[1mps started first"),
        (REFUSED, "", "was interrupted before a cluster started"),
        (EXPIRED, "", "no permission to start came from your laptop"),
        (None, "", "it never got permission to start"),
    ],
)
def test_a_run_without_permission_is_not_resumed(
    run: RunFolder, decision: str | None, winner: str, why: str
) -> None:
    require_permission(run)
    run.launch_spec.write_text('{"grant_timeout": 600}')
    if decision:
        decide_grant(run, decision, winner)
    with pytest.raises(UsageError, match=re.escape(why)):
        require_permission(run)
    assert resume_command(run, job="1") == ""


def test_a_run_with_permission_is_resumed(run: RunFolder) -> None:
    run.launch_spec.write_text('{"grant_timeout": 600}')
    decide_grant(run, GRANTED)
    require_permission(run)
    assert "--resume" in resume_command(run, job="1")


def test_a_run_that_has_permission_keeps_it(run: RunFolder) -> None:
    decide_grant(run, GRANTED)
    assert make_wait(run).decide(timeout=0.0) == GRANTED
    assert make_wait(run).follow() == GRANTED
    assert not run.awaits_grant.exists()


def test_without_an_answer_there_is_no_permission(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "PAUSE", 0.01)
    assert make_wait(run).decide(timeout=0.05) == EXPIRED
    assert decide_grant(run, GRANTED) == EXPIRED  # too late
    assert make_wait(run).follow() == EXPIRED
    assert make_wait(run).decide(timeout=60) == EXPIRED


def test_permission_comes_while_it_waits(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "PAUSE", 0.01)
    with ThreadPoolExecutor(2) as pool:
        head, other = pool.submit(make_wait(run).decide, 60.0), pool.submit(make_wait(run).follow)
        while not run.awaits_grant.exists():
            pass
        decide_grant(run, GRANTED)
        assert (head.result(), other.result()) == (GRANTED, GRANTED)
    events = (run.events / "agent-0.jsonl").read_text()
    assert '"awaits_grant"' in events
    assert '"granted"' in events


def test_a_stop_ends_the_wait_without_a_decision(run: RunFolder) -> None:
    requests = Requests()
    requests.stop = 1
    assert make_wait(run, requests).decide(timeout=60) == STOPPED
    assert make_wait(run, requests).follow() == STOPPED
    run.job_start("1").stop.touch()
    assert make_wait(run).decide(timeout=60) == STOPPED
    run.job_start("1").verdict.touch()
    assert make_wait(run).follow() == STOPPED
    assert read_grant(run) is None
    assert not run.awaits_grant.exists()
