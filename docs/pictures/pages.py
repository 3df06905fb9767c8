"""Write run-page.png and sweep-page.png: pages of `paceline ui` in Chromium.  python
docs/pictures/pages.py [FOLDER]
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright
from sample_runs import SampleRuns
from top import make_runs

from paceline.contract.sweep_folder import Point, Search, SweepFolder
from paceline.slurm.job_states import JobState
from paceline.ui.web.access import Access
from paceline.ui.web.app import Answers, listen, make_app, make_server

HERE = Path(__file__).parent
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


# trials of the sweep: those that are neither ended nor running wait
ENDED, RUNNING, TRIALS = 58, 4, 64
JOB = "5120"


def make_sweep(folder: Path, samples: SampleRuns) -> None:
    """A search over three parameters, of which the learning rate decides. Its last trials are
    still to come.
    """
    dice = random.Random(3)
    sweep = SweepFolder(folder)
    sweep.trials.mkdir(parents=True)
    space = {
        "lr": {"log_uniform": [1e-5, 0.1]},
        "width": {"grid": [128, 256, 512]},
        "dropout": {"uniform": [0, 0.5]},
    }
    sweep.spec.write_text(
        Search(
            name=folder.name, metric="loss", sampler="tpe", space=space, created=samples.now - 7200
        ).to_json()
    )
    points = []
    for number in range(TRIALS):
        center = -3 + 2 * (dice.random() - 0.5) * (2 if number < 20 else 0.7)
        point = {
            "lr": 10**center,
            "width": dice.choice([128, 256, 512]),
            "dropout": dice.uniform(0, 0.5),
        }
        points.append(Point(number, number, point, None).to_line())
        trial, task = sweep.trial(number), f"{JOB}_{number}"
        if number >= ENDED:
            is_running = number < ENDED + RUNNING
            samples.states[task] = JobState(task, "RUNNING" if is_running else "PENDING")
            if is_running:
                samples.add("", age=900, job=task, state="RUNNING", nproc=1, folder=trial.path)
            continue
        trial.path.mkdir()
        trial.run_json.write_text("{}")
        loss = (
            1.9 + 0.5 * abs(center + 3.1) ** 1.5 + 60 / point["width"] * 0.3 + dice.gauss(0, 0.04)
        )
        result: dict[str, Any] = {
            "state": "done",
            "value": loss,
            "started": 0.0,
            "ended": dice.uniform(600, 1500),
        }
        if number % 7 == 5:
            result |= {"state": "pruned", "step": 200 * (1 + number % 3)}
        trial.result.write_text(json.dumps(result))
    sweep.points.write_text("".join(points))
    tasks = {str(number): [number] for number in range(TRIALS)}
    sweep.jobs.write_text(
        json.dumps({"time": samples.now - 7200, "job": JOB, "submission": "1", "tasks": tasks})
        + "\n"
    )


def draw(page: Page, base: str, scratch: Path, out: Path) -> None:
    rows = page.request.get(f"{base}api/runs").json()["runs"]
    run = next(row for row in rows if row["name"] == "gpt-1.3b")
    page.goto(f"{base}#/run/{run['run_id']}")
    page.locator("[data-metric=loss] .scatterlayer path.js-line").wait_for(state="attached")
    page.get_by_label("Smoothing").fill("0.9")
    page.evaluate("() => document.activeElement.blur()")
    page.locator("[data-metric=grad_norm] .scatterlayer path.js-line").last.wait_for(
        state="attached"
    )
    _shoot(page, scratch, out / "run-page.png")
    page.goto(f"{base}#/sweep/pretrain-search")
    page.locator(".figures .main-svg").first.wait_for(state="attached")
    _shoot(page, scratch, out / "sweep-page.png")


def _shoot(page: Page, scratch: Path, path: Path) -> None:
    time.sleep(1.0)  # charts draw themselves
    place = page.locator(".place").inner_text().replace(str(scratch), "/scratch/ada/runs")
    page.evaluate("(text) => { document.querySelector('.place').textContent = text; }", place)
    page.screenshot(path=path)
    assert page.locator(".place").inner_text() == place, "the page has renewed it meanwhile"


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        scratch = Path(folder) / "scratch"
        samples = SampleRuns(scratch)
        make_runs(samples)
        make_sweep(scratch / "llm" / "default" / "pretrain-search", samples)
        access, listener = Access(), listen(0)
        server = make_server(make_app(Answers(scratch, samples.query), access))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=ARGUMENTS
            )
            page = browser.new_page(viewport={"width": 1240, "height": 860})
            port = listener.getsockname()[1]
            page.goto(access.link(port))
            page.locator(".runs tbody tr").first.wait_for()
            draw(page, f"http://127.0.0.1:{port}{access.path}", scratch, out)
            browser.close()
        finally:
            server.should_exit = True
            thread.join()


if __name__ == "__main__":
    main()
