"""Write docs/pictures/top.svg: `paceline top` as Textual draws it.  python docs/pictures/top.py"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
import time
from pathlib import Path

from sample_runs import HOUR, SampleRuns

from paceline.ui.terminal.app import TopApp
from paceline.ui.terminal.panes import FactsPane

HERE = Path(__file__).parent
SIZE = (120, 38)


def make_runs(samples: SampleRuns) -> None:
    """A large run with a slow rank, a queued one, a sweep, and some that are over."""
    large = samples.add(
        "gpt-1.3b",
        age=2.6 * HOUR,
        job="48211",
        state="RUNNING",
        program="pretrain.py",
        nodes=2,
        hosts="gpu[07-08]",
    )
    samples.train(large, began=2.3 * HOUR, seconds=1.93, steps=4290, total=12000)
    samples.sample_nodes(large, ["gpu07", "gpu08"], gpus=8, step=4290, slow=11)
    loss = json.loads(large.metrics.read_text().splitlines()[-1])["loss"]
    samples.log(large, ["DataLoader: shard 0311 took 4.2 s to open"], rank=11)
    for step in range(4250, 4291, 5):
        samples.log(
            large, [f"step {step}  loss {loss + (4290 - step) / 900:.3f}  lr 3.0e-04  1.93 s/step"]
        )
    samples.log(
        large,
        [
            "saved checkpoints/step-00004250 in 6.1 s",
            "evaluating on 512 sequences: perplexity 9.41",
        ],
    )
    small = samples.add(
        "vit-s16", age=1.2 * HOUR, job="48230", state="RUNNING", nproc=4, hosts="gpu03"
    )
    pace, done = 0.31, 12100  # its last step was just now
    samples.train(
        small,
        began=pace * done,
        seconds=pace,
        steps=done,
        total=14000,
        floor=0.7,
        height=5.0,
        scale=900,
    )
    soon = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(samples.now + 0.7 * HOUR))
    samples.add(
        "gpt-1.3b-long",
        age=0.4 * HOUR,
        job="48260",
        state="PENDING",
        program="pretrain.py",
        nodes=8,
        reason="Resources",
        start=soon,
    )
    samples.add_sweep(
        "lr-and-width",
        ["COMPLETED"] * 13 + ["RUNNING"] * 4 + ["PENDING"] * 7,
        job="48190",
        age=3 * HOUR,
    )
    for name, age, job, state in (
        ("gpt-350m", 26 * HOUR, "47980", "COMPLETED"),
        ("gpt-350m-bf16", 31 * HOUR, "47901", "FAILED"),
        ("tokenize", 50 * HOUR, "47722", "CANCELLED"),
    ):
        over = samples.add(name, age=age, job=job, state=state)
        samples.train(
            over,
            began=age - HOUR,
            seconds=0.9,
            steps=6000 if state == "COMPLETED" else 2400,
            total=6000,
        )
        samples.end(over, "done" if state == "COMPLETED" else "failed", after=age - 2 * HOUR)


async def draw(scratch: Path, samples: SampleRuns, keys: list[str], size: tuple[int, int]) -> str:
    app = TopApp(scratch, query=samples.query)
    app.scratch = Path("/scratch/ada/runs")
    async with app.run_test(size=size) as pilot:
        await until_drawn(app)
        for key in keys:
            await pilot.press(key)
            await until_drawn(app)
        return app.export_screenshot()


async def until_drawn(app: TopApp) -> None:
    """Wait until the threads have read the selected run."""
    await asyncio.sleep(0.5)
    while app.query_one(FactsPane).details is None:
        await asyncio.sleep(0.1)
    await asyncio.sleep(0.5)


def without_remote_fonts(svg: str) -> str:
    """Pictures load nothing: any monospaced font of the reader's will do."""
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    return svg.replace(
        "Fira Code", "ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono"
    )


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "top.svg"
    size = (int(sys.argv[2]), int(sys.argv[3])) if len(sys.argv) > 3 else SIZE
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder) / "scratch"
        samples = SampleRuns(scratch)
        make_runs(samples)
        svg = asyncio.run(draw(scratch, samples, sys.argv[4:] or ["down"], size))
    out.write_text(without_remote_fonts(svg), encoding="utf-8")


if __name__ == "__main__":
    main()
