"""A folder of this machine as a node sees one of a shared file system: through a server, over a connection.

sshfs asks an sftp-server here, without ssh between them: every look at a file costs a question and an answer, and
nothing is further away than it has to be. File systems of clusters are further away, and shared with others.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

SERVERS = ("/usr/lib/openssh/sftp-server", "/usr/libexec/openssh/sftp-server", "/usr/lib/ssh/sftp-server")


def lacking() -> str:
    """What is needed and not here; empty if all is."""
    if not shutil.which("sshfs"):
        return "sshfs"
    if not any(os.path.exists(path) for path in SERVERS):
        return "sftp-server (of OpenSSH)"
    return "" if os.access("/dev/fuse", os.W_OK) else "/dev/fuse"


class NetworkFolder:
    """`behind`, seen at `mount`; to be closed."""

    def __init__(self, behind: Path, mount: Path) -> None:
        self.behind, self.mount = behind, mount
        mount.mkdir()
        self._server = mount.with_name("server.sh")
        server = next(path for path in SERVERS if os.path.exists(path))
        self._server.write_text(f"#!/bin/sh\nexec {server}\n")  # whatever ssh would have been told
        self._server.chmod(0o700)
        self._is_mounted = False

    def renew(self) -> None:
        """As a node sees it that has not asked for anything yet."""
        self.close()
        command = ["sshfs", "-o", f"ssh_command={self._server}", f"here:{self.behind}", str(self.mount)]
        subprocess.run(command, check=True)
        self._is_mounted = True

    def close(self) -> None:
        if self._is_mounted:
            unmount = shutil.which("fusermount3") or "fusermount"
            subprocess.run([unmount, "-u", str(self.mount)], check=True)
            self._is_mounted = False
