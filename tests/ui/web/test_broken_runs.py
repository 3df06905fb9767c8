"""Run folders that nobody would write on purpose: every question gets an answer."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.ui.web.conftest import Served, serve_here
from tests.ui.web.folders import make_run

DEEP = "[" * 100_000
RECORDS: list[Any] = [
    {},
    [],
    None,
    "text",
    5,
    {"nodes": "many", "nproc": -3, "created": "yesterday", "spec": [], "code": 7, "name": {}},
    {
        "created": 1e300,
        "nodes": 10**400,
        "command": [1, None, {}],
        "spec": {"resume": 3},
        "name": "\x1b[2J\ud800",
    },
    {
        "nodes": 0,
        "nproc": 0,
        "experiment": ["<b>"],
        "run_id": "../../etc/passwd",
        "earlier": "x",
        "host": None,
    },
]
LINES = [
    "",
    "\n\n",
    "{",
    '{"step": 1',
    "null\n[]\n5\n",
    '{"step": "x", "time": null, "loss": 1}\n',
    '{"loss": 1e999}\n',
    '{"step": 1, "time": 1, "loss": NaN, "a": Infinity, "<script>": 3, "\\ud800": 4, "": 5}\n',
    '{"step": -5, "time": -1e300, "loss": 1e308}\n{"step": 99999999999999999999, "time": 1, "loss": 1}\n',
    f"{DEEP}\n",
    "\x00" * 5000,
]


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scratch folder with a run for each kind of damage."""
    scratch = tmp_path_factory.mktemp("broken")
    for number, record in enumerate(RECORDS):
        make_run(scratch, f"20260101-120000-r{number:03}").run_json.write_text(json.dumps(record))
    for number, text in enumerate(LINES):
        folder = make_run(scratch, f"20260101-120000-l{number:03}", steps=0)
        folder.metrics.write_text(text)
        folder.config.write_text(text)
        folder.events.mkdir()
        (folder.events / "rank-0.jsonl").write_text(text)
        folder.attempt(1).verdict.write_text(text)
        folder.attempt(1).log(0).write_bytes(
            b"\xff\xfe\x1b]0;title\x07" + text.encode(errors="replace")
        )
    folder = make_run(scratch, "20260101-120000-kind")
    folder.metrics.unlink()
    os.mkfifo(folder.metrics)  # whoever opens it for reading waits for ever
    folder.config.mkdir()
    folder.events.write_text("")
    (folder.path / "claims").write_text("")
    (scratch / "digits" / "first" / "sweep").mkdir()
    (scratch / "digits" / "first" / "sweep" / "sweep.json").write_text("[]")
    return scratch


def test_every_question_gets_an_answer(broken: Path) -> None:
    with serve_here(broken) as served:
        ask = httpx.Client(
            base_url=served.base, cookies=served.cookies, trust_env=False, timeout=60
        )
        rows = ask.get("api/runs").json()["runs"]
        assert len(rows) == len(RECORDS) + len(LINES) + 1
        for row in rows:
            run = Path(row["path"]).name
            for path in ("", "/curves"):
                answer = ask.get(f"api/runs/{run}{path}")
                assert answer.status_code == 200, (run, path, answer.text)
                json.loads(answer.text, parse_constant=pytest.fail)
        for path in ("api/sweeps/sweep", "api/cluster"):
            assert ask.get(path).status_code in (200, 404)


def test_a_failure_of_ours_is_told_and_not_silent(
    capfd: pytest.CaptureFixture[str],
    served: Served,
    scratch: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_run(scratch)

    def fail(_: Any) -> None:
        raise TypeError("a mistake \x1b[2J")

    monkeypatch.setattr("paceline.ui.web.app.read_details", fail)
    answer = httpx.get(
        f"{served.base}api/runs/20260101-120000-aaaa", cookies=served.cookies, trust_env=False
    )
    assert answer.status_code == 500
    assert "terminal" in answer.json()["error"]
    said, deadline = "", time.monotonic() + 30
    while "a mistake" not in said:  # it is written after the answer
        assert time.monotonic() < deadline
        said += capfd.readouterr().err
