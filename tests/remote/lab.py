"""A login node on this machine: real sshd processes on loopback, a user of their own, keys and one-time codes.

The laptop is this process: its `ssh` is the real one, with a configuration of the lab's instead of this user's.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.ports import free_port
from tests.remote.relay import Relay

SSHD, USERADD, USERDEL = "/usr/sbin/sshd", "/usr/sbin/useradd", "/usr/sbin/userdel"
PAM_FOLDER = Path("/etc/pam.d")
PAM_OATH = (
    "/lib/x86_64-linux-gnu/security/pam_oath.so",
    "/usr/lib/security/pam_oath.so",
    "/lib/aarch64-linux-gnu/security/pam_oath.so",
)
FACTORS = """\
UsePAM yes
PasswordAuthentication no
KbdInteractiveAuthentication yes
AuthenticationMethods publickey,keyboard-interactive:pam
"""
KEY_ONLY = """\
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
"""


def missing() -> str:
    """Return why there can be no lab here; empty if there can."""
    if os.geteuid() != 0:
        return "only root can make users and start sshd for them"
    absent = [
        each
        for each in (SSHD, shutil.which("oathtool"), shutil.which("ssh"))
        if not each or not os.path.exists(each)
    ]
    return (
        ""
        if not absent and any(map(os.path.exists, PAM_OATH))
        else "install openssh-server libpam-oath oathtool"
    )


@dataclass
class LoginNode:
    """One sshd."""

    folder: Path
    name: str
    rules: str
    program: str
    variables: dict[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def host_key(self) -> Path:
        return self.folder / f"{self.name}_host_key"

    def start(self) -> None:
        if not self.host_key.exists():
            _run(
                "ssh-keygen",
                "-q",
                "-t",
                "ed25519",
                "-N",
                "",
                "-C",
                self.name,
                "-f",
                str(self.host_key),
            )
        config = self.folder / f"{self.name}_config"
        set_env = " ".join(f'"{name}={value}"' for name, value in self.variables.items())
        config.write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {self.host_key}\nPidFile none\nStrictModes no\n"
            f"AuthorizedKeysFile {self.folder}/authorized_keys\nPrintMotd no\nMaxStartups 100\n"
            f"Subsystem sftp internal-sftp\n{self.rules}"
            + (f"SetEnv {set_env}\n" if set_env else "")
        )
        log = self.folder / f"{self.name}.log"
        self.process = subprocess.Popen(
            [self.program, "-D", "-f", str(config), "-E", str(log)], stdin=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 20
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            assert self.process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, "sshd does not listen"
            time.sleep(0.05)

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(timeout=20)
            self.process = None


class Lab:
    """Login nodes for one user: `codes` asks for a key and a code, `plain` for a key alone."""

    def __init__(self, folder: Path, variables: dict[str, str] | None = None) -> None:
        self.folder = folder
        folder.chmod(0o755)
        self.user = f"pl{secrets.token_hex(3)}"
        self.service = f"paceline-{secrets.token_hex(3)}"
        self.home = folder / "home"
        program = folder / self.service  # sshd names its PAM service after its program
        program.symlink_to(SSHD)
        self.codes = LoginNode(folder, "codes", FACTORS, str(program), variables or {})
        self.plain = LoginNode(folder, "plain", KEY_ONLY, str(program), variables or {})
        self.more: list[LoginNode] = []
        self.secret = secrets.token_hex(20)
        self.key = folder / "key"
        self.prompts = folder / "prompts"
        self.bin = folder / "bin"
        self.known_hosts = folder / "known_hosts"
        for name in ("run", "laptop", "links"):
            (folder / name).mkdir(mode=0o700)

    def up(self) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)
        _run(
            USERADD,
            "--create-home",
            "--home-dir",
            str(self.home),
            "--shell",
            "/bin/bash",
            "--password",
            "*",
            self.user,
        )
        self.home.chmod(0o755)
        codes = self.folder / "codes.oath"
        codes.write_text(f"HOTP\t{self.user}\t-\t{self.secret}\n")
        codes.chmod(0o600)
        (PAM_FOLDER / self.service).write_text(
            f"auth required pam_oath.so usersfile={codes} window=20 digits=6\n"
            "account required pam_permit.so\nsession required pam_permit.so\n"
        )
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "laptop", "-f", str(self.key))
        shutil.copy(f"{self.key}.pub", self.folder / "authorized_keys")
        self.codes.start()
        self.plain.start()
        self._write_laptop()

    def _write_laptop(self) -> None:
        known = [
            f"[127.0.0.1]:{node.port} {Path(f'{node.host_key}.pub').read_text()}"
            for node in self.nodes
        ]
        self.known_hosts.write_text("".join(known))
        common = (
            f"  HostName 127.0.0.1\n  User {self.user}\n  UserKnownHostsFile {self.known_hosts}\n"
        )
        key = f"  IdentityFile {self.key}\n  IdentitiesOnly yes\n"
        self.config = self.folder / "ssh_config"
        self.config.write_text(
            f"Include {self.folder}/links/*\n"
            f"Host lab\n  Port {self.codes.port}\n{common}{key}"
            f"Host plain\n  Port {self.plain.port}\n{common}{key}"
            f"Host inner\n  Port {self.codes.port}\n  ProxyJump plain\n{common}{key}"
            f"Host agent\n  Port {self.plain.port}\n{common}"
            f"Host shared\n  Port {self.plain.port}\n{common}{key}"
            f"  ControlMaster auto\n  ControlPath {self.folder}/own-%C\n  ControlPersist 5m\n"
            f"Host strange\n  Port {self.plain.port}\n  HostName 127.0.0.1\n  User {self.user}\n{key}"
            f"  UserKnownHostsFile {self.folder}/nobody\n  StrictHostKeyChecking yes\n"
            f"Host closed\n  Port 1\n{common}{key}"
        )
        self.bin.mkdir(exist_ok=True)
        _write_program(
            self.bin / "ssh", f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.config} "$@"\n'
        )
        # Each question is written down; a code is good for one login, so the next question gets the next one.
        self.prompts.write_text("")
        _write_program(
            self.bin / "askpass",
            f'#!/bin/sh\nn=$(wc -l <{self.prompts})\nprintf "%s\\n" "$1" | head -n 1 >>{self.prompts}\n'
            f"exec oathtool --hotp -d 6 -c $n {self.secret}\n",
        )

    def add(self, name: str, variables: dict[str, str]) -> LoginNode:
        """Start one more login node, for a key alone, whose sessions have these variables."""
        node = LoginNode(self.folder, name, KEY_ONLY, self.plain.program, variables)
        node.start()
        self.more.append(node)
        with self.known_hosts.open("a") as file:
            file.write(f"[127.0.0.1]:{node.port} {Path(f'{node.host_key}.pub').read_text()}")
        with self.config.open("a") as file:
            file.write(
                f"Host {name}\n  Port {node.port}\n  HostName 127.0.0.1\n  User {self.user}\n"
                f"  UserKnownHostsFile {self.known_hosts}\n  IdentityFile {self.key}\n  IdentitiesOnly yes\n"
            )
        return node

    @contextmanager
    def link(self, node: LoginNode, name: str = "link") -> Iterator[Relay]:
        """Put a relay in front of a login node: the host `name` on the laptop."""
        entry = self.folder / "links" / name
        with Relay(node.port) as relay:
            entry.write_text(
                f"Host {name}\n  Port {relay.port}\n  HostName 127.0.0.1\n  User {self.user}\n"
                f"  UserKnownHostsFile {self.known_hosts}\n  HostKeyAlias [127.0.0.1]:{node.port}\n"
                f"  IdentityFile {self.key}\n  IdentitiesOnly yes\n"
            )
            try:
                yield relay
            finally:
                entry.unlink()

    def configure(self, *settings: str, name: str = "link") -> None:
        """Add settings of ssh for a link."""
        with (self.folder / "links" / name).open("a") as file:
            file.writelines(f"  {each}\n" for each in settings)

    @property
    def nodes(self) -> tuple[LoginNode, LoginNode]:
        return self.codes, self.plain

    @property
    def variables(self) -> dict[str, str]:
        """The laptop's environment."""
        return {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "SSH_ASKPASS": str(self.bin / "askpass"),
            "SSH_ASKPASS_REQUIRE": "force",
            "HOME": str(self.folder / "laptop"),
            "XDG_RUNTIME_DIR": str(self.folder / "run"),
        }

    def prompted(self) -> int:
        """Return how many questions were asked so far."""
        return len(self.prompts.read_text().splitlines())

    def processes(self) -> list[str]:
        """Return what runs on the login node for the user, without jobs."""
        uid, found = pwd.getpwnam(self.user).pw_uid, []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                live = process.uids().real == uid and process.status() != psutil.STATUS_ZOMBIE
                if live and "SLURM_JOB_ID" not in process.environ():
                    found.append(f"{process.pid} {' '.join(process.cmdline())}")
        return found

    def cut(self) -> None:
        """End every connection from the side of the login node, and what runs there: none notices the end of others."""
        pids = [int(line.split()[0]) for line in self.processes()]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with suppress(ProcessLookupError):  # it has ended meanwhile
                    os.kill(pid, number)

    def wait_until_idle(self, timeout: float = 30) -> None:
        """Wait until nothing runs on the login node but the connections themselves."""
        deadline = time.monotonic() + timeout
        while left := [line for line in self.processes() if self.service not in line]:
            assert time.monotonic() < deadline, f"left on the login node: {left}"
            time.sleep(0.05)

    def wait_until_empty(self, timeout: float = 30) -> None:
        """Wait until nothing of the user's runs on the login node."""
        deadline = time.monotonic() + timeout
        while left := self.processes():
            assert time.monotonic() < deadline, f"left on the login node: {left}"
            time.sleep(0.05)

    def requests(self) -> set[str]:
        """Return the requests that wait on the login node. A connection that a test has cut may leave one."""
        return {path.name for path in (self.home / ".cache" / "paceline").glob("request-*")}

    def on_node(self, script: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a script of `sh` as the user, past ssh."""
        user = pwd.getpwnam(self.user)
        return subprocess.run(
            [
                "setpriv",
                f"--reuid={user.pw_uid}",
                f"--regid={user.pw_gid}",
                "--clear-groups",
                "sh",
                "-c",
                script,
            ],
            env={"HOME": str(self.home), "PATH": "/usr/bin:/bin"},
            cwd=self.home,
            text=True,
            capture_output=True,
            check=True,
            **options,
        )

    def uninstall(self) -> Path:
        """Remove Paceline from the login node; return the folder where it will be."""
        _run("rm", "-rf", str(self.home / ".cache"))
        return self.home / ".cache" / "paceline"

    def down(self) -> None:
        for node in (*self.nodes, *self.more):
            node.stop()
        with suppress(KeyError):
            uid = pwd.getpwnam(self.user).pw_uid
            for process in psutil.process_iter():
                with suppress(psutil.Error):
                    if process.uids().real == uid:
                        process.send_signal(signal.SIGKILL)
            subprocess.run([USERDEL, "--force", self.user], capture_output=True, check=False)
        (PAM_FOLDER / self.service).unlink(missing_ok=True)


def _write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
