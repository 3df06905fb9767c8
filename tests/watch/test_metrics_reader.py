"""A metrics file is read as it grows."""

from __future__ import annotations

from pathlib import Path

from paceline.watch.metrics import MetricsReader


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
