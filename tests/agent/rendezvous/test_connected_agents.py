"""Agents join over real sockets, each in a process of its own."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from paceline.agent.launcher_placement import find_placement
from paceline.agent.rendezvous import connected_agents, server_and_client
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import JobStartFolder, RunFolder
from paceline.errors import LaunchError

ROOT = Path(__file__).parents[3]
WITHIN = 60.0  # seconds: far more than anything takes here


class Member:
    """An agent in another process."""

    def __init__(self, index: int, count: int, *limits: float, **environ: str) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.agent.rendezvous.member",
                str(index),
                str(count),
                *map(str, limits),
            ],
            cwd=ROOT,
            env={**os.environ, **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self.unread = b""

    def started(self) -> Member:
        """Wait until its signal handler is installed."""
        assert self.read() == {"answer": "started"}
        return self

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        while b"\n" not in self.unread:
            ready, _, _ = select.select([self.process.stdout], [], [], WITHIN)
            assert ready, "no answer"
            piece = os.read(self.process.stdout.fileno(), 1 << 16)
            assert piece, "it ended without an answer"
            self.unread += piece
        line, _, self.unread = self.unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")

    def ask(self, line: str) -> dict[str, Any]:
        self.send(line)
        return self.read()

    def await_message(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Poll until a wanted message arrives, and skip the others."""
        deadline = time.monotonic() + WITHIN
        while time.monotonic() < deadline:
            for message in self.ask("poll")["messages"]:
                if wanted(message):
                    found: dict[str, Any] = message
                    return found
            time.sleep(0.02)
        raise AssertionError("the message never arrived")

    def __enter__(self) -> Member:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


Start = Callable[..., Member]


@pytest.fixture
def job_start(environ: dict[str, str]) -> JobStartFolder:
    return RunFolder(Path(environ["PACELINE_RUN"])).job_start(environ["PACELINE_JOB_START"])


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """The variables of a run whose head agent chooses its port and writes it to a file."""
    return {
        "PACELINE_RUN": str(tmp_path),
        "PACELINE_JOB_START": "job_start",
        "PACELINE_TOKEN": "s3cret",
    }


@pytest.fixture
def start(environ: dict[str, str]) -> Iterator[Start]:
    with ExitStack() as stack:

        def start_one(index: int, count: int, *limits: float, **more: str) -> Member:
            return stack.enter_context(
                Member(index, count, *limits, **{**environ, **more})
            ).started()

        yield start_one


def is_lost(index: int) -> Callable[[dict[str, Any]], bool]:
    return lambda message: message.get("kind") == "lost" and message.get("index") == index


def test_a_single_agent_has_no_socket_but_a_port() -> None:
    placement = find_placement(LaunchSpec(run_id="r", program="x", args=[]), {})
    alone = connected_agents.join(placement, {}, {"host": "a"})
    assert alone.roster == [{"host": "a"}]
    assert alone.fileno() is None
    assert alone.poll() == []
    master = alone.prepare(1)
    assert master.address == "127.0.0.1"
    with socket.socket() as thief:
        with pytest.raises(OSError):
            thief.bind(("", master.port))
    from torch.distributed import TCPStore

    # while it is still reserved
    store = TCPStore(master.address, master.port, 1, True, timedelta(seconds=30))
    store.set("key", "value")
    assert store.get("key") == b"value"
    alone.close()


