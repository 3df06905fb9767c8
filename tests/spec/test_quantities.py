"""Times and sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.spec.quantities import parse_mebibytes, parse_seconds, show_seconds, slurm_size, slurm_time


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90m", 5400), ("2h", 7200), ("2h30m", 9000), ("1d 12h", 129600), ("45s", 45), ("1.5h", 5400), (600, 600),
        ("1-00:00:00", 86400), ("12:00:00", 43200), ("10:30", 630), ("1-06:30", 86400 + 6 * 3600 + 1800),
        ("1w", 604800),
    ],
)  # fmt: skip
def test_times(text: object, seconds: int) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "2 hours", "h", "-5m", -5, True, 1.5, "1:2:3:4", "12:0:0", None])
def test_what_is_no_time(text: object) -> None:
    with pytest.raises(ValueError, match="a time such as"):
        parse_seconds(text)


@settings(deadline=None)
@given(st.integers(0, 10**7))
def test_slurms_notation_is_read_back(seconds: int) -> None:
    assert parse_seconds(slurm_time(seconds)) == seconds


@pytest.mark.parametrize(
    ("text", "mebibytes"),
    [("32G", 32768), ("512M", 512), ("1.5T", 1572864), ("2 GiB", 2048), ("4gb", 4096), ("2048K", 2)],
)
def test_sizes(text: str, mebibytes: int) -> None:
    assert parse_mebibytes(text) == mebibytes


@pytest.mark.parametrize("text", ["32", 32, "", "G", "-1G", "1K", "32 gigs", None])
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(ValueError, match="a size such as"):
        parse_mebibytes(text)


@settings(deadline=None)
@given(st.integers(1, 10**8))
def test_a_size_is_read_back(mebibytes: int) -> None:
    assert parse_mebibytes(slurm_size(mebibytes)) == mebibytes


def test_times_as_people_say_them() -> None:
    assert [show_seconds(value) for value in (3, 100, 7200, 90000)] == ["3 s", "1m 40s", "2h", "1d 1h"]
