"""Run a script, and record which samples its loaders give to this rank: `python -m ... FOLDER
EPOCHS LIMIT SCRIPT`.

Loaders of `run.loader` are read without training: the first loop of `run.steps` reads them for all
epochs, and the process ends. Of a map-style dataset only the first items are read, to compare them
between ranks. Any other script trains as usual, and ends when a DataLoader whose batches reach a
backward pass begins the epoch after the last one.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from paceline.runtime import loop
from paceline.runtime.data.inspection.loader_walk import LoaderWalk
from paceline.runtime.data.inspection.plain_loaders import PlainLoaders
from paceline.runtime.data.inspection.recorder import Recorder


def main(folder: str, epochs: str, limit: str, *program: str) -> None:
    recorder = Recorder(Path(folder), epochs=int(epochs), limit=int(limit) or None)
    loop.inspector = LoaderWalk(recorder)
    loaders = PlainLoaders(recorder)
    loaders.install()
    try:
        if program[0] == "-m":
            sys.argv[:] = list(program[1:])
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv[:] = list(program)
            sys.path[0:0] = [str(Path(program[0]).resolve().parent)]
            runpy.run_path(program[0], run_name="__main__")
    finally:
        loaders.finish()


if __name__ == "__main__":
    main(*sys.argv[1:])