def test_three_agents_join_in_any_order_and_send_messages(start: Start) -> None:
    late_first = [start(2, 3), start(1, 3), start(0, 3)]
    joined = {index: member.read() for index, member in zip((2, 1, 0), late_first, strict=True)}
    third, second, head = late_first
    for answer in joined.values():
        assert [facts["host"] for facts in answer["roster"]] == ["host0", "host1", "host2"]
        assert answer["head_address"] == "127.0.0.1"  # all on one machine
    # The collective: members may be early, and no message is lost meanwhile.
    for attempt in (1, 2):
        third.send(f"prepare {attempt}")
        second.send(f"send {json.dumps({'kind': 'early', 'attempt': attempt})}")
        second.send(f"prepare {attempt}")
        head.await_message(
            lambda message, n=attempt: (message["kind"], message["attempt"]) == ("early", n)
        )
        answers = [head.ask(f"prepare {attempt}"), second.read(), third.read()]
        assert answers[0]["answer"] == "prepared"
        assert answers[0] == answers[1] == answers[2]
    # Members talk to the head agent; it talks to all, or to one.
    second.send('send {"kind": "news", "text": "é\\n"}')
    assert head.await_message(lambda m: m["kind"] == "news")["text"] == "é\n"
    head.send('send {"kind": "private", "recipient": 2}')
    head.send('send {"kind": "end"}')
    assert third.await_message(lambda m: m["kind"] == "private")["from"] == 0
    assert second.await_message(lambda m: m["kind"] in ("end", "private"))["kind"] == "end"
    # The last message arrives, and a goodbye is not a loss.
    third.send('send {"kind": "last words"}')
    third.ask("close")
    seen: list[str] = []
    head.await_message(lambda m: seen.append(m["kind"]) or m["kind"] == "left")  # type: ignore[func-returns-value]
    assert seen[-2:] == ["last words", "left"]
    assert "lost" not in seen


def test_all_agents_notice_a_killed_agent(start: Start) -> None:
    members = [start(index, 3) for index in range(3)]
    for member in members:
        member.read()
    members[2].process.kill()
    for remaining in members[:2]:
        assert remaining.await_message(is_lost(2))["reason"]
    members[1].send("prepare 2")
    failed = members[0].ask("prepare 2")
    assert failed["hosts"] == ["host2"]
    assert "Lost before attempt 2 began: node host2 (agent 3 of 3)." in failed["message"]


def test_a_lost_head_ends_the_wait_of_a_member(start: Start) -> None:
    head, member = start(0, 2), start(1, 2)
    head.read()
    member.read()
    member.send("prepare 1")
    head.process.kill()
    failed = member.read()
    assert "Lost before attempt 1 began: node host0 (agent 1 of 2)." in failed["message"]


def test_a_silent_agent_is_lost(start: Start) -> None:
    """It neither sends nor closes its connection, as after a pulled cable: only the silence shows it."""
    head, member = start(0, 2, 5.0), start(1, 2, 5.0)
    head.read()
    member.read()
    member.process.send_signal(signal.SIGSTOP)
    assert "silent" in head.await_message(is_lost(1))["reason"]
    member.process.send_signal(signal.SIGCONT)
    assert member.await_message(is_lost(0))  # it wakes up disconnected


def test_a_busy_agent_is_not_lost(start: Start) -> None:
    """Its main thread is silent for longer than the timeout, but its pings are not."""
    head, member = start(0, 2, 5.0), start(1, 2, 5.0)
    head.read()
    member.read()
    time.sleep(7)
    member.send('send {"kind": "here"}')
    seen: list[str] = []
    head.await_message(lambda m: seen.append(m["kind"]) or m["kind"] == "here")  # type: ignore[func-returns-value]
    assert seen == ["here"]


def test_a_connection_without_the_token_is_rejected(
    start: Start, job_start: JobStartFolder
) -> None:
    head = start(0, 2)
    deadline = time.monotonic() + WITHIN
    while not job_start.head.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    host, _, port = job_start.head.read_text().strip().rpartition(":")
    # A scanner that sends rubbish, one that disconnects, and an agent of another run.
    with socket.create_connection((host, int(port))) as rubbish:
        rubbish.sendall(b"GET / HTTP/1.1\r\n\r\n")
    socket.create_connection((host, int(port))).close()
    away = {
        "PACELINE_JOB_START": "another",
        "PACELINE_RENDEZVOUS": job_start.head.read_text().strip(),
    }
    its_job_start = job_start.path.parent / "another"
    its_job_start.mkdir()
    (its_job_start / "verdict").write_text("failed\n")  # its own run is over, so it does not wait
    intruder = start(1, 2, 60.0, 3.0, PACELINE_TOKEN="guess", **away)
    failed = intruder.read()
    assert failed["answer"] == "failed"
    assert "could not join the head agent" in failed["message"]
    assert "s3cret" not in failed["message"]
    assert "guess" not in failed["message"]
    real = start(1, 2)
    assert real.read()["answer"] == head.read()["answer"] == "joined"


