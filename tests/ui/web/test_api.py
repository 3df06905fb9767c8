"""What pages are told about runs, over HTTP."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from paceline.contract.run_folder import RunFolder
from paceline.ui.run_reader import MAX_LINES, RunReader, Wanted
from tests.ui.web.conftest import Served
from tests.ui.web.folders import make_run, write_metrics

RUN = "20260101-120000-aaaa"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the runs whenever somebody asks, and not once a second."""
    monkeypatch.setattr("paceline.ui.web.rows.INTERVAL", 0.0)
    monkeypatch.setattr("paceline.ui.web.rows.IDLE_SHARE", 0)


@pytest.fixture
def client(served: Served) -> httpx.Client:
    return httpx.Client(base_url=served.base, cookies=served.cookies, trust_env=False, timeout=60)


def test_runs_and_one_run(client: httpx.Client, scratch: Path) -> None:
    assert client.get("api/runs").json()["runs"] == []
    make_run(scratch, name="<script>")
    (row,) = client.get("api/runs").json()["runs"]
    assert (row["run_id"], row["name"], row["step"], row["loss"]) == (RUN, "<script>", 19, 0.05)
    assert client.get(f"api/runs/{RUN}").json()["overview"]["run_id"] == RUN
    assert client.get("api/runs/nothing").status_code == 404


def test_curves_grow(client: httpx.Client, scratch: Path) -> None:
    folder = make_run(scratch)
    answer = client.get(f"api/runs/{RUN}/curves").json()
    assert {curve["name"] for curve in answer["curves"]} == {"loss", "samples_per_second"}
    write_metrics(folder, range(20, 25))
    later = client.get(f"api/runs/{RUN}/curves?name=loss&name=nothing").json()
    (curve,) = later["curves"]
    assert curve["steps"] == list(range(25))
    assert len(curve["times"]) == len(curve["values"]) == 25


def test_numbers_that_json_lacks_become_null(client: httpx.Client, scratch: Path) -> None:
    folder = make_run(scratch)
    with open(folder.metrics, "a") as file:
        file.write('{"step": 20, "time": 1e9, "loss": NaN}\n')
    answer = client.get("api/runs")

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    (row,) = json.loads(answer.text, parse_constant=refuse)["runs"]
    assert row["loss"] is None


def test_plotly_comes_from_its_package_once(client: httpx.Client) -> None:
    first = client.get("plotly/plotly.min.js")
    assert first.headers["content-encoding"] == "gzip"
    assert "plotly.js" in first.text[:100]
    again = client.get("plotly/plotly.min.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_trials_of_sweeps_are_rows_too(client: httpx.Client, scratch: Path) -> None:
    make_run(scratch)
    sweep = scratch / "digits" / "first" / "lr"
    make_run(sweep.parent, "3", project="lr", experiment="trials")
    (sweep / "sweep.json").write_text("{}")
    rows = {row["run_id"]: row for row in client.get("api/runs").json()["runs"]}
    assert (rows["3"]["sweep"], rows["3"]["trial"], rows[RUN]["sweep"]) == ("lr", 3, "")
    assert client.get("api/runs/lr-3").json()["overview"]["path"] == str(sweep / "trials" / "3")
    assert client.get("api/runs/3").status_code == 404
    assert client.get("api/runs/lr-4").status_code == 404


def test_a_sweep_is_not_read_for_each_page(
    client: httpx.Client, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(scratch)
    (scratch / "digits" / "first" / "lr").mkdir()
    (scratch / "digits" / "first" / "lr" / "sweep.json").write_text('{"metric": "loss"}')
    rows = client.get("api/runs").json()
    assert [sweep["name"] for sweep in rows["sweeps"]] == ["lr"]
    first = client.get("api/sweeps/lr").json()
    assert first["trials"] == []
    monkeypatch.setattr(
        "paceline.ui.web.app.read_sweep", lambda *_: pytest.fail("it was read again")
    )
    assert client.get("api/sweeps/lr").json() == first
    assert client.get("api/sweeps/other").status_code == 404


def reader_of(folder: RunFolder) -> RunReader:
    return RunReader(folder, lambda jobs: {}, Wanted())


def read(reader: RunReader) -> tuple[bool, list[str]]:
    news = reader.read()
    return news.whole_log, [line.text for line in news.lines]


def test_a_page_never_misses_lines_without_a_sign(scratch: Path) -> None:
    folder = make_run(scratch, log={0: ["first"]})
    reader = reader_of(folder)
    assert read(reader) == (True, ["first"])
    with open(folder.attempt(1).log(0), "a") as file:
        file.write("second\n")
    assert read(reader) == (False, ["second"])
    assert read(reader) == (False, [])
    with open(folder.attempt(1).log(0), "a") as file:
        file.writelines(f"{number}\n" for number in range(MAX_LINES + 1))
    is_whole, lines = read(reader)
    assert (is_whole, lines[-1]) == (True, str(MAX_LINES))


def test_the_last_line_of_a_run_may_have_no_end(scratch: Path) -> None:
    folder = make_run(scratch, log={0: ["first"]})
    with open(folder.attempt(1).log(0), "a") as file:
        file.write("last")
    reader = reader_of(folder)
    assert read(reader) == (True, ["first"])
    assert read(reader) == (False, [])
    folder.claims.mkdir()
    (folder.claims / "1").symlink_to("7-0")
    folder.job_start("7-0").path.mkdir(parents=True)
    folder.job_start("7-0").verdict.write_text("done\n")
    assert read(reader) == (False, ["last"])


def test_a_page_forgets_what_a_restart_has_undone(scratch: Path) -> None:
    folder = make_run(scratch, steps=20)
    reader = reader_of(folder)
    assert reader.read().whole_curves
    write_metrics(folder, range(10, 15))
    news = reader.read()
    assert news.whole_curves
    assert news.curves[0].steps == list(range(15))
