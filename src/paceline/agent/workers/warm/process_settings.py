"""Settings that a forked zygote can take over from the command that asks for it: nice, umask,
ionice and ulimit.
"""

from __future__ import annotations

import os
import resource

# The numbers of Linux's ioprio_get and ioprio_set, which Python does not have.
_IO_PRIORITY_CALLS = {
    "x86_64": (252, 251),
    "aarch64": (31, 30),
    "riscv64": (31, 30),
    "ppc64le": (274, 273),
}
_REAL_TIME = 1  # the class of I/O priorities that only root may take
_LIMIT = "limit "
IONICE = "ionice"
_LIMITS = 16  # Linux has as many, from 0 on

Settings = dict[str, str]


def read_settings() -> Settings:
    """Return the settings of this process, except ionice: the warm process reads that of its
    client.
    """
    settings = {"nice": str(os.getpriority(os.PRIO_PROCESS, 0)), "umask": _umask()}
    for number in range(_LIMITS):
        soft, hard = resource.getrlimit(number)
        settings[f"{_LIMIT}{number}"] = f"{soft} {hard}"
    return settings


def obstacle(before: Settings, wanted: Settings) -> str | None:
    """Return the name of a setting that a fork of a process with `before` cannot take over; None
    if it can.
    """
    root = os.geteuid() == 0
    if int(wanted["nice"]) < int(before["nice"]) and not root:
        return "nice"
    if int(wanted.get(IONICE, "0")) >> 13 == _REAL_TIME and not root:
        return IONICE
    for name, text in wanted.items():
        if name.startswith(_LIMIT) and text != before[name]:
            allowed, hard = (int(each.split()[1]) for each in (before[name], text))
            raised = allowed != resource.RLIM_INFINITY and (
                hard == resource.RLIM_INFINITY or hard > allowed
            )
            # The C library reads the size of stacks when a process starts.
            if int(name.removeprefix(_LIMIT)) == resource.RLIMIT_STACK or (raised and not root):
                return "ulimit"
    return None


def take_settings(wanted: Settings) -> bool:
    """Take over settings. Returns whether this process has all of them now."""
    os.umask(int(wanted["umask"], 8))
    now = read_settings()
    for name, text in wanted.items():
        if name.startswith(_LIMIT) and now[name] != text:
            soft, hard = map(int, text.split())
            resource.setrlimit(int(name.removeprefix(_LIMIT)), (soft, hard))
    if wanted[IONICE] != read_io_priority(0):
        _set_io_priority(int(wanted[IONICE]))
    if now["nice"] != wanted["nice"]:
        os.setpriority(os.PRIO_PROCESS, 0, int(wanted["nice"]))
    return {**read_settings(), IONICE: read_io_priority(0)} == wanted


def _umask() -> str:
    umask = os.umask(0o77)
    os.umask(umask)
    return f"{umask:o}"


def read_io_priority(pid: int) -> str:
    """Return class and level as one number; 0 if they were never set, or if this is an unknown kind
    of machine.

    Process 0 is this one. Not in the client: importing ctypes would take it a while.
    """
    calls = _IO_PRIORITY_CALLS.get(os.uname().machine)
    return "0" if calls is None else str(max(0, _call(calls[0], 1, pid)))


def _set_io_priority(value: int) -> None:
    calls = _IO_PRIORITY_CALLS.get(os.uname().machine)
    if calls is not None:
        _call(calls[1], 1, 0, value)


def _call(number: int, *arguments: int) -> int:
    import ctypes

    answer: int = ctypes.CDLL(None, use_errno=True).syscall(number, *arguments)
    return answer
