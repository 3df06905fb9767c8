"""A script that takes its rank and its communication from mpi4py."""

import sys
from pathlib import Path

from mpi4py import MPI

world = MPI.COMM_WORLD
total = world.allreduce(world.Get_rank() + 1)
(Path(sys.argv[1]) / f"rank-{world.Get_rank()}").write_text(f"{world.Get_size()} {total}")
