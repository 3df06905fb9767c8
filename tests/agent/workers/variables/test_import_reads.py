"""Which variables imports read: what is looked up counts, copies of all variables do not."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator

import pytest

from paceline.agent.workers.variables.import_reads import find_difference, reads, record_reads


@pytest.fixture(autouse=True)
def here(guard: None) -> Iterator[None]:
    known = dict(reads)
    reads.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIB_MODE", "fast")
        patch.setenv("LIB_SIZE", "3")
        yield
    reads.clear()
    reads.update(known)


def pick_first() -> str:
    for name in os.environ:
        if name == "LIB_MODE":
            return os.environ[name]
    return ""


def ask_and_read() -> str:
    return os.environ["LIB_MODE"] if any(name.startswith("LIB_") for name in os.environ) else ""


@pytest.mark.parametrize(
    "read",
    [
        lambda: os.environ["LIB_MODE"],
        lambda: os.environ.get("LIB_MODE"),
        ask_and_read,
        pick_first,
        lambda: {name: os.environ[name] for name in os.environ if name == "LIB_MODE"},
        lambda: {name: os.environ[name] for name in sorted(os.environ) if name == "LIB_MODE"},
    ],
)
def test_what_is_looked_up_counts(read: Callable[[], object]) -> None:
    with record_reads():
        read()
    assert reads == {"LIB_MODE": "fast"}
    assert find_difference({"LIB_MODE": "slow", "LIB_SIZE": "4"}, reads) == "LIB_MODE"
    assert find_difference({"LIB_MODE": "fast", "LIB_SIZE": "4"}, reads) is None


@pytest.mark.parametrize(
    "copy",
    [
        lambda: dict(os.environ),
        os.environ.copy,
        lambda: {**os.environ},
        lambda: list(os.environ.items()),
        lambda: {name: text for name, text in os.environ.items() if name.startswith("LIB_")},
        lambda: subprocess.run(["true"], env={**os.environ, "X": "1"}, check=True),
    ],
)
def test_copies_do_not_count(copy: Callable[[], object]) -> None:
    with record_reads():
        copy()
    assert not {"LIB_MODE", "LIB_SIZE"} & set(reads)


def test_a_variable_is_not_missed_after_a_copy() -> None:
    with record_reads():
        copy = dict(os.environ)
        first = os.environ[next(iter(copy))]
        assert os.environ["LIB_MODE"] == "fast"
    assert set(reads) == {next(iter(copy)), "LIB_MODE"}
    assert reads["LIB_MODE"] == "fast"
    with record_reads():
        begun = [os.environ[name] for name in os.environ if name in list(copy)[:2]]
    assert begun[0] == first
    assert set(list(copy)[:2]) <= set(reads)
