"""One agent of a rendezvous in a process of its own. It reads commands from stdin and answers with lines of JSON.

`python -m tests.agent.rendezvous.member INDEX COUNT [SILENCE_TIMEOUT [TIMEOUT]]`, with the run's variables set.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from paceline.agent.launcher_placement import find_placement
from paceline.agent.rendezvous import connected_agents
from paceline.contract.launch_spec import LaunchSpec
from paceline.errors import LaunchError


def answer(kind: str, **fields: Any) -> None:
    print(json.dumps({"answer": kind, **fields}), flush=True)


stopped = False


def stop(*_: object) -> None:
    global stopped
    stopped = True


def main(index: int, count: int, silence_timeout: float = 60.0, timeout: float = 60.0) -> None:
    launch_spec = LaunchSpec(run_id="r", program="x", args=[], nodes=count)
    signal.signal(signal.SIGTERM, stop)
    answer("started")
    placement = find_placement(launch_spec, {**os.environ, "PACELINE_AGENT": f"{index}/{count}"})
    try:
        joined = connected_agents.join(
            placement,
            os.environ,
            {"host": f"host{index}", "pid": os.getpid()},
            silence_timeout=silence_timeout,
            timeout=timeout,
            interrupted=lambda: stopped,
        )
    except LaunchError as error:
        answer("failed", message=str(error), hosts=getattr(error, "hosts", []))
        return
    answer(
        "joined",
        roster=joined.roster,
        head_address=joined.head_address,
        peer_address=joined.peer_address,
    )
    for line in sys.stdin:
        verb, _, rest = line.strip().partition(" ")
        if verb == "prepare":
            try:
                master = joined.prepare(int(rest))
                answer("prepared", address=master.address, port=master.port)
            except LaunchError as error:
                answer("failed", message=str(error), hosts=getattr(error, "hosts", []))
        elif verb == "send":
            message = json.loads(rest)
            joined.send(message, to=message.get("recipient"))
        elif verb == "poll":
            answer("polled", messages=joined.poll())
        elif verb == "close":
            joined.close()
            answer("closed")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *map(float, sys.argv[3:]))
