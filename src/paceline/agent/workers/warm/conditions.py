"""What a process inherits that a fork of another process cannot change: a warm process serves only
runs with the same.

Everything else (variables, folder, standard streams, settings such as nice) is sent with the
request.
"""

from __future__ import annotations

import os
import sys

from paceline.agent.workers.warm.process_settings import obstacle, read_settings
from paceline.contract import gpus

TYPE_CHECKING = False  # `paceline run` reads this before it has imported anything
if TYPE_CHECKING:
    from collections.abc import Mapping

# Imports may depend on any variable: torch and what it imports read some 400, by names of all
# kinds. So all are compared, except those that shells and terminals set and those that are read
# later, by the ranks.
IGNORED = frozenset(
    {
        "_",
        "PWD",
        "OLDPWD",
        "SHLVL",
        "TERM",
        "COLORTERM",
        "COLUMNS",
        "LINES",
        "WINDOWID",
        "STY",
        "DISPLAY",
        "XAUTHORITY",
        "WAYLAND_DISPLAY",
        "GPG_TTY",
        "LS_COLORS",
        "PS1",
        "INVOCATION_ID",
        "JOURNAL_STREAM",
        "DBUS_SESSION_BUS_ADDRESS",
        *gpus.NAMES,  # torch reads them when a rank first uses a GPU
    }
)
IGNORED_PREFIXES = (
    "PACELINE_",
    "TERM_",
    "TMUX",
    "SSH_",
    "VSCODE_",
    "XDG_SESSION_",
    "HIST",
    "NCCL_",
    "GLOO_",
    "WANDB_",
    "HF_",
)

# Lines of /proc/self/status.
_STATUS = (
    "Uid",
    "Gid",
    "Groups",
    "SigBlk",
    "SigIgn",
    "CapInh",
    "CapPrm",
    "CapEff",
    "CapBnd",
    "CapAmb",
    "NoNewPrivs",
    "Seccomp",
    "Cpus_allowed",
    "Mems_allowed",
)
_STANDARD_SIGNALS = (1 << 31) - 1
_NAMES = {
    "Cpus_allowed": "the CPU affinity",
    "SigIgn": "the ignored signals",
    "cgroup": "the control group",
    "memory policy": "the NUMA memory policy",
    "policy": "the scheduling policy",
}

Conditions = dict[str, dict[str, str]]


def read_conditions(python: str, environ: Mapping[str, str]) -> Conditions:
    """Return the conditions of this process, for the interpreter `python` with these variables."""
    return {
        "variables": _variables(environ),
        "process": {"the interpreter": python, **_process()},
        "settings": read_settings(),
    }


def difference(before: Conditions, now: Conditions) -> str | None:
    """Return what differs and cannot be taken over, for people; None if nothing does."""
    for kind in ("variables", "process"):
        values = before[kind]
        changed = sorted(
            name for name in {*values, *now[kind]} if values.get(name) != now[kind].get(name)
        )
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            return f"{_NAMES.get(changed[0], changed[0])}{more}"
    return obstacle(before["settings"], now["settings"])


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    kept = {
        name: value
        for name, value in environ.items()
        if name not in IGNORED and not name.startswith(IGNORED_PREFIXES)
    }
    if "PYTHONPATH" in kept:  # Python resolves its relative entries once, when it starts
        kept["PYTHONPATH"] = os.pathsep.join(
            map(os.path.abspath, kept["PYTHONPATH"].split(os.pathsep))
        )
    return kept


def _process() -> dict[str, str]:
    # The second word about any part of the memory is the policy, unless numactl has set none.
    found = {
        "policy": str(os.sched_getscheduler(0)),
        "memory policy": "".join(_read("numa_maps", 256).split()[1:2]),
    }
    for line in _read("status").splitlines():
        name, _, value = line.partition(":")
        if name in _STATUS:
            found[name] = value.strip()
    # The C library ignores two signals of its own in processes that it starts.
    found["SigIgn"] = f"{int(found.get('SigIgn', '0'), 16) & _STANDARD_SIGNALS:x}"
    for name in ("cgroup", "oom_score_adj"):
        found[name] = _read(name)
    for name in os.listdir("/proc/self/ns"):
        found[f"the {name} namespace"] = os.readlink(f"/proc/self/ns/{name}")
    return found


def _read(name: str, size: int = -1) -> str:
    try:
        with open(f"/proc/self/{name}", encoding="utf-8", errors="replace") as file:
            return file.read(size)
    except OSError:
        return ""


def reason_to_start_cold(environ: Mapping[str, str]) -> str | None:
    """Return why no process may stay here after a run; None if one may."""
    if sys.platform != "linux":
        return "it needs Linux"
    if environ.get("SLURM_JOB_ID"):
        return "this is a Slurm job"
    if environ.get("CI", "").lower() not in ("", "0", "false"):
        return "CI is set"
    return None
