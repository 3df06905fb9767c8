"""What pages may do to runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.spec import user_files
from paceline.ui.actions import allowed_verbs
from paceline.watch.overview import read_rows
from tests.ui.web.conftest import Served
from tests.ui.web.folders import make_run

RUN = "20260101-120000-aaaa"


@pytest.fixture
def acting(scratch: Path, serve: Callable[..., Any]) -> Iterator[Served]:
    with serve(scratch, allow_actions=True) as served:
        yield served


def post(served: Served, path: str, **headers: str) -> httpx.Response:
    return httpx.post(
        f"{served.base}{path}", cookies=served.cookies, headers=headers, trust_env=False, timeout=60
    )


def origin(served: Served) -> str:
    return f"http://127.0.0.1:{served.port}"


def test_a_server_that_reads_refuses_actions(served: Served, scratch: Path) -> None:
    folder = make_run(scratch)
    answer = post(served, f"api/runs/{RUN}/cancel", origin=origin(served))
    assert answer.status_code == 403
    assert "--allow-actions" in answer.json()["error"]
    assert not folder.cancelled.exists()
    assert (
        httpx.get(f"{served.base}api/runs/{RUN}", cookies=served.cookies, trust_env=False).json()[
            "actions"
        ]
        == []
    )


def test_actions_need_our_own_page(acting: Served, scratch: Path) -> None:
    folder = make_run(scratch)
    for headers in ({}, {"origin": "http://evil.example"}, {"origin": "null"}):
        assert post(acting, f"api/runs/{RUN}/stop", **headers).status_code == 403
    address = f"{acting.base}api/runs/{RUN}/stop"
    # no token
    assert (
        httpx.post(address, headers={"origin": origin(acting)}, trust_env=False).status_code == 403
    )
    assert httpx.get(address, cookies=acting.cookies, trust_env=False).status_code == 405
    assert not folder.cancelled.exists()


def test_actions_that_make_no_sense_are_explained(acting: Served, scratch: Path) -> None:
    folder = make_run(scratch)
    over = post(acting, f"api/runs/{RUN}/cancel", origin=origin(acting))
    assert (over.status_code, "has already ended" in over.json()["error"]) == (400, True)
    local = post(acting, f"api/runs/{RUN}/requeue", origin=origin(acting))
    assert (local.status_code, "not a Slurm job" in local.json()["error"]) == (400, True)
    assert post(acting, f"api/runs/{RUN}/delete", origin=origin(acting)).status_code == 400
    assert post(acting, "api/runs/nothing/cancel", origin=origin(acting)).status_code == 404
    assert not folder.cancelled.exists()


def test_runs_of_others_are_only_shown(
    acting: Served, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(scratch)
    monkeypatch.setattr(user_files, "_owner", lambda path: os.geteuid() + 1)
    assert (
        httpx.get(f"{acting.base}api/runs/{RUN}", cookies=acting.cookies, trust_env=False).json()[
            "actions"
        ]
        == []
    )
    monkeypatch.setattr("paceline.watch.records.OVER", set())
    refused = post(acting, f"api/runs/{RUN}/stop", origin=origin(acting))
    assert (refused.status_code, "not yours" in refused.json()["error"]) == (400, True)
    assert not folder.cancelled.exists()


@pytest.mark.parametrize(
    ("row", "verbs"),
    [
        ({"job": "7", "status": "running", "is_over": False}, ["stop", "requeue", "cancel"]),
        ({"job": "7", "status": "queued", "is_over": False}, ["cancel"]),  # it has nothing to save
        ({"job": "7", "status": "failed", "is_over": True}, ["requeue"]),
        ({"job": "7", "status": "done", "is_over": True}, []),
        ({"job": "7_1", "status": "failed", "is_over": True, "trial": 1}, []),
        ({"job": "", "status": "running", "is_over": False}, ["stop"]),
        ({"job": "", "status": "failed", "is_over": True}, []),
    ],
)
def test_what_can_be_done_now(row: dict[str, Any], verbs: list[str], scratch: Path) -> None:
    (run,) = read_rows([make_run(scratch)])
    assert allowed_verbs(replace(run, **row)) == verbs


@pytest.mark.usefixtures("without_torch")
def test_a_local_run_saves_and_stops(acting: Served, scratch: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(1000)\n")
    command = [sys.executable, "-m", "paceline", "run", "--cpu", "--nproc", "1", "train.py"]
    environment = {**os.environ, "PACELINE_SCRATCH": str(scratch)}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as run:
        try:
            assert run.stdout is not None
            next(line for line in run.stdout if b"here" in line)
            (path,) = scratch.glob("*/*/*/run.json")
            address = f"{acting.base}api/runs/{path.parent.name}"
            details = httpx.get(address, cookies=acting.cookies, trust_env=False, timeout=60).json()
            assert (details["overview"]["status"], details["actions"]) == ("running", ["stop"])
            answer = post(acting, f"api/runs/{path.parent.name}/stop", origin=origin(acting))
            assert answer.status_code == 200, answer.text
            assert "saves and stops" in answer.json()["message"]
            run.wait(60)
        finally:
            if run.poll() is None:
                run.send_signal(signal.SIGKILL)
    details = httpx.get(address, cookies=acting.cookies, trust_env=False, timeout=60).json()
    assert details["overview"]["status"] == "cancelled"
    assert details["actions"] == []
