"""Run commands of Paceline from one process that has imported them: each is a fork, which saves its start.

`python -m tests.docs.forked_commands`: standard input has a list of [command, allowed exit codes]. What needs a shell
runs in one. Standard output gets a list of what failed: [command, exit code, end of its output].
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from typing import IO

from paceline.__main__ import main
from tests.forked_cli import preload

SHELL = re.compile(r"[|&;<>()$`]")
COMMENT = re.compile(r"\s#.*")


def start(command: str, out: IO[bytes]) -> int:
    """Run a command to its end, and return its exit code."""
    command = COMMENT.sub("", command)
    if SHELL.search(command) or not command.startswith("paceline "):
        return subprocess.run(
            ["bash", "-c", command], stdout=out, stderr=out, stdin=subprocess.DEVNULL
        ).returncode
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
        sys.argv = [os.path.expanduser(word) for word in shlex.split(command)]
        main()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run_all(commands: list[tuple[str, list[int]]]) -> list[tuple[str, int, str]]:
    failed = []
    for command, allowed in commands:
        with tempfile.TemporaryFile() as out:
            code = start(command, out)
            if code not in allowed:
                out.seek(0)
                failed.append((command, code, out.read().decode(errors="replace")[-2000:]))
    return failed


if __name__ == "__main__":
    preload("plotly.graph_objects", "optuna")
    print(json.dumps(run_all(json.load(sys.stdin))))
