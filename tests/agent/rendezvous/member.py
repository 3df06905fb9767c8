"""One agent's part in a meeting, as a process of its own: told what to do by lines, answers by lines of JSON.

`python -m tests.agent.rendezvous.member INDEX COUNT [SILENCE [PATIENCE]]`, with the run's variables in the environment.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from paceline.agent.placement import find_place
from paceline.agent.rendezvous import rendezvous
from paceline.contract.launch_spec import LaunchSpec
from paceline.errors import LaunchError


def answer(kind: str, **fields: Any) -> None:
    print(json.dumps({"answer": kind, **fields}), flush=True)


stopped = False


def stop(*_: object) -> None:
    global stopped
    stopped = True


def main(index: int, count: int, silence: float = 60.0, patience: float = 60.0) -> None:
    launch_spec = LaunchSpec(run_id="r", program="x", args=[], nodes=count)
    signal.signal(signal.SIGTERM, stop)
    answer("started")
    place = find_place(launch_spec, {**os.environ, "PACELINE_AGENT": f"{index}/{count}"})
    try:
        joined = rendezvous.join(
            place,
            os.environ,
            {"host": f"host{index}", "pid": os.getpid()},
            silence=silence, patience=patience, give_up=lambda: stopped,
        )  # fmt: skip
    except LaunchError as error:
        answer("refused", message=str(error), hosts=getattr(error, "hosts", []))
        return
    answer("joined", roster=joined.roster, addr=joined.addr, peer=joined.peer)
    for line in sys.stdin:
        verb, _, rest = line.strip().partition(" ")
        if verb == "prepare":
            try:
                master = joined.prepare(int(rest))
                answer("prepared", addr=master.addr, port=master.port)
            except LaunchError as error:
                answer("refused", message=str(error), hosts=getattr(error, "hosts", []))
        elif verb == "say":
            message = json.loads(rest)
            joined.say(message, to=message.get("whom"))
        elif verb == "poll":
            answer("polled", messages=joined.poll())
        elif verb == "close":
            joined.close()
            answer("closed")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *map(float, sys.argv[3:]))
