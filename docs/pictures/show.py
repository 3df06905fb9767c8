"""Write docs/pictures/show.svg: `paceline show` of a run that failed once.  python
docs/pictures/show.py [FILE]
"""

from __future__ import annotations

import io
import json
import math
import random
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.theme import Theme
from sample_runs import HOUR, SampleRuns
from top import without_remote_fonts

from paceline.cli.commands.show import show_run
from paceline.cli.console import THEME
from paceline.contract.run_folder import RunFolder
from paceline.watch.details import read_details
from paceline.watch.records import read_record

HERE = Path(__file__).parent
WIDTH = 100
SECONDS = 1.9  # per step
SAVED, FAILED, LAST = 3000, 3400, 6000  # steps


def make_run(samples: SampleRuns) -> RunFolder:
    """A job of two nodes whose rank 11 failed after its last save."""
    run = samples.add(
        "gpt-1.3b", age=4 * HOUR, job="48211", state="COMPLETED", program="pretrain.py", nodes=2
    )
    record = json.loads(run.run_json.read_text())
    run.run_json.write_text(json.dumps({**record, "style": "fork", "cwd": "/home/ada/llm"}))
    began = samples.now - 3.8 * HOUR
    first = {"device": 1.2, "rendezvous": 2.0, "process_group": 6.0, "setup": 19.0}
    restarted = {**first, "restore": 14.0}
    common = {"job_start": "48211-0", "index": 0}
    at = began + 75
    failed = at + 92 + FAILED * SECONDS
    again = failed + 5
    done = again + 120 + (LAST - SAVED) * SECONDS
    samples.events(
        run,
        {"time": began, "event": "node", "nodelist": "gpu[07-08]", **common},
        {"time": began + 21, "event": "started", **common},
        {"time": began + 22, "event": "launch", "attempt": 1, "ranks": [0]},
        {"time": at, "event": "training", "step": 0, "seconds": first},
        {"time": at, "event": "total_steps", "steps": LAST},
        {
            "time": at + 92,
            "event": "first_step",
            "step": 1,
            "seconds": {**first, "first_batch": 4.0, "first_step": 88.0},
        },
        *saves(at + 92, 0, SAVED),
        {
            "time": failed,
            "event": "failed",
            "attempt": 1,
            "step": FAILED,
            "waited": 0.04 * FAILED * SECONDS,
        },
        {"time": again, "event": "launch", "attempt": 2, "ranks": [0]},
        {"time": again + 60, "event": "training", "step": SAVED, "seconds": restarted},
        {"time": again + 60, "event": "total_steps", "steps": LAST},
        {
            "time": again + 120,
            "event": "first_step",
            "step": SAVED + 1,
            "seconds": {**restarted, "first_batch": 4.0, "first_step": 56.0},
        },
        *saves(again + 120, SAVED, LAST),
        {
            "time": done,
            "event": "done",
            "attempt": 2,
            "step": LAST,
            "waited": 0.04 * (LAST - SAVED) * SECONDS,
        },
    )
    for number, verdict in ((1, "failed"), (2, "done")):
        attempt = run.attempt(number)
        attempt.path.mkdir()
        attempt.verdict.write_text(f"{verdict}\n")
    failure = {
        "rank": 11,
        "host": "gpu08",
        "type": "RuntimeError",
        "message": "CUDA error: uncorrectable ECC error",
        "where": "pretrain.py:88 in train_step: loss = model(tokens)",
    }
    run.attempt(1).failure.write_text(json.dumps(failure))
    job_start = run.job_start("48211-0")
    job_start.path.mkdir(parents=True)
    job_start.verdict.write_text("done\n")
    run.claims.mkdir()
    (run.claims / "1").symlink_to("48211-0")
    write_metrics(run, at)
    samples.sample_nodes(run, ["gpu07", "gpu08"], gpus=8, step=LAST)
    return run


def saves(began: float, first: int, last: int) -> list[dict[str, float | str]]:
    steps = range(first + 500, last + 1, 500)
    return [
        {
            "time": began + (step - first) * SECONDS,
            "event": "saving",
            "step": step,
            "blocked": 5.0,
            "waited": 0.04 * (step - first) * SECONDS,
        }
        for step in steps
    ]


def write_metrics(run: RunFolder, began: float) -> None:
    chance = random.Random(3)
    with run.metrics.open("w") as out:
        for step in range(10, LAST + 1, 10):
            values = {
                "step": step,
                "time": began + step * SECONDS,
                "loss": 2.2 + 8.4 * math.exp(-step / 420) + chance.gauss(0, 0.06),
                "accuracy": 0.6 * (1 - math.exp(-step / 1500)) + chance.gauss(0, 0.006),
                "lr": 3e-4 * min(step / 500, 0.5 * (1 + math.cos(math.pi * step / LAST))),
                "seconds": SECONDS,
                "data_wait": 0.04,
                "tokens_per_second": 524288 / SECONDS * chance.uniform(0.97, 1),
            }
            out.write(json.dumps(values) + "\n")


def draw(scratch: Path) -> str:
    samples = SampleRuns(scratch)
    record = read_record(make_run(samples), samples.query)
    out = Console(
        theme=Theme(THEME),
        width=WIDTH,
        file=io.StringIO(),
        record=True,
        force_terminal=True,
        color_system="truecolor",
        highlight=False,
    )
    show_run(record, read_details(record), out)
    svg = out.export_svg(title="paceline show gpt-1.3b")
    return without_remote_fonts(svg).replace(str(scratch), "/scratch/ada/runs")


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "show.svg"
    with tempfile.TemporaryDirectory() as folder:
        out.write_text(draw(Path(folder)), encoding="utf-8")


if __name__ == "__main__":
    main()
