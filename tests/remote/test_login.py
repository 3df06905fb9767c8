"""`paceline login` against a real sshd: one question per login, none in the background."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.errors import ConnectionProblem
from paceline.spec.clusters import Cluster
from paceline.ssh.connection import Connection
from tests.remote.lab import Lab

Completed = subprocess.CompletedProcess[str]


@pytest.fixture
def here(lab: Lab) -> Iterator[Callable[[str], Connection]]:
    """Connections of this process, as a command of the laptop has them."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in lab.variables.items():
            patch.setenv(name, value)
        yield lambda host: Connection(Cluster(host, host))


def test_one_question_per_login_and_none_afterwards(
    lab: Lab, laptop: Callable[..., Completed], here: Callable[[str], Connection]
) -> None:
    before = lab.prompted()
    laptop("login", "lab", check=True)
    assert lab.prompted() == before + 1
    connection = here("lab")
    for _ in range(5):
        assert connection.call("echo here").output == b"here\n"
    assert "already" in laptop("login", "lab", check=True).stderr
    assert lab.prompted() == before + 1
    shown = laptop("login", "--show", check=True).stdout.splitlines()
    assert ["lab", "lab", "logged", "in"] in [line.split() for line in shown]
    laptop("login", "--close", "lab", check=True)
    lab.wait_until_empty()
    assert os.listdir(lab.folder / "run" / "paceline") == []


@pytest.mark.parametrize("host", ["lab", "plain"])
def test_without_a_login_calls_fail_at_once_and_ask_nothing(
    lab: Lab, here: Callable[[str], Connection], host: str
) -> None:
    """Also where a key alone would do: nothing connects but `paceline login`."""
    before, log = (
        lab.prompted(),
        (lab.folder / f"{'codes' if host == 'lab' else 'plain'}.log").read_text(),
    )
    with pytest.raises(ConnectionProblem) as problem:
        here(host).call("true")
    assert problem.value.message == f"You are not logged in to {host}."
    assert problem.value.hint == f"Type: paceline login {host}"
    assert lab.prompted() == before
    # nobody connected
    assert (lab.folder / f"{'codes' if host == 'lab' else 'plain'}.log").read_text() == log


def test_a_jump_host(
    lab: Lab, laptop: Callable[..., Completed], here: Callable[[str], Connection]
) -> None:
    before = lab.prompted()
    laptop("login", "inner", check=True)
    assert (
        here("inner").call("echo $SSH_CONNECTION").output.split()[3] == str(lab.codes.port).encode()
    )
    assert lab.prompted() == before + 1


def test_a_key_agent(
    lab: Lab, laptop: Callable[..., Completed], here: Callable[[str], Connection]
) -> None:
    socket = lab.folder / "agent"
    refused = laptop("login", "agent", SSH_AUTH_SOCK="")
    assert refused.returncode == 1
    assert "Permission denied" in refused.stderr
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(socket)], stdout=subprocess.DEVNULL)
    try:
        while not socket.exists():
            assert agent.poll() is None
        variables = {**os.environ, "SSH_AUTH_SOCK": str(socket)}
        subprocess.run(["ssh-add", "-q", str(lab.key)], env=variables, check=True)
        laptop("login", "agent", check=True, SSH_AUTH_SOCK=str(socket))
        assert here("agent").call("id -un").output.decode().strip() == lab.user
    finally:
        agent.terminate()
        agent.wait()


def test_a_connection_that_ssh_shares_already_is_used(
    lab: Lab, laptop: Callable[..., Completed], here: Callable[[str], Connection]
) -> None:
    subprocess.run([str(lab.bin / "ssh"), "-fN", "shared"], check=True, stdin=subprocess.DEVNULL)
    try:
        connection = here("shared")
        assert connection.is_users
        assert "already" in laptop("login", "shared", check=True).stderr
        assert connection.call("echo $((1 + 1))").output == b"2\n"
        laptop("login", "--close", check=True)  # closes only what Paceline has opened
        assert connection.is_open()
    finally:
        subprocess.run(
            [str(lab.bin / "ssh"), "-O", "exit", "shared"], check=True, capture_output=True
        )
    # opened by Paceline, at the path that ssh's configuration names
    laptop("login", "shared", check=True)
    assert connection.is_open()
    laptop("login", "--close", "shared", check=True)
    assert not connection.is_open()


