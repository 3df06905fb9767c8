"""Processes of ssh: how they are run to their end, how much they may write, and what their messages mean."""

from __future__ import annotations

import subprocess

import pytest

from paceline.errors import ConnectionProblem
from paceline.spec.clusters import Cluster
from paceline.ssh.connection import Connection
from paceline.ssh.ssh_process import TooLong, explain, run

STRICT = """No ED25519 host key is known for [login.alps]:22 and you have requested strict checking.
Host key verification failed.
"""
CHANGED = """@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
Host key for login.alps has changed and you have requested strict checking.
Host key verification failed.
"""


@pytest.mark.parametrize(
    ("errors", "hint"),
    [
        (STRICT, "it shows: ssh -o StrictHostKeyChecking=ask login.alps"),
        ("Host key verification failed.\n", "accept it, once: ssh login.alps"),
    ],
)
def test_an_unknown_host_key_is_accepted_with_ssh_itself(errors: str, hint: str) -> None:
    """`paceline login` cannot: it has just failed for this reason."""
    problem = explain(errors, name="alps", host="login.alps")
    assert problem.message.startswith("ssh does not know the host key of login.alps")
    assert "fingerprint from the site" in problem.hint
    assert problem.hint.endswith(hint)
    assert "paceline login" not in problem.hint


def test_a_host_key_that_has_changed() -> None:
    problem = explain(CHANGED, name="alps", host="login.alps")
    assert problem.message == "The host key of login.alps has changed, so ssh does not connect."
    assert "Ask its administrators" in problem.hint


def test_all_that_a_process_reads_and_writes(guard: None) -> None:
    content = bytes(range(256)) * 8000  # more than a pipe holds
    done = run(["sh", "-c", "tee /dev/stderr; exit 3"], content=content, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (3, content, content)
    # it does not read
    done = run(["sh", "-c", "exec <&-; echo said; exit 4"], content=content, timeout=60)
    assert (done.returncode, done.stdout) == (4, b"said\n")
    with pytest.raises(subprocess.TimeoutExpired):
        run(["sleep", "600"], timeout=0.2)
    with pytest.raises(subprocess.TimeoutExpired):  # it ends its output, but not itself
        run(["sh", "-c", "exec >&- 2>&- sleep 600"], timeout=0.2)


@pytest.mark.parametrize("stream", [1, 2])
def test_a_process_that_writes_too_much_is_ended(guard: None, stream: int) -> None:
    with pytest.raises(TooLong) as raised:
        run(["sh", "-c", f"echo first; exec yes >&{stream}"], timeout=600, limit=1 << 20)
    assert raised.value.output.startswith(b"first\n")
    assert run(
        ["sh", "-c", "head -c 1000000 /dev/zero"], timeout=60, limit=1 << 20
    ).stdout == bytes(1_000_000)


@pytest.mark.parametrize(
    ("noise", "script", "text"),
    [
        ("", "exec yes\n", "The answer of alps is too long: more than 4 MB."),
        ("", "exec yes >&2\n", "The answer of alps is too long: more than 4 MB."),
        (
            "yes;",
            "exit 0\n",
            "The login shell of alps printed more than 4 MB before it ran a command.",
        ),
    ],
)
def test_an_answer_without_end_is_an_error(guard: None, noise: str, script: str, text: str) -> None:
    class Here(Connection):
        def command(self, script: str, *, terminal: bool = False) -> list[str]:
            return ["sh", "-c", f"{noise}{script}"]

    with pytest.raises(ConnectionProblem) as raised:
        Here(Cluster("alps", "login.alps")).call(script, timeout=600)
    assert raised.value.message == text
    assert "~/.bashrc" in raised.value.hint
    assert "ssh login.alps true" in raised.value.hint


def test_settings_with_which_no_command_would_start_are_replaced() -> None:
    """Only where ssh's configuration has them: versions before 8.7 do not know them."""
    connection = Connection(Cluster("alps", "login.alps"))
    usual = {"stdinnull": "no", "forkafterauthentication": "no", "sessiontype": "default"}
    for settings in ({}, usual):
        connection.__dict__["_settings"] = settings
        assert not any("stdinnull" in each for each in connection.shell())
    connection.__dict__["_settings"] = {**usual, "stdinnull": "yes", "sessiontype": "none"}
    argv = connection.command("true\n")
    options = argv[: argv.index("--")]
    assert "stdinnull=no" in options
    assert "sessiontype=default" in options
    assert not any("forkafter" in each for each in options)
    done = run([*options, "-G", "--", "login.alps"], timeout=60)
    assert b"stdinnull no" in done.stdout
