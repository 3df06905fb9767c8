"""A metrics file is read as it grows."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from paceline.watch.curves import LARGE, SAMPLES, Curves, MetricsReader


def test_reads_only_what_is_new_and_complete(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsReader(path)
    assert list(file.read_new()) == []
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [record["step"] for record in file.read_new()] == [1, 2]
    assert list(file.read_new()) == []
    with path.open("a") as out:
        out.write('ep": 3}\nnot json\n[1]\n{"step": 4}\n')
    assert [record["step"] for record in file.read_new()] == [3, 4]


def test_reads_a_file_that_became_shorter_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    file = MetricsReader(path)
    assert len(list(file.read_new())) == 2
    path.write_text('{"step": 7}\n')
    assert [record["step"] for record in file.read_new()] == [7]


def test_a_large_file_is_sampled_evenly_and_then_followed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with path.open("w") as out:
        for step in range(150_000):
            rare = ', "accuracy": 0.5' if step % 1000 == 0 else ""
            out.write(
                f'{{"step": {step}, "time": {step}.5, "loss": {1 / (step + 1)}, "note": "{"x" * 60}"{rare}}}\n'
            )
    assert path.stat().st_size > LARGE
    file, curves = MetricsReader(path), Curves()
    steps = [record["step"] for record in file.read_new()]
    assert file.is_sampled
    assert len(steps) < 60_000
    assert steps == sorted(set(steps)), "each line once, in order"
    assert (steps[0], steps[-1]) == (0, 149_999)
    assert max(right - left for left, right in pairwise(steps)) < 150_000 / SAMPLES * 1.2
    assert list(file.read_new()) == []
    with path.open("a") as out:
        out.write('{"step": 150000}\n')
    assert [record["step"] for record in file.read_new()] == [150_000]
    curves.add(MetricsReader(path).read_new())
    assert curves.curve("loss").values[0] == 1.0
    assert len(curves.curve("accuracy").values) > 20, "also what is logged rarely"


def test_a_large_file_of_long_lines_is_sampled_too(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "x": "{"x" * 30_000}"}}\n' for step in range(1200)))
    steps = [record["step"] for record in MetricsReader(path).read_new()]
    assert steps == sorted(set(steps))
    assert len(steps) > 400
