"""Goodput with faults (a rank is killed, the job is preempted, a rank hangs) compared with torchrun `--max-restarts`.

    python benchmarks/goodput.py [--minutes 5] [--every 30] [--ranks 2]

The baseline is a common setup: DDP with torchrun, `torch.save` at the end of each epoch (10 s here), and the same
command again after a preemption. Both wait equally long for a hung rank (`--hang-timeout`, and the process group's
timeout). Goodput is the time spent on useful steps, divided by wall time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from pathlib import Path

from faults import Paceline, Torchrun, Training, wait_until_training
from paceline.watch.events import read_events
from paceline.watch.goodput import SHARES, compute_goodput

from machine import describe, show

TARGET = 1.5
STEP_TIME = 0.05
PER_EPOCH = 200  # steps: 10 seconds
HANG_TIMEOUT = 10.0  # seconds
FAULTS = ("kill", "preempt", "hang")


def measure(training: Training, *, seconds: float, every: float) -> tuple[float, int, int]:
    """Return the goodput, the number of useful steps and the number of repeated ones."""
    began = time.time()
    training.start()
    try:
        wait_until_training(training)
        faults = itertools.cycle(FAULTS)
        due = began + every
        while time.time() < began + seconds:
            assert training.process is not None
            assert training.process.poll() is None, training.console()[-3000:]
            if time.time() >= due:
                fault = next(faults)
                print(f"  {training.name}: {time.time() - began:.0f} s: {fault}", flush=True)
                getattr(training, fault)()
                due += every
            time.sleep(0.2)
        ended = time.time()
    finally:
        training.close()
    rows = [row for row in training.completed() if row[0] <= ended]
    # A repeated step counts once.
    distance = rows[-1][1] if rows else 0
    return distance * STEP_TIME / seconds, distance, len(rows) - distance


def check_metrics(folder: Path, distance: int) -> str:
    """Return whether the recorded loss curve has every step."""
    (path,) = folder.glob("**/metrics.jsonl")
    steps = {json.loads(line)["step"] for line in path.read_text().splitlines()}
    missing = sorted(set(range(1, distance + 1)) - steps)
    return (
        f"{len(missing)} of {distance} steps have no loss: {missing[:10]}"
        if missing
        else "the loss of every step was recorded"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--every", type=float, default=30.0, help="seconds between faults")
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    describe(f"goodput over {args.minutes:g} minutes, a fault every {args.every:g} s")
    rows, shares, metrics = {}, "", ""
    with tempfile.TemporaryDirectory() as folder:
        for kind in (Paceline, Torchrun):
            home = Path(folder) / kind.name
            training = kind(
                home,
                ranks=args.ranks,
                steps=10**9,
                step_time=STEP_TIME,
                per_epoch=PER_EPOCH,
                hang_timeout=HANG_TIMEOUT,
            )
            rows[kind.name] = measure(training, seconds=args.minutes * 60, every=args.every)
            if kind is Paceline:
                metrics = check_metrics(home / "runs", rows[kind.name][1])
                (events,) = (home / "runs").glob("**/events")
                spent = compute_goodput(read_events(events))
                shares = " · ".join(
                    f"{name} {spent.share(name):.0%}" for name in SHARES if spent.seconds[name] > 0
                )
    show(
        ["", "goodput", "useful steps", "repeated steps"],
        [
            [name, f"{good:.0%}", str(count), str(again)]
            for name, (good, count, again) in rows.items()
        ],
    )
    print(f"paceline: {metrics}; from its events: {shares}")
    ratio = rows["paceline"][0] / rows["torchrun"][0]
    print(f"paceline's goodput is {ratio:.2f} times torchrun's (target: at least {TARGET})")


if __name__ == "__main__":
    main()
