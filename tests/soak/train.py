"""The training of tests/fault_tolerance, whose ranks also say where they run."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import paceline  # noqa: F401 (so that the agents see that it uses the runtime, as they do for most scripts)
from tests.fault_tolerance.train import main

if __name__ == "__main__":
    out = Path(sys.argv[sys.argv.index("--out") + 1])
    partial = out / f".where-{os.environ['RANK']}"
    partial.write_text(f"{socket.gethostname()} {os.getpid()}")
    partial.rename(out / f"where-{os.environ['RANK']}")
    main()