def test_an_announced_port_that_is_taken(start: Start) -> None:
    with socket.create_server(("", 0)) as thief:
        announced = f"127.0.0.1:{thief.getsockname()[1]}"
        head, member = (start(index, 2, PACELINE_RENDEZVOUS=announced) for index in (0, 1))
        assert head.read()["answer"] == member.read()["answer"] == "joined"


def test_missing_agents_are_named(start: Start, job_start: JobStartFolder) -> None:
    """The head agent names the missing node as the scheduler does, and tells the agents that joined."""
    head = start(0, 3, 60.0, 4.0, SLURM_JOB_NODELIST="a,b,c")
    joined = start(1, 3, 60.0, 60.0)
    failed = head.read()
    assert "Agents did not join within 4 s: node c (agent 3 of 3)." in failed["message"]
    assert failed["hosts"] == ["c"]
    job_start.verdict.write_text("failed\n")  # as the head agent does; the others wait for it
    assert "Agents did not join within 4 s: node c (agent 3 of 3)." in joined.read()["message"]


def test_a_node_that_cannot_resolve_the_head_node_is_named_by_both(
    start: Start, job_start: JobStartFolder
) -> None:
    """It does not fall back to itself, and the head agent does not wait: it finds the error in the folder."""
    member = start(
        1, 2, 60.0, 4.0, PACELINE_RENDEZVOUS="no-such-host.invalid:1234", SLURMD_NODENAME="b"
    )
    head = start(0, 2, PACELINE_RENDEZVOUS="no-such-host.invalid:0")
    failed = head.read()
    assert (
        "on node b cannot resolve the head node's name 'no-such-host.invalid'" in failed["message"]
    )
    assert failed["hosts"] == ["b"]
    job_start.verdict.write_text("failed\n")  # as the head agent does; the member waits for it
    assert "cannot resolve" in member.read()["message"]


def test_waiting_can_be_interrupted(start: Start) -> None:
    """At every point: a waiting head agent, an accepted member, one that finds no head agent, and a collective."""
    head, member = start(0, 3), start(1, 3)
    stray = start(1, 2, PACELINE_JOB_START="nowhere", PACELINE_RENDEZVOUS="127.0.0.1:1")
    for each in (stray, member, head):
        each.process.terminate()
        assert "Interrupted while waiting" in each.read()["message"]
    head, member = (start(index, 2, PACELINE_JOB_START="another") for index in (0, 1))
    assert head.read()["answer"] == member.read()["answer"] == "joined"
    member.send("prepare 1")
    member.process.terminate()
    assert "Interrupted while preparing" in member.read()["message"]


def test_several_agents_need_a_token(environ: dict[str, str]) -> None:
    del environ["PACELINE_TOKEN"]
    placement = find_placement(
        LaunchSpec(run_id="r", program="x", args=[], nodes=2), {"PACELINE_AGENT": "1/2"}
    )
    with pytest.raises(LaunchError, match="PACELINE_TOKEN"):
        connected_agents.join(placement, environ, {})


def test_a_member_that_cannot_connect_says_what_is_in_the_way(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], job_start: JobStartFolder
) -> None:
    monkeypatch.setattr(server_and_client, "REPORT_AFTER", 0.0)
    job_start.path.mkdir(parents=True)
    job_start.verdict.write_text("failed\n")  # the member waits for it
    launch_spec = LaunchSpec(run_id="r", program="x", args=[], nodes=2)
    reports: list[dict[str, Any]] = []
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        head = f"127.0.0.1:{taken.getsockname()[1]}"
        environ |= {"PACELINE_AGENT": "1/2", "PACELINE_RENDEZVOUS": head}
        client = server_and_client.RendezvousClient(
            find_placement(launch_spec, environ),
            environ,
            token="t",
            silence_timeout=60.0,
            interrupted=lambda: False,
            report=lambda **fields: reports.append(fields),
        )
        with pytest.raises(LaunchError, match="could not join"):
            client.join({}, 0.5)
    assert [(each["address"], each["resolved"], each["answers"]) for each in reports] == [
        (head, ["127.0.0.1"], True)
    ]
    assert "refused" in reports[0]["error"]
    client.environ = {}
    with pytest.raises(LaunchError, match=r"the head agent within 0.5 s: its address is unknown"):
        client.join({}, 0.5)
    assert len(reports) == 1, "there is no way to describe"
