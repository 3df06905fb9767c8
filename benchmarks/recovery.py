"""Time from `kill -9` of a rank to the next completed step: `paceline run --max-restarts` compared with torchrun.

    python benchmarks/recovery.py [--ranks 2] [--repeats 5]

Both train the same model, one after the other. The time includes noticing the failure, ending the other ranks,
restarting and loading the checkpoint.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from faults import Paceline, Torchrun, Training, wait_until_training

from machine import describe, show

TARGET = 2.0


def recover(training: Training, repeats: int) -> list[float]:
    """Return the seconds from each kill to the next step of the new processes."""
    found = []
    training.start()
    try:
        began = wait_until_training(training)
        for _ in range(repeats):
            # training again, and saved at least once
            wait_until_training(training, after=began + 3)
            before = training.completed()[-1][2]
            killed = time.time()
            training.kill()
            while not (
                again := [
                    row[0] for row in training.completed() if row[0] > killed and row[2] != before
                ]
            ):
                assert training.process is not None
                assert training.process.poll() is None, training.console()[-3000:]
                time.sleep(0.02)
            found.append(again[0] - killed)
            began = again[0]
    finally:
        training.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    describe("recovery from kill -9 of a rank")
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in (Paceline, Torchrun):
            training = kind(
                Path(folder) / kind.name,
                ranks=args.ranks,
                steps=10**9,
                step_time=0.05,
                per_epoch=20,
                hang_timeout=60,
            )
            rows[kind.name] = recover(training, args.repeats)
    show(
        ["", "median s", "min s", "max s"],
        [
            [name, *(f"{statistic(times):.2f}" for statistic in (statistics.median, min, max))]
            for name, times in rows.items()
        ],
    )
    ratio = statistics.median(rows["torchrun"]) / statistics.median(rows["paceline"])
    print(
        f"paceline recovers {ratio:.1f} times as fast as torchrun (target: at least {TARGET:.0f} times)"
    )


if __name__ == "__main__":
    main()
