"""An agent that is started early: it imports everything while the command line is parsed, then
waits for its run.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys

from paceline.contract.process import die_with_parent

# What an agent imports until its ranks start; most of it only when it is needed, but here nobody
# waits for it.
MODULES = ("paceline.agent.agent", "paceline.staging.cleanup", "paceline.agent.workers.bootstrap")


def main(args: list[str]) -> None:
    """Read the variables of the run from a pipe. If there are none, the command needs no agent."""
    die_with_parent(int(args[1]), signal.SIGTERM)
    for name in MODULES:
        importlib.import_module(name)
    from paceline.agent.main import main as run_agent

    with open(int(args[0]), "rb") as pipe:
        variables = pipe.read()
    if variables:
        os.environ.clear()
        os.environ.update(json.loads(variables))
        sys.exit(run_agent())
