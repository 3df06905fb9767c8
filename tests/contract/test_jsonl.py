"""Events as JSON lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.contract.jsonl import EventWriter


def test_an_unwritable_folder_loses_only_the_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = EventWriter(tmp_path / "events" / "agent-0.jsonl")
    events.write("started", host="é", path=tmp_path)
    events.write("done")
    lines = (tmp_path / "events" / "agent-0.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert '"event": "started"' in lines[0]
    blocked = EventWriter(Path("/dev/null/events/agent-0.jsonl"))
    blocked.write("started")
    blocked.write("done")
    assert capsys.readouterr().err.count("could not write to") == 1
