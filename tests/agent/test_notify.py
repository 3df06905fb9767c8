"""Notifications of an agent: to a real server, and to a real command."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.agent.attempt import Outcome
from paceline.agent.notify import NotDelivered, Notifier, post, run_command
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import RunFolder
from tests.agent.conftest import Launch, until
from tests.agent.webhook_server import Webhook, serve_webhook

DEFAULT = ["done", "failed", "requeued", "stalled"]
FAILS = "import os\nif os.environ['RANK'] == '1':\n    raise ValueError('a bad value')\n"


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with serve_webhook() as served:
        yield served


def settings(**changes: Any) -> dict[str, Any]:
    return {"command": "", "webhook": "HOOK", "on": DEFAULT, "stalled_after": 1800, **changes}


def payload(event: str = "done") -> dict[str, Any]:
    return {"text": f"x: {event}", "event": event, "run_id": "x", "status": event}


def all_text(folder: Path) -> str:
    """Everything in a run folder."""
    return "\n".join(
        path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file()
    )


def test_the_end_of_a_run(launch: Launch, webhook: Webhook) -> None:
    started = launch(
        "pass", nproc=1, notify=settings(), project="vision", env={"HOOK": webhook.address}
    )
    assert started.wait() == 0, started.err()
    (sent,) = webhook.received
    assert (sent["event"], sent["run_id"], sent["status"], sent["attempt"]) == (
        "done",
        "test",
        "done",
        1,
    )
    assert sent["text"] == "vision/test: done"
    assert "warning" not in started.err()
    assert "hush-1234" not in started.err() + started.out() + all_text(started.run.path)


def test_a_failure_is_told_once_with_its_reason(launch: Launch, webhook: Webhook) -> None:
    started = launch(FAILS, notify=settings(), env={"HOOK": webhook.address})
    assert started.wait() == 1
    (sent,) = webhook.received
    assert (sent["event"], sent["status"]) == ("failed", "failed")
    assert "rank 1 of 2" in sent["message"]
    assert "ValueError: a bad value" in sent["text"]


def test_trials_tell_nothing(launch: Launch, webhook: Webhook) -> None:
    started = launch(
        "pass", nproc=1, notify=settings(), trial={"number": 1}, env={"HOOK": webhook.address}
    )
    started.wait()
    assert webhook.received == []


def test_a_command_gets_the_notification(launch: Launch, tmp_path: Path) -> None:
    command = f'cd {tmp_path}; cat > got; echo "$PACELINE_NOTIFY_TEXT" > text; echo "$KEY" > key'
    started = launch(
        "pass",
        nproc=1,
        notify=settings(webhook="", command=command),
        env={"KEY": "from the environment"},
    )
    assert started.wait() == 0, started.err()
    assert json.loads((tmp_path / "got").read_text())["event"] == "done"
    assert (tmp_path / "text").read_text() == "test: done\n"
    assert (tmp_path / "key").read_text() == "from the environment\n"


def test_a_command_gets_the_text_in_one_line(tmp_path: Path) -> None:
    """It may become the subject of a mail."""
    text = "p/r: failed: rank 0 failed: ValueError: no\n  at train.py:3\r\nBcc: all@example.org\u2028x\0"
    payload = {"event": "failed", "text": text, "run_id": "r", "status": "failed"}
    run_command(
        f'cd {tmp_path}; cat > got; printf %s "$PACELINE_NOTIFY_TEXT" > text', payload, os.environ
    )
    said = "p/r: failed: rank 0 failed: ValueError: no at train.py:3 Bcc: all@example.org x"
    assert (tmp_path / "text").read_text() == said
    assert json.loads((tmp_path / "got").read_text())["text"] == text


def test_stalled_ranks_are_told_once(launch: Launch, webhook: Webhook) -> None:
    script = "import time, pathlib\nwhile not pathlib.Path('go').exists():\n    time.sleep(0.05)\n"
    started = launch(
        script, nproc=1, notify=settings(stalled_after=0.5), env={"HOOK": webhook.address}
    )
    until(lambda: webhook.received, "a notification")
    (started.run.path / "go").touch()
    assert started.wait() == 0, started.err()
    assert webhook.events() == ["stalled", "done"]
    assert webhook.received[0]["message"].startswith("no step for ")


def test_a_script_that_prints_is_not_stalled(launch: Launch, webhook: Webhook) -> None:
    script = "import time\nfor number in range(40):\n    print(number, flush=True)\n    time.sleep(0.1)\n"
    started = launch(
        script, nproc=1, notify=settings(stalled_after=3), env={"HOOK": webhook.address}
    )
    assert started.wait() == 0, started.err()
    assert webhook.events() == ["done"]


@pytest.mark.parametrize(
    "problem", ["not set", "nobody there", "no answer", "server error", "no address", "command"]
)
def test_what_cannot_be_sent_costs_one_warning(
    problem: str, launch: Launch, webhook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, env, silent = {}, {"HOOK": webhook.address}, None
    if problem == "not set":
        env = {}
    elif problem in ("nobody there", "no answer"):
        silent = socket.create_server(("127.0.0.1", 0))
        env = {"HOOK": f"http://127.0.0.1:{silent.getsockname()[1]}/hush-1234"}
        if problem == "nobody there":
            silent.close()
    elif problem == "server error":
        webhook.status = 500
    elif problem == "no address":
        env = {"HOOK": "file:///etc/passwd?hush-1234"}
    else:
        changes = {"webhook": "", "command": "exit 3"}
    script = "import time, pathlib\nwhile not pathlib.Path('go').exists():\n    time.sleep(0.05)\n"
    started = launch(script, nproc=1, notify=settings(stalled_after=0.5, **changes), env=env)
    until(lambda: "warning" in started.err(), "a warning")
    (started.run.path / "go").touch()
    assert started.wait() == 0
    if silent is not None:
        silent.close()
    assert started.err().count("warning") == 1
    assert "the run continues" in started.err()
    assert "hush-1234" not in started.err()
    assert started.verdicts() == ("done", "done")


def test_a_stop_by_hand_is_no_end_by_default(launch: Launch, webhook: Webhook) -> None:
    script = "import time, pathlib\npathlib.Path('up').write_text('x')\ntime.sleep(100)\n"
    for events, told in ((DEFAULT, []), (["stopped"], ["stopped"])):
        started = launch(script, notify=settings(on=events), nproc=1, env={"HOOK": webhook.address})
        started.await_file("up")
        started.process.send_signal(signal.SIGINT)
        started.wait()
        assert webhook.events() == told
        (started.run.path / "up").unlink()


def make_notifier(tmp_path: Path, webhook: Webhook, job_start: str, **changes: Any) -> Notifier:
    run = RunFolder(tmp_path / "run")
    folder = run.job_start(job_start)
    folder.path.mkdir(parents=True, exist_ok=True)
    run.claims.mkdir(exist_ok=True)
    if job_start not in map(os.readlink, run.claims.iterdir()):
        (run.claims / str(len(list(run.claims.iterdir())) + 1)).symlink_to(job_start)
    spec = LaunchSpec(run_id="x", program="train.py", args=[], notify=settings(**changes))
    return Notifier(run, spec, folder, environ={"HOOK": webhook.address}, warn=pytest.fail)


@pytest.mark.parametrize(
    ("verdict", "notified", "job_start", "told"),
    [
        ("stopped", "", "7-1", ["requeued"]),
        ("", "", "7-1", ["requeued"]),
        ("stopped", "requeued", "7-1", []),
        ("failed", "", "7-1", []),
        ("", "", "8-0", []),  # the user has submitted the run again
    ],
)
def test_the_next_job_start_tells_what_the_last_one_could_not(
    *,
    tmp_path: Path,
    webhook: Webhook,
    verdict: str,
    notified: str,
    job_start: str,
    told: list[str],
) -> None:
    """Slurm requeues a job that it preempts or whose node is lost: nobody there can know."""
    first = make_notifier(tmp_path, webhook, "7-0")
    first.begin()
    for path, text in ((first._job_start.verdict, verdict), (first._job_start.notified, notified)):
        if text:
            path.write_text(f"{text}\n")
    for _ in range(2):  # its agents may be started again
        second = make_notifier(tmp_path, webhook, job_start)
        second.begin()
        second.flush()
    assert webhook.events() == told


ENDS = {
    "requeue": True,
    "from_queue": True,
    "by_term": False,
    "cancelled": False,
    "limit": False,
    "asked": True,
}
# by status, if it is another word
EVENTS = {"queued": "requeued", "cancelled": "stopped", "timed out": "failed"}


@pytest.mark.parametrize(
    ("verdict", "changes", "status"),
    [
        ("stopped", {}, "queued"),  # before the time limit
        ("stopped", {"by_term": True}, ""),  # Slurm may requeue it, or somebody has cancelled it
        ("stopped", {"cancelled": True}, "cancelled"),
        ("stopped", {"requeue": False}, "stopped"),  # --no-requeue
        ("stopped", {"requeue": False, "asked": False}, ""),  # by hand: whoever did it knows
        ("stopped", {"requeue": False, "limit": True}, "stopped"),
        ("stopped", {"requeue": False, "limit": True, "asked": False}, "stopped"),
        ("stopped", {"by_term": True, "limit": True}, "timed out"),  # it was too slow for a requeue
        ("stopped", {"limit": True}, "queued"),
        ("stopped", {"cancelled": True, "limit": True}, "cancelled"),
        ("stopped", {"requeue": False, "from_queue": False}, "stopped"),  # a local run
        ("failed", {}, "queued"),  # for other nodes
        ("failed", {"requeue": False}, "failed"),
        ("done", {"requeue": False}, "done"),
    ],
)
def test_how_a_job_start_ends(
    verdict: str, changes: dict[str, bool], status: str, tmp_path: Path, webhook: Webhook
) -> None:
    """The status is the one that `paceline ps` shows."""
    case = {**ENDS, **changes}
    events = [*DEFAULT, "stopped"] if case["asked"] else DEFAULT
    notifier = make_notifier(tmp_path, webhook, "7-0", on=events)
    job_start, run = notifier._job_start, RunFolder(tmp_path / "run")
    left = 0 if case["limit"] else 3600
    notifier._environ = {
        **notifier._environ,
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_END_TIME": f"{time.time() + left:.0f}",
    }
    job_start.verdict.write_text(f"{verdict}\n")
    run.run_json.write_text('{"name": "resnet"}')
    for path, exists in ((job_start.requeue, case["requeue"]), (run.cancelled, case["cancelled"])):
        if exists:
            path.touch()
    for _ in range(2):
        notifier.attempt_over(
            Outcome(verdict),
            attempt=1,
            step=5,
            by_term=case["by_term"],
            from_queue=case["from_queue"],
        )
    notifier.flush()
    assert [sent["status"] for sent in webhook.received] == [status] * bool(status)
    for sent in webhook.received:
        assert sent["event"] == EVENTS.get(status, status)
        assert (sent["name"], sent["job"]) == ("resnet", "7")
        word = "requeued" if status == "queued" else status
        assert f" (resnet, job 7): {word} at step 5" in sent["text"]
        ended_by_limit = case["limit"] and status in ("stopped", "timed out")
        assert (sent["message"] == "time limit reached") == ended_by_limit
    assert job_start.notified.exists() == (changes != {"by_term": True})


def test_addresses_never_appear_in_errors() -> None:
    for address in (
        "ftp://hush",
        "http://127.0.0.1:1/hush",
        "http://[hush",
        "http://hush hush/",
        "http://127.0.0.1:hush/",
    ):
        with pytest.raises(NotDelivered) as why:
            post(address, payload())
        assert "hush" not in str(why.value)


def test_a_command_that_does_not_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("paceline.agent.notify.COMMAND_TIMEOUT", 0.5)
    with pytest.raises(NotDelivered, match="did not finish within"):
        run_command("sleep 1000 & sleep 1000", payload(), {"PATH": "/usr/bin:/bin"})
    run_command("true", {**payload(), "text": "a\0b"}, {"PATH": "/usr/bin:/bin"})
