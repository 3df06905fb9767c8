"""Agents meet over real sockets, each in a process of its own."""

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

from paceline.agent.placement import find_place
from paceline.agent.rendezvous import rendezvous
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import JobStartFolder, RunFolder
from paceline.errors import LaunchError

ROOT = Path(__file__).parents[3]
WITHIN = 60.0  # seconds: far more than anything takes here


class Member:
    """A agent's part, played by another process."""

    def __init__(self, index: int, count: int, *limits: float, **environ: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.agent.rendezvous.member", str(index), str(count), *map(str, limits)],
            cwd=ROOT, env={**os.environ, **environ}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
        )  # fmt: skip
        self.unread = b""

    def started(self) -> Member:
        """Once its signal handler stands."""
        assert self.hear() == {"answer": "started"}
        return self

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        while b"\n" not in self.unread:
            ready, _, _ = select.select([self.process.stdout], [], [], WITHIN)
            assert ready, "it said nothing"
            piece = os.read(self.process.stdout.fileno(), 1 << 16)
            assert piece, "it ended without a word"
            self.unread += piece
        line, _, self.unread = self.unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")

    def ask(self, line: str) -> dict[str, Any]:
        self.tell(line)
        return self.hear()

    def await_message(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Poll until a message comes that is wanted; others are passed over."""
        deadline = time.monotonic() + WITHIN
        while time.monotonic() < deadline:
            for message in self.ask("poll")["messages"]:
                if wanted(message):
                    found: dict[str, Any] = message
                    return found
            time.sleep(0.02)
        raise AssertionError("the message never came")

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
    """The variables of a run whose head chooses its port itself and tells it by file."""
    return {"PACELINE_RUN": str(tmp_path), "PACELINE_JOB_START": "job_start", "PACELINE_TOKEN": "s3cret"}


@pytest.fixture
def start(environ: dict[str, str]) -> Iterator[Start]:
    with ExitStack() as stack:

        def start_one(index: int, count: int, *limits: float, **more: str) -> Member:
            return stack.enter_context(Member(index, count, *limits, **{**environ, **more})).started()

        yield start_one


def is_lost(index: int) -> Callable[[dict[str, Any]], bool]:
    return lambda message: message.get("kind") == "lost" and message.get("index") == index


def test_alone_there_is_no_socket_but_a_port() -> None:
    place = find_place(LaunchSpec(run_id="r", program="x", args=[]), {})
    alone = rendezvous.join(place, {}, {"host": "a"})
    assert alone.roster == [{"host": "a"}]
    assert alone.fileno() is None
    assert alone.poll() == []
    master = alone.prepare(1)
    assert master.addr == "127.0.0.1"
    with socket.socket() as thief:
        with pytest.raises(OSError):
            thief.bind(("", master.port))
    from torch.distributed import TCPStore

    store = TCPStore(master.addr, master.port, 1, True, timedelta(seconds=30))  # while it is still reserved
    store.set("key", "value")
    assert store.get("key") == b"value"
    alone.close()


def test_three_meet_in_any_order_and_talk(start: Start) -> None:
    late_first = [start(2, 3), start(1, 3), start(0, 3)]
    joined = {index: member.hear() for index, member in zip((2, 1, 0), late_first, strict=True)}
    third, second, head = late_first
    for answer in joined.values():
        assert [facts["host"] for facts in answer["roster"]] == ["host0", "host1", "host2"]
        assert answer["addr"] == "127.0.0.1"  # all on one machine
    # The collective: members may be early, and messages meanwhile are not lost.
    for attempt in (1, 2):
        third.tell(f"prepare {attempt}")
        second.tell(f"say {json.dumps({'kind': 'early', 'attempt': attempt})}")
        second.tell(f"prepare {attempt}")
        head.await_message(lambda message, n=attempt: (message["kind"], message["attempt"]) == ("early", n))
        told = [head.ask(f"prepare {attempt}"), second.hear(), third.hear()]
        assert told[0]["answer"] == "prepared"
        assert told[0] == told[1] == told[2]
    # To all, and to one.
    second.tell('say {"kind": "news", "text": "é\\n"}')
    assert head.await_message(lambda m: m["kind"] == "news")["text"] == "é\n"
    assert third.await_message(lambda m: m["kind"] == "news")["from"] == 1
    second.tell('say {"kind": "private", "whom": 2}')
    head.tell('say {"kind": "end"}')
    assert third.await_message(lambda m: m["kind"] == "private")["from"] == 1
    assert second.await_message(lambda m: m["kind"] in ("end", "private"))["kind"] == "end"
    # What is said last is heard, and a goodbye is no loss.
    third.tell('say {"kind": "last words"}')
    third.ask("close")
    seen: list[str] = []
    head.await_message(lambda m: seen.append(m["kind"]) or m["kind"] == "left")  # type: ignore[func-returns-value]
    assert seen[-2:] == ["last words", "left"]
    assert "lost" not in seen


def test_a_killed_launcher_is_lost_to_all(start: Start) -> None:
    members = [start(index, 3) for index in range(3)]
    for member in members:
        member.hear()
    members[2].process.kill()
    for survivor in members[:2]:
        assert survivor.await_message(is_lost(2))["why"]
    members[1].tell("prepare 2")
    refused = members[0].ask("prepare 2")
    assert refused["hosts"] == ["host2"]
    assert "node host2 (agent 3 of 3) was lost" in refused["message"]


def test_a_lost_head_ends_the_wait_of_a_member(start: Start) -> None:
    head, member = start(0, 2), start(1, 2)
    head.hear()
    member.hear()
    member.tell("prepare 1")
    head.process.kill()
    refused = member.hear()
    assert "node host0 (agent 1 of 2) was lost before attempt 1" in refused["message"]


def test_a_launcher_that_is_cut_off_is_lost(start: Start) -> None:
    """Nothing comes from it and nothing is refused, as when a cable is pulled: only silence tells."""
    head, member = start(0, 2, 5.0), start(1, 2, 5.0)
    head.hear()
    member.hear()
    member.process.send_signal(signal.SIGSTOP)
    assert "silent" in head.await_message(is_lost(1))["why"]
    member.process.send_signal(signal.SIGCONT)
    assert member.await_message(is_lost(0))  # it wakes to find that it was given up


def test_a_busy_launcher_is_not_lost(start: Start) -> None:
    """Its main thread answers nothing for longer than the silence that is allowed; its pings do."""
    head, member = start(0, 2, 5.0), start(1, 2, 5.0)
    head.hear()
    member.hear()
    time.sleep(7)
    member.tell('say {"kind": "here"}')
    seen: list[str] = []
    head.await_message(lambda m: seen.append(m["kind"]) or m["kind"] == "here")  # type: ignore[func-returns-value]
    assert seen == ["here"]


def test_who_does_not_know_the_token_is_turned_away(start: Start, job_start: JobStartFolder) -> None:
    head = start(0, 2)
    deadline = time.monotonic() + WITHIN
    while not job_start.head.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    host, _, port = job_start.head.read_text().strip().rpartition(":")
    # A scanner that sends rubbish, one that goes away, and a agent of another run.
    with socket.create_connection((host, int(port))) as rubbish:
        rubbish.sendall(b"GET / HTTP/1.1\r\n\r\n")
    socket.create_connection((host, int(port))).close()
    away = {"PACELINE_JOB_START": "another", "PACELINE_RENDEZVOUS": job_start.head.read_text().strip()}
    its_leg = job_start.path.parent / "another"
    its_leg.mkdir()
    (its_leg / "verdict").write_text("failed\n")  # its own run is over, so it does not wait
    stranger = start(1, 2, 60.0, 3.0, PACELINE_TOKEN="guess", **away)
    refused = stranger.hear()
    assert refused["answer"] == "refused"
    assert "could not join" in refused["message"]
    assert "s3cret" not in refused["message"]
    assert "guess" not in refused["message"]
    real = start(1, 2)
    assert real.hear()["answer"] == head.hear()["answer"] == "joined"


def test_an_announced_port_that_somebody_took(start: Start) -> None:
    with socket.create_server(("", 0)) as thief:
        announced = f"127.0.0.1:{thief.getsockname()[1]}"
        head, member = (start(index, 2, PACELINE_RENDEZVOUS=announced) for index in (0, 1))
        assert head.hear()["answer"] == member.hear()["answer"] == "joined"


def test_who_never_joined_is_named(start: Start, job_start: JobStartFolder) -> None:
    """The head names the missing node as the scheduler calls it; those who came are told the same."""
    head = start(0, 3, 60.0, 4.0, SLURM_JOB_NODELIST="a,b,c")
    came = start(1, 3, 60.0, 60.0)
    told = head.hear()
    assert "node c (agent 3 of 3) never joined" in told["message"]
    assert told["hosts"] == ["c"]
    job_start.verdict.write_text("failed\n")  # as the head's agent does; the others wait for it
    assert "node c (agent 3 of 3) never joined" in came.hear()["message"]


def test_a_node_that_cannot_resolve_the_head_is_named_by_both(
    start: Start, job_start: JobStartFolder
) -> None:
    """No fallback to this machine, and the head need not wait: it is told through the folder."""
    member = start(1, 2, 60.0, 4.0, PACELINE_RENDEZVOUS="no-such-host.invalid:1234", SLURMD_NODENAME="b")
    head = start(0, 2, PACELINE_RENDEZVOUS="no-such-host.invalid:0")
    told = head.hear()
    assert "on node b cannot resolve the head's host name 'no-such-host.invalid'" in told["message"]
    assert told["hosts"] == ["b"]
    job_start.verdict.write_text("failed\n")  # as the head's agent does: the member waits for it, then ends
    assert "cannot resolve" in member.hear()["message"]


def test_waiting_can_be_interrupted(start: Start) -> None:
    """At every point: a head that waits, a member that was let in, one that finds nobody, a collective."""
    head, member = start(0, 3), start(1, 3)
    stray = start(1, 2, PACELINE_JOB_START="nowhere", PACELINE_RENDEZVOUS="127.0.0.1:1")
    for each in (stray, member, head):
        each.process.terminate()
        assert "interrupted while waiting" in each.hear()["message"]
    head, member = (start(index, 2, PACELINE_JOB_START="another") for index in (0, 1))
    assert head.hear()["answer"] == member.hear()["answer"] == "joined"
    member.tell("prepare 1")
    member.process.terminate()
    assert "interrupted while preparing" in member.hear()["message"]


def test_no_token_no_meeting(environ: dict[str, str]) -> None:
    del environ["PACELINE_TOKEN"]
    place = find_place(LaunchSpec(run_id="r", program="x", args=[], nodes=2), {"PACELINE_AGENT": "1/2"})
    with pytest.raises(LaunchError, match="PACELINE_TOKEN"):
        rendezvous.join(place, environ, {})
