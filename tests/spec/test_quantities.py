"""Durations and sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cli.commands.wait import parse_timeout
from paceline.errors import UsageError
from paceline.spec.quantities import (
    parse_mebibytes,
    parse_seconds,
    parse_time_limit,
    show_seconds,
    slurm_size,
    slurm_time,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90m", 5400),
        ("2h", 7200),
        ("2h30m", 9000),
        ("1d 12h", 129600),
        ("45s", 45),
        ("1.5h", 5400),
        (600, 600),
        ("1-00:00:00", 86400),
        ("12:00:00", 43200),
        ("10:30", 630),
        ("1-06:30", 86400 + 6 * 3600 + 1800),
        ("1w", 604800),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("1-12:30:00", 131400),
        ("2:30:00", 9000),
    ],
)
def test_durations(text: object, seconds: int) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("30:00", 1800),
        ("2:30:00", 9000),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("1-12:30:00", 131400),
        ("90m", 5400),
        ("2h30m", 9000),
        ("90s", 90),
        (" 5 ", 300),
        ("5min", 300),
        ("4hours", 14400),
        ("4 h", 14400),
        ("1 Day 12 hrs", 129600),
        ("90 secs", 90),
        ("2 weeks", 1209600),
        ("1:5", 65),
        ("1:5:00", 3900),
        ("1-2:3", 86400 + 7200 + 180),
        ("3650d", 3650 * 86400),
    ],
)
def test_time_limits_take_all_of_slurms_forms(text: object, seconds: int) -> None:
    assert parse_time_limit(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "5x", "-5", -5, True, "1:2:3:4", "1-", "-12", "1.5", 30, "\u0663\u0660", "\u0663m", None],
)
def test_invalid_time_limits(text: object) -> None:
    with pytest.raises(ValueError, match="a duration such as"):
        parse_time_limit(text)


@pytest.mark.parametrize(
    "text", ["4294967326", "99999999999d", "3651d", "9" * 400 + "d", "9" * 5000]
)
def test_a_time_limit_that_slurm_would_not_store_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"at most 36500?d"):
        parse_time_limit(text)


@pytest.mark.parametrize("text", ["UNLIMITED", "infinite"])
def test_a_job_without_a_limit_is_rejected_with_a_reason(text: str) -> None:
    with pytest.raises(ValueError, match="the run saves before the limit"):
        parse_time_limit(text)


def test_a_command_waits_for_seconds() -> None:
    assert [parse_timeout(text) for text in ("1", " 90 ", "2m")] == [1, 90, 120]
    for text in ("x", "-1", "", "9" * 5000):
        with pytest.raises(UsageError, match="Invalid --timeout"):
            parse_timeout(text)


@pytest.mark.parametrize("text", ["0", "0m", "00:00:00", "0-0", "0.1s"])
def test_a_time_limit_is_not_zero(text: str) -> None:
    with pytest.raises(ValueError, match="a time limit above zero"):
        parse_time_limit(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "5",
        "2 hours or so",
        "2 our",
        "5 months",
        "hours",
        "h",
        "-5m",
        -5,
        True,
        1.5,
        "1:2:3:4",
        "12:000:0",
        None,
    ],
)
def test_invalid_durations(text: object) -> None:
    with pytest.raises(ValueError, match="a duration such as"):
        parse_seconds(text)


@settings(deadline=None)
@given(st.integers(0, 10**7))
def test_slurm_notation_round_trips(seconds: int) -> None:
    assert parse_seconds(slurm_time(seconds)) == seconds


@pytest.mark.parametrize(
    ("text", "mebibytes"),
    [
        ("32G", 32768),
        ("512M", 512),
        ("1.5T", 1572864),
        ("2 GiB", 2048),
        ("4gb", 4096),
        ("2048K", 2),
    ],
)
def test_sizes(text: str, mebibytes: int) -> None:
    assert parse_mebibytes(text) == mebibytes


@pytest.mark.parametrize("text", ["32", 32, "", "G", "-1G", "1K", "32 gigs", "\u0663G", None])
def test_invalid_sizes(text: object) -> None:
    with pytest.raises(ValueError, match=r"a size (such as|with its unit)"):
        parse_mebibytes(text)


@settings(deadline=None)
@given(st.integers(1, 10**8))
def test_sizes_round_trip(mebibytes: int) -> None:
    assert parse_mebibytes(slurm_size(mebibytes)) == mebibytes


def test_durations_for_people() -> None:
    assert [show_seconds(value) for value in (3, 100, 7200, 90000)] == [
        "3 s",
        "1m 40s",
        "2h",
        "1d 1h",
    ]
    assert [show_seconds(float(value)) for value in ("inf", "-inf", "nan")] == ["?"] * 3