def test_a_changed_host_key_is_named(lab: Lab, laptop: Callable[..., Completed]) -> None:
    good = lab.known_hosts.read_text()
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(lab.folder / "other")], check=True
    )
    other = (lab.folder / "other.pub").read_text()
    lab.known_hosts.write_text(f"[127.0.0.1]:{lab.plain.port} {other}")
    try:
        done = laptop("login", "plain")
    finally:
        lab.known_hosts.write_text(good)
        for name in ("other", "other.pub"):
            (lab.folder / name).unlink()
    assert done.returncode == 1
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in done.stderr


@pytest.mark.parametrize(
    ("host", "message"),
    [("strange", "Host key verification failed"), ("closed", "Connection refused")],
)
def test_other_failures_are_explained(
    laptop: Callable[..., Completed], host: str, message: str
) -> None:
    done = laptop("login", host)
    assert done.returncode == 1
    assert message in done.stderr
    assert f"ssh could not log in to {host}" in done.stderr


def test_a_connection_that_breaks_is_not_waited_for(
    lab: Lab, laptop: Callable[..., Completed], here: Callable[[str], Connection]
) -> None:
    laptop("login", "plain", check=True)
    lab.cut()
    lab.wait_until_empty()
    with pytest.raises(ConnectionProblem, match="not logged in"):
        here("plain").call("true")
    laptop("login", "plain", check=True)
    assert here("plain").call("echo again").output == b"again\n"


ARGUMENTS = [
    "",
    " ",
    "a b",
    "it's",
    '"',
    "$(touch injected)",
    "`touch injected`",
    "$HOME",
    "*",
    "-rf",
    "--",
    "!!",
    "\\",
    "a\nb",
    "\ttab",
    "é",
    "\udcff",
    "; touch injected",
    "~",
    "#",
    "%h",
    "{a,b}",
    "^x",
    "&",
    "|",
    ">x",
]


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh", "fish", "dash"])
def test_arguments_arrive_byte_for_byte_in_any_login_shell(
    lab: Lab, laptop: Callable[..., Completed], here: Callable[[str], Connection], shell: str
) -> None:
    from paceline.ssh.connection import words

    path = next(
        (f"{folder}/{shell}" for folder in ("/bin", "/usr/bin") if Path(folder, shell).exists()),
        None,
    )
    if path is None:
        pytest.skip(f"no {shell} here")
    subprocess.run(["usermod", "--shell", path, lab.user], check=True)
    try:
        laptop("login", "plain", check=True)
        answer = here("plain").call(f"printf '%s\\0' {words(ARGUMENTS)}")
    finally:
        subprocess.run(["usermod", "--shell", "/bin/bash", lab.user], check=True)
    assert answer.errors == ""
    assert [os.fsdecode(each) for each in answer.output.split(b"\0")[:-1]] == ARGUMENTS
    assert not (lab.home / "injected").exists()


def test_a_noisy_start_up_file_does_not_spoil_answers(
    lab: Lab, laptop: Callable[..., Completed], here: Callable[[str], Connection]
) -> None:
    (lab.home / ".bashrc").write_text("echo Welcome; echo careful >&2; printf 'no newline'\n")
    try:
        laptop("login", "plain", check=True)
        answer = here("plain").call("echo result; cat", content=b"input")
    finally:
        (lab.home / ".bashrc").unlink()
    assert answer.output == b"result\ninput"
    assert answer.errors == ""


@pytest.mark.parametrize(
    "host", ["-oProxyCommand=touch injected", "a b", "$(touch injected)", "a;b", "", "a\nb", "-v@x"]
)
def test_what_is_no_host_is_refused(
    laptop: Callable[..., Completed], project: Path, host: str
) -> None:
    import json

    (project / "paceline.toml").write_text(f"[profiles.bad]\nhost = {json.dumps(host)}\n")
    done = laptop("login", "bad")
    assert done.returncode == 2
    assert "Invalid host" in done.stderr
    assert not (project / "injected").exists()


def test_clusters_of_all_projects_are_in_a_file_of_the_user(
    lab: Lab, laptop: Callable[..., Completed], tmp_path: Path
) -> None:
    folder = lab.folder / "laptop" / ".config" / "paceline"
    folder.mkdir(parents=True)
    (folder / "clusters.toml").write_text('[mine]\nhost = "plain"\n')
    try:
        laptop("login", "mine", check=True, cwd=tmp_path)
        shown = laptop("login", "--show", check=True, cwd=tmp_path).stdout
        assert shown.split() == ["mine", "plain", "logged", "in"]
        assert "Did you mean 'mine'" in laptop("login", "mime", cwd=tmp_path).stderr
    finally:
        (folder / "clusters.toml").unlink()
        folder.rmdir()
