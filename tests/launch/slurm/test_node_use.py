"""What is free on a cluster, from what sinfo says."""

from __future__ import annotations

from paceline.slurm.commands import SEPARATOR
from paceline.slurm.partitions import PartitionUse, parse_node_use


def lines(*rows: tuple[str, ...]) -> str:
    return "".join("".join(f"{value:<40}{SEPARATOR}" for value in row) + "\n" for row in rows)


def test_only_nodes_that_work_have_something_free() -> None:
    text = lines(
        (
            "gpu*",
            "up",
            "1-00:00:00",
            "2",
            "mixed",
            "96/32/0/128",
            "gpu:a100:4(S:0-1)",
            "gpu:a100:3(IDX:0-1,3)",
        ),
        (
            "gpu*",
            "up",
            "1-00:00:00",
            "3",
            "idle",
            "0/192/0/192",
            "gpu:a100:4(S:0-1)",
            "gpu:a100:0(IDX:N/A)",
        ),
        (
            "gpu*",
            "up",
            "1-00:00:00",
            "1",
            "down*",
            "0/0/64/64",
            "gpu:a100:4(S:0-1)",
            "gpu:a100:0(IDX:N/A)",
        ),
        (
            "gpu*",
            "up",
            "1-00:00:00",
            "1",
            "drained",
            "0/0/64/64",
            "gpu:a100:4",
            "gpu:a100:0(IDX:N/A)",
        ),
        ("cpu", "down", "infinite", "1", "idle~", "0/64/0/64", "(null)", "(null)"),
    )
    gpu, cpu = parse_node_use(text)
    assert gpu == PartitionUse(
        "gpu", True, True, "1-00:00:00", 7, 3, 320, 224, {"a100": 20}, {"a100": 14}
    )
    assert (cpu.is_up, cpu.idle_nodes, cpu.gpus, cpu.free_gpus) == (False, 1, {}, {})


def test_gpus_without_a_type() -> None:
    (use,) = parse_node_use(
        lines(("p", "up", "infinite", "1", "mixed", "1/1/0/2", "gpu:2", "gpu:(null):1(IDX:0)"))
    )
    assert (use.gpus, use.free_gpus) == ({"": 2}, {"": 1})


def test_other_lines_are_skipped() -> None:
    assert parse_node_use("slurm_load_partitions: something\n\n") == []
