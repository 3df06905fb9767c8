"""A local folder mounted as a node sees a shared file system: through a server.

sshfs talks to an sftp-server on this machine, without ssh in between: every file operation costs a round trip, with
the least possible latency. The file systems of clusters are further away, and shared with others.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

SERVERS = (
    "/usr/lib/openssh/sftp-server",
    "/usr/libexec/openssh/sftp-server",
    "/usr/lib/ssh/sftp-server",
)


def missing_requirement() -> str:
    """Return what is needed and not installed; empty if nothing is missing."""
    if not shutil.which("sshfs"):
        return "sshfs"
    if not any(os.path.exists(path) for path in SERVERS):
        return "sftp-server (of OpenSSH)"
    return "" if os.access("/dev/fuse", os.W_OK) else "/dev/fuse"


class NetworkFolder:
    """The folder `stored`, mounted at `mount`; must be closed."""

    def __init__(self, stored: Path, mount: Path) -> None:
        self.stored, self.mount = stored, mount
        mount.mkdir()
        self._server = mount.with_name("server.sh")
        server = next(path for path in SERVERS if os.path.exists(path))
        # ignores the arguments meant for ssh
        self._server.write_text(f"#!/bin/sh\nexec {server}\n")
        self._server.chmod(0o700)
        self._is_mounted = False

    def remount(self) -> None:
        """Mount again, with nothing cached, as on a node that has not read anything yet."""
        self.close()
        command = [
            "sshfs",
            "-o",
            f"ssh_command={self._server}",
            f"here:{self.stored}",
            str(self.mount),
        ]
        subprocess.run(command, check=True)
        self._is_mounted = True

    def close(self) -> None:
        if self._is_mounted:
            unmount = shutil.which("fusermount3") or "fusermount"
            subprocess.run([unmount, "-u", str(self.mount)], check=True)
            self._is_mounted = False
