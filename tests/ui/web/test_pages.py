"""The pages in a real browser: what appears, grows and ends without a reload, and what hostile names do (nothing)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paceline.contract.run_folder import RunFolder
from paceline.sweep.report import find_sweeps, read_sweep_overview
from tests.sweep.folders import end, grid, make_sweep, record_jobs
from tests.ui.web.conftest import Console, Served, serve_here
from tests.ui.web.folders import NOW, make_run, write_metrics

SCRIPT = """\
import time
from pathlib import Path
import paceline
with paceline.session(cpu=True) as run:
    run.config({"lr": 0.5})
    for step in run.steps(range(2000)):
        run.log(loss=1 / (1 + step))
        time.sleep(0.02)
        if Path("go").exists() and step > 40:
            break
print("the end")
"""
HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"


def enter(page: Any, served: Served) -> None:
    """Open the link; it leads on to the page."""
    page.goto(served.link)
    page.locator(".brand").wait_for()


@dataclass
class Shared:
    """One server and one tab for most tests: loading the page takes longer than what they look at."""

    scratch: Path
    served: Served
    page: Any
    console: Console

    def open(self, route: str = "") -> Any:
        """Show another page, without a reload."""
        self.page.goto(f"{self.served.base}#/{route}")
        return self.page


@pytest.fixture(scope="module")
def module_tab(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    scratch, console = tmp_path_factory.mktemp("scratch"), Console()
    with serve_here(scratch) as served:
        context = chromium.new_context(viewport={"width": 1280, "height": 800})
        context.set_default_timeout(60_000)
        tab = context.new_page()
        console.watch(tab)
        enter(tab, served)
        yield Shared(scratch, served, tab, console)
        context.close()


@pytest.fixture
def shared(module_tab: Shared) -> Iterator[Shared]:
    """The tab, as a test before may have left it, at the list of runs. It must not complain."""
    module_tab.console.problems.clear()
    module_tab.page.set_viewport_size({"width": 1280, "height": 800})
    yield module_tab
    module_tab.page.unroute_all()
    module_tab.open("cluster")  # the list of runs begins anew with the next test
    assert not module_tab.console.problems


def drawn_until(page: Any, step: float, metric: str = "loss") -> None:
    """Wait until the chart of a metric shows this step: what is drawn, not what has arrived."""
    page.wait_for_function(
        "([name, step]) => { const card = [...document.querySelectorAll('[data-metric]')].find(c => c.dataset.metric"
        " === name); const layout = card?.querySelector('.chart')?._fullLayout; return layout && layout.xaxis.range[1]"
        " >= step; }",
        arg=[metric, step],
    )


def brightness(colour: str) -> float:
    """Return the mean of red, green and blue of `rgb(1, 2, 3)`."""
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3


def test_a_run_appears_grows_and_ends_without_a_reload(
    page: Any, served: Served, console: Console, scratch: Path, tmp_path: Path
) -> None:
    enter(page, served)
    page.get_by_text("No runs yet").wait_for()
    page.evaluate("window.sameVisit = true")
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "paceline",
        "run",
        "--cpu",
        "--nproc",
        "1",
        "--no-snapshot",
        "--name",
        "growth",
    ]
    run = subprocess.Popen(
        [*command, "train.py"],
        cwd=project,
        env={**os.environ, "PACELINE_SCRATCH": str(scratch)},
        stdout=subprocess.DEVNULL,
    )
    try:
        page.get_by_role("link", name="growth").click()
        page.locator("h1 + .pill.blue").wait_for()
        drawn_until(page, 5)
        drawn_until(page, 30)
        (project / "go").touch()
        page.locator("h1 + .pill.green", has_text="done").wait_for()
    finally:
        (project / "go").touch()
        assert run.wait(60) == 0
    page.get_by_role("tab", name="Log").click()
    page.locator(".log .text", has_text="the end").wait_for()
    page.get_by_role("link", name="Runs", exact=True).click()
    page.locator(".runs .pill", has_text="done").wait_for()
    assert page.evaluate("window.sameVisit")
    assert not console.problems


def test_the_log_is_searched_by_rank_and_text(shared: Shared) -> None:
    lines = {
        rank: [f"rank {rank} line {n} {'needle' if n == 7 else 'hay'}" for n in range(40)]
        for rank in range(2)
    }
    folder = make_run(shared.scratch, "20260101-120000-1060", log=lines)
    page = shared.open(f"run/{folder.path.name}/log")
    page.get_by_text("80 lines").wait_for()
    page.get_by_label("Search the log").fill("needle")
    page.get_by_text("2 lines match").wait_for()
    assert page.locator("mark").all_inner_texts() == ["needle", "needle"]
    page.get_by_label("Rank").select_option("1")
    page.get_by_text("1 line matches").wait_for()
    assert page.locator(".log .text").all_inner_texts() == ["rank 1 line 7 needle"]
    page.get_by_label("Search the log").fill("not there")
    page.get_by_text("No line matches").wait_for()


def test_two_runs_are_compared(shared: Shared) -> None:
    for name, rate in (("slow", 0.1), ("fast", 0.9)):
        folder = make_run(shared.scratch, f"20260101-120000-{name}", name=name)
        folder.config.write_text(json.dumps({"lr": rate, "width": 8}))
    page = shared.open()
    compare = page.get_by_role("button", name="Compare")
    assert compare.is_disabled()
    for name in ("slow", "fast"):
        page.get_by_label(f"Select {name}").check()
    compare.click()
    page.get_by_role("heading", name="Compare 2 runs").wait_for()
    drawn_until(page, 19)
    traces = page.locator("[data-metric=loss] .chart").evaluate(
        "el => el.data.map(trace => trace.line.color)"
    )
    assert len(set(traces)) == 2
    table = page.locator("tr", has_text=re.compile("^lr"))
    assert table.locator("td").all_inner_texts() == ["lr", "0.1", "0.9"]
    assert not page.get_by_text("width").count()  # it is the same in both
    page.get_by_label("Also show equal values").check()
    assert page.locator("tr", has_text="width").get_attribute("class") is None
    assert page.locator("tr", has_text=re.compile("^lr")).get_attribute("class") == "differs"
    page.get_by_label("Show slow").uncheck()
    page.wait_for_function(
        "() => document.querySelector('[data-metric=loss] .chart').data.length === 1"
    )


def test_hostile_names_are_shown_as_text(shared: Shared) -> None:
    log = {0: [HOSTILE, "\x1b[31mred\x1b[0m \x1b]0;title\x07"]}
    folder = make_run(
        shared.scratch,
        "20260101-120000-6660",
        name=HOSTILE,
        metric=HOSTILE,
        log=log,
        program=HOSTILE,
    )
    folder.config.write_text(json.dumps({HOSTILE: HOSTILE}))
    other = make_run(shared.scratch, "20260101-120000-6661", metric=HOSTILE, name=HOSTILE)
    keys = [folder.path.name, other.path.name]
    page = shared.open()
    page.locator(".runs .name", has_text=HOSTILE).first.wait_for()
    shared.open(f"run/{keys[0]}")
    page.get_by_role("heading", name=HOSTILE, level=3).wait_for()
    drawn_until(page, 19, HOSTILE)
    page.get_by_role("tab", name="Log").click()
    page.locator(".log .text").first.wait_for()
    assert page.locator(".log .text").all_inner_texts() == [HOSTILE, "red "]
    page.get_by_role("tab", name="Settings").click()
    page.get_by_text(HOSTILE).first.wait_for()
    shared.open(f"compare/{','.join(keys)}")
    drawn_until(page, 19, HOSTILE)
    point = page.locator("[data-metric] .chart .nsewdrag").first
    point.hover()  # the label has the names of the runs
    page.locator(".hoverlayer text").first.wait_for()
    assert page.evaluate("window.hacked") is None
    assert page.locator("main img, main script, .hoverlayer image, .hoverlayer a").count() == 0


def test_ten_thousand_runs_are_a_page_of_fifty(shared: Shared) -> None:
    page, address = shared.page, f"{shared.served.base}api/runs"
    make_run(shared.scratch, "20260101-120000-9999", name="real")
    while not (rows := page.request.get(address).json()["runs"]):
        time.sleep(0.1)  # the server reads the list while it answers
    row = {**rows[0], "loss_name": ""}  # its curve is not asked for
    many = [
        {**row, "path": f"{n}", "run_id": f"id-{n}", "name": f"run {n}", "created": NOW - n}
        for n in range(10_000)
    ]
    answer = {"scratch": str(shared.scratch), "time": NOW, "position": 10**9, "runs": many}
    page.route("**/api/runs", lambda route: route.fulfill(json=answer))
    shared.open()
    page.get_by_text("1–50 of 10,000").wait_for()
    assert page.locator(".runs tbody tr").count() == 50
    page.get_by_role("button", name="Next page").click()
    page.get_by_text("51–100 of 10,000").wait_for()
    page.keyboard.press("/")
    page.keyboard.type("run 9999")
    page.get_by_role("link", name="run 9999").wait_for()
    assert page.locator(".runs tbody tr").count() == 1
    page.keyboard.press("Control+A")
    page.keyboard.press("Delete")
    page.get_by_role("button", name=re.compile("^Run")).click()
    page.get_by_text("1–50 of 10,000").wait_for()
    assert page.locator(".runs .name").first.inner_text() == "run 0"
    page.get_by_role("button", name=re.compile("^Run")).click()
    page.get_by_role("link", name="run 9999").wait_for()
    page.get_by_role("button", name=re.compile("^Created")).click()  # as it was


def test_sweeps_show_trials_and_figures(shared: Shared) -> None:
    points = [
        {"lr": 10.0 ** -(n % 4 + 1), "width": 2 ** (n % 3), "kind": "ab"[n % 2]} for n in range(20)
    ]
    folder = make_sweep(shared.scratch / "project" / "default" / "se<i>arch", grid(points))
    for number in range(18):
        end(folder, number, value=1.0 + number % 4)
    end(folder, 18, "failed", error="RuntimeError: <b>no memory</b>")
    page = shared.open()
    page.get_by_role("link", name="Sweeps").click()
    page.get_by_role("link", name="se<i>arch").click()
    page.get_by_role("heading", name="Best point: trial 0").wait_for()
    for title in ("History", "Parallel coordinates", "Slices"):
        card = page.locator(".figures .card", has=page.get_by_role("heading", name=title))
        card.scroll_into_view_if_needed()
        card.locator(".main-svg").first.wait_for()
    page.get_by_label("Filter trials").fill("lr=0.1")
    page.wait_for_function("() => document.querySelectorAll('tbody tr').length === 5")
    page.get_by_text("RuntimeError: <b>no memory</b>").wait_for()


def test_a_sweep_has_one_status_and_every_row_counts_once(shared: Shared) -> None:
    scratch = shared.scratch / "chips"
    make_run(shared.scratch, "20260101-120000-c000", name="alone", project="chips")
    for name, states in {"over": ("done", "failed"), "fine": ("done", "done")}.items():
        sweep = make_sweep(scratch / "first" / name, grid({"lr": n} for n in range(3)))
        for number, state in enumerate(states):
            end(sweep, number, state, value=1.0)
        record_jobs(sweep, "7", {"2": [2]})  # of a cluster that does not answer: pending
    make_sweep(scratch / "second" / "over", grid([{"lr": 1}]))  # of the same name
    page = shared.open()
    page.get_by_label("Filter runs").fill("chips")  # the project
    page.wait_for_function("() => document.querySelectorAll('.runs tbody tr').length === 4")
    rows = page.locator(".runs tbody tr")
    assert sorted(rows.locator(".name").all_inner_texts()) == ["alone", "fine", "over", "over"]
    assert sorted(rows.locator(".pill").all_inner_texts()) == [
        "lost",
        "missing",
        "queued",
        "queued",
    ]
    chips = page.locator(".chips button")
    assert sorted(chips.all_inner_texts()) == ["lost 1", "missing 1", "queued 2"]
    make_run(shared.scratch, "20260101-120000-c001", name="", project="chips")
    page.get_by_role("link", name="20260101-120000-c001").wait_for()
    for width in (1280, 1100, 1000):  # an id is never cut
        page.set_viewport_size({"width": width, "height": 800})
        cut = "rows => rows.filter(row => row.scrollWidth > row.clientWidth).map(row => row.textContent)"
        assert page.locator(".runs .name").evaluate_all(cut) == [], width
    chips.get_by_text("queued 2").click()
    page.wait_for_function("() => document.querySelectorAll('.runs tbody tr').length === 2")
    answer = page.request.get(f"{shared.served.base}api/runs").json()
    listed = {
        sweep.path: read_sweep_overview(sweep).status for sweep in find_sweeps(shared.scratch)
    }
    # as `paceline ps` says
    assert {Path(sweep["path"]): sweep["status"] for sweep in answer["sweeps"]} == listed
    chips.get_by_text("queued 2").click()
    page.get_by_label("Filter runs").fill("")
    page.get_by_role("link", name="Sweeps").click()
    page.locator("tbody tr", has_text="fine").locator(".pill", has_text="queued").wait_for()
    page.get_by_role("link", name="fine").click()
    page.locator("h1 + .pill", has_text="queued").wait_for()


def test_keys_reach_everything(shared: Shared) -> None:
    for name in "ab":
        make_run(shared.scratch, f"20260101-120000-{name}{name}", name=f"keys {name}")
    page = shared.open()
    page.get_by_label("Filter runs").fill("keys")
    page.wait_for_function("() => document.querySelectorAll('tbody tr').length === 2")
    page.get_by_role("link", name="keys b").focus()
    page.keyboard.press("ArrowDown")
    page.wait_for_function("() => document.activeElement.textContent === 'keys a'")
    page.get_by_label("Filter runs").fill("")
    page.get_by_role("link", name="keys a").focus()
    page.keyboard.press("Enter")
    page.get_by_role("tab", name="Metrics").focus()
    page.keyboard.press("ArrowRight")
    page.get_by_role("tab", name="Log", selected=True).wait_for()
    page.keyboard.press("End")
    page.get_by_role("tab", name="Settings", selected=True).wait_for()


def test_pages_fit_a_phone(shared: Shared) -> None:
    long = "a-name-without-a-space-that-is-much-longer-than-a-phone-is-wide" * 3
    first = make_run(
        shared.scratch,
        "20260101-120000-f0e0",
        name=long,
        log={0: [long * 2], 1: [long]},
        metric=long,
        detail=long,
    )
    second = make_run(shared.scratch, "20260101-120000-f0e1", name=long)
    key, other = first.path.name, second.path.name
    shared.page.set_viewport_size({"width": 360, "height": 740})
    for route in (
        "",
        f"run/{key}",
        f"run/{key}/log",
        f"run/{key}/time",
        f"compare/{key},{other}",
        "sweeps",
        "cluster",
    ):
        shared.open("nowhere").get_by_text("There is no such page").wait_for()
        phone = shared.open(route)
        phone.locator("main h1").wait_for()
        assert phone.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), route
    shared.open(f"run/{key}/settings").get_by_role("tab", name="Settings", selected=True).wait_for()
    phone.wait_for_function(
        "() => document.querySelector('[aria-selected=true]').getBoundingClientRect().right <= window.innerWidth"
    )  # the chosen tab is in view
    assert all("There is no such page" in problem for problem in shared.console.problems)
    shared.console.problems.clear()


def test_dark_if_the_system_is(shared: Shared) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    tab = shared.open()
    tab.emulate_media(color_scheme="dark")
    dark = tab.evaluate(paper)
    tab.emulate_media(color_scheme="light")
    assert brightness(dark) < 50 < brightness(tab.evaluate(paper)) - 150


def test_an_unknown_run_and_an_unknown_page_say_so(shared: Shared) -> None:
    shared.open("nowhere").get_by_text("There is no such page").wait_for()
    shared.console.problems.clear()  # it warns about the address
    shared.open("run/nothing").get_by_text("There is no run").wait_for()
    assert all("404" in problem for problem in shared.console.problems)
    shared.console.problems.clear()


def test_a_restart_replaces_the_steps_that_it_repeats(shared: Shared) -> None:
    folder: RunFolder = make_run(shared.scratch, "20260101-120000-5e55", steps=50)
    page = shared.open(f"run/{folder.path.name}")
    drawn_until(page, 49)
    write_metrics(folder, range(30, 60))
    drawn_until(page, 59)
    steps = page.locator("[data-metric=loss] .chart").evaluate("el => Array.from(el.data[0].x)")
    assert steps == list(range(60))


def test_actions_ask_first_and_only_where_they_are_allowed(shared: Shared) -> None:
    folder = make_run(shared.scratch, "20260101-120000-aced", name="precious")
    path = f"{shared.served.base}api/runs/{folder.path.name}"
    page = shared.page
    details = page.request.get(path).json()
    shared.open(f"run/{folder.path.name}")
    page.get_by_role("heading", name="precious").wait_for()
    assert not page.get_by_role("button", name="Cancel").count()  # this server only reads
    live = {**details, "actions": ["cancel"], "overview": {**details["overview"], "is_over": False}}
    asked: list[str] = []
    page.route(path, lambda route: route.fulfill(json=live))
    page.route("**/api/events?**", lambda route: route.abort())
    page.route(
        "**/cancel",
        lambda route: asked.append(route.request.method) or route.fulfill(json={"message": "gone"}),
    )
    shared.open("sweeps").get_by_role("heading", name="Sweeps", exact=True).wait_for()
    shared.open(f"run/{folder.path.name}")
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("dialog").get_by_text("Its job leaves the queue").wait_for()
    page.get_by_role("button", name="Leave it").click()
    assert not asked
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    page.get_by_text("gone").wait_for()
    assert asked == ["POST"]
    shared.console.problems.clear()  # of the events that were cut off


@pytest.mark.parametrize(
    ("status", "checkpoints", "button", "text"),
    [
        (
            "running",
            [],
            "Cancel",
            "It has no checkpoint: all of its steps are lost, and it is not requeued. To keep",
        ),
        (
            "running",
            [{"step": 1200}],
            "Cancel",
            "Steps since its last checkpoint (step 1,200) are lost",
        ),
        (
            "failed",
            [],
            "Submit again",
            "It has no checkpoint: the script starts from the beginning, as a new job",
        ),
        (
            "failed",
            [{"step": 7}],
            "Submit again",
            "The run continues from its newest checkpoint (step 7)",
        ),
    ],
)
def test_a_question_says_what_is_lost_and_where_the_run_continues(
    shared: Shared, status: str, checkpoints: list[dict[str, int]], button: str, text: str
) -> None:
    key = f"20260101-120000-{status[0]}{len(checkpoints)}ca"
    folder = make_run(shared.scratch, key, name="asked")
    path = f"{shared.served.base}api/runs/{folder.path.name}"
    details = shared.page.request.get(path).json()
    overview = {**details["overview"], "status": status, "is_over": status == "failed", "job": "17"}
    changed = {
        "actions": ["stop", "cancel"] if status == "running" else ["requeue"],
        "checkpoints": checkpoints,
    }
    shared.page.route(
        path, lambda route: route.fulfill(json={**details, **changed, "overview": overview})
    )
    shared.page.route("**/api/events?**", lambda route: route.abort())
    page = shared.open(f"run/{key}")
    page.get_by_text("job 17 · submitted 20").wait_for()
    page.get_by_role("button", name=button, exact=True).click()
    page.get_by_role("dialog").get_by_text(text).wait_for()
    page.get_by_role("button", name="Leave it").click()
    shared.console.problems.clear()  # of the events that were cut off


def test_a_line_in_the_log_tells_where_the_next_attempt_begins(shared: Shared) -> None:
    folder = make_run(shared.scratch, "20260101-120000-a22e", log={0: ["one", "two"]})
    attempt = folder.attempt(2)
    attempt.path.mkdir()
    attempt.log(0).write_text("three\nfour\n")
    page = shared.open(f"run/{folder.path.name}/log")
    page.get_by_text("four", exact=True).wait_for()
    lines = page.locator(".log > div")
    assert [text.split()[-1] for text in lines.all_inner_texts()] == [
        "one",
        "two",
        "2",
        "three",
        "four",
    ]
    assert lines.nth(2).inner_text() == "Attempt 2"
    page.get_by_label("Attempt").select_option("2")
    page.get_by_text("2 lines", exact=True).wait_for()
    assert not page.locator(".log .attempt").count()


def test_a_constant_metric_and_the_best_of_a_sweep(shared: Shared) -> None:
    folder = make_run(shared.scratch, "20260101-120000-c057", steps=0)
    with open(folder.metrics, "a", encoding="utf-8") as file:
        file.writelines(
            json.dumps({"step": n, "time": NOW + n, "loss": 0.05}) + "\n" for n in range(5)
        )
    page = shared.open(f"run/{folder.path.name}")
    drawn_until(page, 4)
    assert page.locator("[data-metric=loss] .chart").evaluate("el => el.layout.yaxis.range") == [
        0,
        0.1,
    ]
    sweep = make_sweep(shared.scratch / "digits" / "first" / "best-of", grid([{"lr": 0.1}]))
    end(sweep, 0, value=0.0087654)
    page = shared.open()
    page.get_by_label("Filter runs").fill("best-of")
    row = page.locator("tr", has=page.get_by_role("link", name="best-of"))
    cell = row.locator(".w-loss")
    cell.get_by_text("best loss").wait_for()
    assert cell.locator("span").first.inner_text() == "0.008765"
    assert cell.evaluate("el => el.scrollWidth <= el.clientWidth")
    assert re.search(r"sweeps?$", page.locator(".head .quiet").inner_text())
    page.get_by_label("Filter runs").fill("")
