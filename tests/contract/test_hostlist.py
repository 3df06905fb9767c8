"""Slurm host lists."""

from __future__ import annotations

import tracemalloc

import pytest

from paceline.contract.launcher_variables import expand
from paceline.errors import UsageError

TABLE = [
    ("a", ["a"]),
    ("a,b", ["a", "b"]),
    ("n[1-3]", ["n1", "n2", "n3"]),
    ("n[08-10,3],login1", ["n08", "n09", "n10", "n3", "login1"]),
    ("r[1-2]n[1-2]-ib", ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib"]),
    ("gpu[008-009]x[1-2]", ["gpu008x1", "gpu008x2", "gpu009x1", "gpu009x2"]),
    ("", []),
]


@pytest.mark.parametrize(("text", "hosts"), TABLE)
def test_expand(text: str, hosts: list[str]) -> None:
    assert expand(text) == hosts


@pytest.mark.parametrize(
    "text", ["n[1-", "n[3-1]", "n[a-b]", "n[1]]", "n[[1]]", "n[]", "n[1-999999999]"]
)
def test_invalid_host_lists_are_rejected(text: str) -> None:
    with pytest.raises(UsageError, match="Invalid host list") as caught:
        expand(text)
    assert caught.value.message == (
        f"Invalid host list {text!r}: use names and ranges such as gpu[01-04,7],big1, at most 65,536 hosts."
    )


@pytest.mark.parametrize(
    "text",
    [
        "n[1-999][1-999]",
        "[1-65536]" * 400,
        f"n[{'1-65536,' * 400}1]",
        ",".join(["n[1-65536]"] * 400),
    ],
)
def test_a_list_of_too_many_hosts_takes_little_memory(text: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(UsageError, match="Invalid host list"):
            expand(text)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20_000_000
