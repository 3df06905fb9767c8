from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.contract.hostlist import compress, expand, rank_table
from paceline.errors import UsageError

TABLE = [
    ("a", ["a"]),
    ("a,b", ["a", "b"]),
    ("n[1-3]", ["n1", "n2", "n3"]),
    ("n[08-10,3],login1", ["n08", "n09", "n10", "n3", "login1"]),
    ("r[1-2]n[1-2]-ib", ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib"]),
    ("", []),
]


@pytest.mark.parametrize(("text", "hosts"), TABLE)
def test_expand(text: str, hosts: list[str]) -> None:
    assert expand(text) == hosts


@pytest.mark.parametrize("text", ["n[1-", "n[3-1]", "n[a-b]", "n[1]]", "n[[1]]", "n[]"])
def test_what_is_no_host_list_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a host list"):
        expand(text)


def test_compress_makes_ranges() -> None:
    assert compress(["n09", "n10", "n11", "n13", "x", "y1"]) == "x,n[09-11,13],y1"
    assert compress([f"gpu{n}" for n in range(1, 4097)]) == "gpu[1-4096]"


names = st.builds(
    "{}{}".format, st.sampled_from(["a", "gpu-", "r1n", ""]), st.from_regex(r"[0-9]{1,4}", fullmatch=True)
)


@settings(deadline=None, derandomize=True)
@given(st.lists(names | st.sampled_from(["login", "big"]), unique=True))
def test_expanding_what_was_compressed_gives_the_same_hosts(hosts: list[str]) -> None:
    assert sorted(expand(compress(hosts))) == sorted(hosts)


def test_ranks_are_dealt_node_by_node() -> None:
    table = rank_table(["a", "b"], 2)
    assert [(seat.rank, seat.host, seat.local_rank) for seat in table] == [
        (0, "a", 0), (1, "a", 1), (2, "b", 0), (3, "b", 1),
    ]  # fmt: skip
