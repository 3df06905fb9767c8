"""A second, unprivileged user on this machine: what can they do to somebody else's runs?"""

from __future__ import annotations

import codecs
import os
import shutil
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

# Another user may not be able to read this Python's library, so load what they will need.
for encoding in ("ascii", "latin-1", "utf-8", "idna"):
    codecs.lookup(encoding)

OWNER, STRANGER = 1, 65534  # "daemon" and "nobody", which every Linux has
needs_two_users = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can become two other users"
)


def run_as(user: int, argv: Sequence[str], **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command as another user, without any of our groups."""
    become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--"]
    return subprocess.run([*become, *argv], text=True, capture_output=True, timeout=60, **options)  # type: ignore[call-overload, no-any-return]


def call_as(user: int, function: Callable[[], None]) -> None:
    """Call a function as another user, in a child process; fail if it raises."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            function()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, f"failed as user {user}; see above"


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder like /tmp, where everybody may make files. Other users cannot enter those of pytest."""
    path = Path(tempfile.mkdtemp(prefix="paceline-test-", dir="/tmp"))
    path.chmod(0o1777)
    try:
        yield path
    finally:
        shutil.rmtree(path)
