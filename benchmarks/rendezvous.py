"""What many agents cost the head agent: its CPU time while all are idle, and the lines it sends per event.

    python benchmarks/rendezvous.py [--agents 64 256 1024] [--seconds 20]

Each member is a forked process with a real connection. Targets: under 10 % of a core with 1,024 idle agents, and at
most two lines per agent for any event.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path

from paceline.agent.launcher_placement import find_placement
from paceline.agent.rendezvous.connected_agents import join
from paceline.contract.launch_spec import LaunchSpec

from machine import describe, show


def run_agent(index: int, count: int, folder: Path, seconds: float) -> tuple[float, float]:
    """Join, idle, and leave. Return the seconds until all had joined, and the CPU share while idle."""
    environ = {
        "PACELINE_RUN": str(folder),
        "PACELINE_JOB_START": "1",
        "PACELINE_TOKEN": "token",
        "PACELINE_AGENT": f"{index}/{count}",
    }
    placement = find_placement(LaunchSpec(run_id="r", program="x", args=[], nodes=count), environ)
    began = time.monotonic()
    rendezvous = join(placement, environ, {"host": f"node{index}"}, timeout=300.0)
    joined = time.monotonic() - began
    before, idle_since = time.process_time(), time.monotonic()
    while time.monotonic() < idle_since + seconds:
        lost = [each for each in rendezvous.poll() if each["kind"] == "lost"]
        assert not lost, lost
        time.sleep(0.5)
    share = (time.process_time() - before) / (time.monotonic() - idle_since)
    if index:
        time.sleep(1)  # so that the members' goodbyes are not part of what is measured
    rendezvous.close()
    return joined, share


def measure(count: int, seconds: float) -> tuple[str, str, str]:
    with tempfile.TemporaryDirectory() as folder:
        members = []
        for index in range(1, count):
            pid = os.fork()
            if not pid:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                try:
                    run_agent(index, count, Path(folder), seconds)
                except BaseException as error:
                    print(f"member {index}: {error}", file=sys.stderr)
                    os._exit(1)
                os._exit(0)
            members.append(pid)
        joined, share = run_agent(0, count, Path(folder), seconds)
        failed = sum(os.waitpid(pid, 0)[1] != 0 for pid in members)
    assert not failed, f"{failed} members failed"
    return str(count), f"{joined:.2f} s", f"{share:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    describe("Rendezvous of many agents")
    rows = [measure(count, options.seconds) for count in options.agents]
    show(("agents", "all joined after", "CPU of the head agent, idle"), rows)


if __name__ == "__main__":
    main()
