"""What `paceline top` writes about one run."""

from __future__ import annotations

from dataclasses import replace

from paceline.ui.terminal.facts import facts, heading, plot
from paceline.ui.terminal.screens import help_text
from paceline.watch.details import AttemptDetails, Failure, NodeDetails, RankDetails, RunDetails
from paceline.watch.goodput import SHARES, Goodput
from paceline.watch.metrics import Curve
from tests.ui.terminal.test_rows import RUN

GB = 2**30
GPU = {"name": "NVIDIA H100", "memory": 80 * GB}


def node(host: str, *, gpus: int) -> NodeDetails:
    sample = {
        "time": 1.0,
        "cpu": 50.0,
        "memory": 8 * GB,
        "gpus": [{"busy": 97, "memory": 40 * GB}] * gpus,
    }
    return NodeDetails(
        0, host, 64, 256 * GB, [GPU] * gpus, [sample, {"time": 2.0, "error": "no descriptors"}]
    )


DETAILS = RunDetails(
    overview=RUN,
    place="/scratch/1a2b",
    command="paceline submit train.py",
    config={"lr": 0.1},
    settings={},
    code={},
    attempts=[AttemptDetails(1, "4711-1", 1.0, None, "", None)],
    failure=None,
    timeline=[],
    goodput=Goodput(
        {**dict.fromkeys(SHARES, 0.0), "queued": 10.0, "training": 80.0, "lost": 10.0},
        {"training": {"data": 5.0}},
        failures=1,
    ),
    nodes=[node("node1.example.org", gpus=8), node("node2", gpus=1)],
    ranks=[
        RankDetails(each, "node1", "running", 250, 0.5, 0.0, 0.1, each == 11) for each in range(16)
    ],
    checkpoints=[],
    commands={"logs": "paceline logs 1a2b"},
)


def test_a_cancelled_run_says_why_it_ended() -> None:
    run = replace(
        RUN, status="cancelled", is_over=True, detail="by you; can continue from step 425"
    )
    text = facts(replace(DETAILS, overview=run), 80).plain
    assert "status    cancelled (by you; can continue from step 425)" in text


def test_everything_fits_into_a_narrow_pane() -> None:
    text = facts(DETAILS, 44).plain.replace("\u00a0", " ")
    assert all(len(line) <= 44 for line in text.splitlines()), text
    for part in (
        "250 of 1000 (25%)",
        "left",
        "training 80%",
        "queued 10%",
        "lost 10%",
        "(waiting for data",
        "node1",
        "CPU",
        "memory",
        "8 GPUs",
    ):
        assert part in " ".join(text.split()), part
    for mark in ("█ training", "░ queued", "x lost"):  # not by colours alone
        assert mark in text, mark
    goodput = next(line for line in text.splitlines() if line.startswith("goodput"))
    assert goodput.count("░") == goodput.count("x") > 0
    assert "saving" not in text
    assert "node1.example" not in text


def test_the_slow_rank_has_a_mark_and_is_named_in_words() -> None:
    text = facts(DETAILS, 60).plain
    assert "ranks     ■■■■■■■■■■■▲■■■■" in text
    assert "16 running · 500 ms per step" in text
    assert "slow      rank 11 on node1" in text
    assert "step 250" not in text.partition("ranks")[2]
    whole = facts(DETAILS, 60, whole=True).plain
    assert "paceline submit train.py" in whole
    assert "lr=0.1" in whole


def test_a_failure_shows_its_rank_and_the_end_of_its_traceback() -> None:
    trace = (
        "Traceback:\n"
        + "\n".join(f"  frame {number}" for number in range(40))
        + "\nValueError: \x1b[2Jbad [/x]"
    )
    failed = Failure(2, 3, "node2", "ValueError: bad [/x]", "train.py:9", trace)
    details = replace(DETAILS, overview=replace(RUN, is_over=True, status="failed"), failure=failed)
    text = facts(details, 80).plain
    assert text.startswith("traceback of rank 3 on node2, attempt 2")
    assert "frame 39" in text
    assert "frame 3\n" not in text
    assert "bad [/x]" in text
    assert "\x1b" not in text


def test_broken_samples_and_hostile_names_are_shown_as_far_as_they_go() -> None:
    odd = NodeDetails(
        0, "a\x1b[31mb", None, None, [], [{"cpu": "x", "gpus": [1, {"busy": float("nan")}]}]
    )
    odd_run = replace(
        RUN, name="[b]x\n", loss=float("nan"), loss_name="\x9b", detail="why\x07", step=None
    )
    details = replace(DETAILS, overview=odd_run, nodes=[odd], config={"\x1b[H": "\x1b[H"})
    text = facts(details, 50, whole=True).plain + heading(odd_run).plain
    assert "[b]x" in text
    assert all(each.isprintable() or each in "\n\u00a0" for each in text)


def test_a_curve_fills_its_pane() -> None:
    curve = Curve("[b]loss\x1b[2J", [0, 50, 100], [0.0, 1.0, 2.0], [4.0, 1.0, 2.0])
    lines = plot(curve, 40, 8).plain.splitlines()
    assert lines[0] == "[b]loss 2  lowest 1"
    assert lines[1].startswith("  4 ┤⠑")
    assert len(lines) == 8
    assert max(map(len, lines)) <= 40
    assert lines[-1].endswith("100")
    assert len(plot(replace(curve, values=[1.0] * 3), 40, 8).plain.splitlines()) == 8
    assert plot(curve, 5, 2).plain == "[b]l…"
    assert plot(Curve("none", [], [], []), 40, 8).plain == "none"


def test_the_help_fits_24_rows_of_80_columns() -> None:
    lines = help_text().plain.splitlines()
    assert len(lines) <= 22  # and a border
    assert max(map(len, lines)) <= 72


def test_attempts_say_how_they_ended() -> None:
    made = [
        AttemptDetails(1, "6-0", 1.0, 61.0, "stopped", None),
        AttemptDetails(2, "6-0", 70.0, None, "", None),
    ]
    text = facts(replace(DETAILS, attempts=made), 80, whole=True).plain
    assert "attempt 1 stopped after 60 s" in text
    assert "\nattempt 2 runs" in text
