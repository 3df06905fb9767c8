"""`paceline ui` as a person uses it: a process, a link, Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

pytest.importorskip("uvicorn")
Completed = subprocess.CompletedProcess[str]


@contextmanager
def started(
    scratch: Path, *options: str, **variables: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start the command; yield it with its link. It is ended with Ctrl-C."""
    command = [sys.executable, "-m", "paceline", "ui", *options]
    environment = {**os.environ, "PACELINE_SCRATCH": str(scratch), **variables}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=environment, cwd=scratch.parent, **streams) as process:
        try:
            assert process.stdout is not None
            text = ""
            while "Ctrl-C" not in text:
                line = process.stdout.readline()
                assert line, text
                text += line
            found = re.search(r"http://127\.0\.0\.1:\d+/\S+", text)
            assert found
            process.said = text  # type: ignore[attr-defined]
            yield process, found[0]
            if process.poll() is None:
                # it listens to signals once it answers
                httpx.get(found[0], trust_env=False, timeout=60)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_it_serves_until_ctrl_c_also_with_an_open_page(scratch: Path) -> None:
    with started(scratch) as (process, link):
        token = link.partition("token=")[2]
        assert len(token) >= 43  # 256 bits
        command = " ".join(psutil.Process(process.pid).cmdline())
        assert token not in command + str(psutil.Process(process.pid).environ())
        connections = psutil.Process(process.pid).net_connections()
        assert {each.laddr.ip for each in connections if each.status == "LISTEN"} == {"127.0.0.1"}
        with httpx.Client(trust_env=False, timeout=60) as client:
            assert client.get(link).status_code == 200
            base = link.partition("?")[0]
            assert client.get(f"{base}api/runs").json()["runs"] == []
            with client.stream("GET", f"{base}api/events") as answer:
                lines = answer.iter_lines()
                next(lines)
                process.send_signal(signal.SIGINT)
                assert process.wait(30) == 0
                list(lines)  # the stream ends; it is not cut off
        assert process.stdout is not None
        assert "Traceback" not in process.stdout.read()


def test_the_tunnel_is_printed_over_ssh_or_if_asked_for(scratch: Path) -> None:
    with started(scratch, "--tunnel") as (process, link):
        port = re.search(r":(\d+)/", link)
        assert port
        assert re.search(rf"ssh -N -L {port[1]}:127.0.0.1:{port[1]} \S+@\S+", process.said)  # type: ignore[attr-defined]


def test_a_port_in_use_is_named(paceline: Callable[..., Completed]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = paceline("ui", "--port", str(port))
    assert done.returncode == 1
    assert f"port {port}" in done.stderr
    assert "token" not in done.stdout


def test_missing_packages_are_named(paceline: Callable[..., Completed], tmp_path: Path) -> None:
    (tmp_path / "lacking").mkdir()
    (tmp_path / "lacking" / "sitecustomize.py").write_text(
        "import importlib.util as util\nfind = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'uvicorn' else find(name, *rest)\n"
    )
    done = paceline("ui", PYTHONPATH=str(tmp_path / "lacking"))
    assert done.returncode == 1
    assert "needs uvicorn" in done.stderr
    assert "pip install 'paceline[ui]'" in done.stderr
