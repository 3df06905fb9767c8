"""Events as JSON lines."""

from __future__ import annotations

import json
import os
import resource
import signal
from pathlib import Path

import pytest

from paceline.contract.foreign_records import EventWriter, LineWriter


def test_an_unwritable_folder_loses_only_the_events(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = EventWriter(tmp_path / "events" / "agent-0.jsonl")
    events.write("started", host="é", path=tmp_path)
    events.write("done")
    lines = (tmp_path / "events" / "agent-0.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert '"event": "started"' in lines[0]
    events.write("files", names=[os.fsdecode(b"caf\xe9.pt")])  # a name that is not text
    assert json.loads((tmp_path / "events" / "agent-0.jsonl").read_text().splitlines()[-1])[
        "names"
    ] == ["caf\udce9.pt"]
    blocked = EventWriter(Path("/dev/null/events/agent-0.jsonl"))
    blocked.write("started")
    blocked.write("done")
    assert capsys.readouterr().err.count("could not write to") == 1


def test_a_full_disk_loses_lines_and_no_descriptors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A limit on the size of files acts like a full disk: short writes first, errors then."""
    path = tmp_path / "metrics.jsonl"
    writer = LineWriter(path)
    writer.append('{"step": 1}\n')
    before = len(os.listdir("/proc/self/fd"))
    limits, handler = (
        resource.getrlimit(resource.RLIMIT_FSIZE),
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, limits[1]))
    try:
        for step in range(2, 50):
            writer.append(f'{{"step": {step}}}\n')
        assert len(os.listdir("/proc/self/fd")) <= before
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert capsys.readouterr().err.count("could not write to") == 1
    writer.append('{"step": 50}\n')
    writer.close()
    lines = path.read_text().splitlines()
    assert lines[0] == '{"step": 1}'
    assert lines[-1] == '{"step": 50}'
