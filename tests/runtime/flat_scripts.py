"""Run scripts as `python script.py` would, from one process that imports torch once: each rank is a fork of it.

`python -m tests.runtime.flat_scripts FOLDER`: standard input has a list of [name, ranks, code]. Each rank works in
`FOLDER/<name>` and writes to `rank-<rank>.log` there. Standard output gets the exit codes of all ranks, by name.
`--quick` leaves a script that came to its end without taking torch apart, which takes half a second per rank.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading

import torch

import tests.preloaded  # noqa: F401 - before the forks, as it takes long
from paceline.contract import clean_exit
from tests.ports import free_port


def be_a_rank(folder: str, rank: int, world_size: int, port: int) -> None:
    os.chdir(folder)
    log = os.open(f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    # as in every rank that Paceline forks: torch may hang otherwise
    clean_exit.keep_process_groups(torch.distributed)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    os.environ.update(dict(zip(names, map(str, (rank, rank, world_size, world_size)), strict=True)))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def start_ranks() -> str | None:
    """Run all scripts, and return None; in each rank, return its code."""
    codes: dict[str, list[int]] = {}
    for name, world_size, code in json.load(sys.stdin):
        folder, port = os.path.join(sys.argv[1], name), free_port()
        os.mkdir(folder)
        pids = []
        for rank in range(world_size):
            pids.append(os.fork())
            if pids[-1] == 0:
                be_a_rank(folder, rank, world_size, port)
                return str(code)
        codes[name] = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    print(json.dumps(codes))
    return None


script = start_ranks()
if script is not None:
    exec(compile(script, "script.py", "exec"))
    if "--quick" in sys.argv:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(0)
