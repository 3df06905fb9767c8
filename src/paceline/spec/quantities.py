"""Durations ("90m", "1-00:00:00") and sizes ("32G") as people write them."""

from __future__ import annotations

import math
import re

_UNITS_OF_TIME = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_WORDS = "sec secs second seconds min mins minute minutes hr hrs hour hours day days week weeks"
_UNIT_OF = {word: word[0] for word in (*_UNITS_OF_TIME, *_WORDS.split())}
_MEBIBYTES = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0 * 1024}

A_TIME = "a duration such as 90m, 2h30m or 1-12:00:00"
# seconds; Slurm stores minutes in 32 bits, and wraps around without a word
MAX_DAYS = 3650
MAX_TIME_LIMIT = MAX_DAYS * 86400
MAX_SECONDS = 10 * MAX_TIME_LIMIT
MAX_MEBIBYTES = 1024 * 1024 * 1024


def parse_time_limit(value: object) -> int:
    """Return the seconds of a time limit. A bare number in quotes counts minutes, as in sbatch."""
    if isinstance(value, int):  # minutes to Slurm, seconds in our other keys
        raise ValueError('a duration such as "30m" or "2:30:00"')
    text = str(value).strip().lower()
    if text in ("unlimited", "infinite"):
        raise ValueError(
            "a duration such as 7d: the run saves before the limit and continues in the next job"
        )
    seconds = parse_seconds(f"{text}m" if text.isdecimal() else value)
    if not 0 < seconds <= MAX_TIME_LIMIT:
        raise ValueError(f"a time limit above zero, e.g. 30m, and at most {MAX_DAYS}d")
    return seconds


def parse_seconds(value: object) -> int:
    """Return the seconds of a duration: a whole number, "90m", "1d12h", or Slurm's
    "days-hours[:minutes[:seconds]]".

    Units may be words: "5min", "2 hours".
    """
    seconds = _parse_seconds(value)
    if seconds > MAX_SECONDS:
        raise ValueError(f"at most {MAX_SECONDS // 86400}d")
    return round(seconds)


def _parse_seconds(value: object) -> float:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if not isinstance(value, str) or not value.isascii():
        raise ValueError(A_TIME)
    text = value.strip().lower()
    if re.fullmatch(r"(\d+(\.\d+)?\s*[a-z]+\s*)+", text):
        parts = re.findall(r"(\d+(?:\.\d+)?)\s*([a-z]+)", text)
        if all(word in _UNIT_OF for _, word in parts):
            return sum(float(amount) * _UNITS_OF_TIME[_UNIT_OF[word]] for amount, word in parts)
    if days := re.fullmatch(r"(\d+)-(\d+)(?::(\d\d?))?(?::(\d\d?))?", text):
        return _total(*days.groups())
    if clock := re.fullmatch(r"(?:(\d+):)?(\d+):(\d\d?)", text):
        hours, minutes, seconds = clock.groups()
        if hours is None or len(minutes) <= 2:
            return _total("0", hours, minutes, seconds)
    # A bare number in quotes means minutes to Slurm and seconds to most people, so it is an error
    # here.
    raise ValueError(A_TIME)


def _total(*parts: str | None) -> float:
    return sum(
        float(part or 0) * unit for part, unit in zip(parts, (86400, 3600, 60, 1), strict=True)
    )


def slurm_time(seconds: int) -> str:
    """Return Slurm's "days-hours:minutes:seconds", without the days if there are none."""
    days, rest = divmod(int(seconds), 86400)
    clock = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock


def show_seconds(seconds: float) -> str:
    """Return a duration for people: "1d 2h", "90 s", "3m 20s"; "?" for inf and nan."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 100:
        return f"{seconds:.0f} s"
    rest, parts = round(seconds), []
    for unit in ("d", "h", "m", "s"):
        amount, rest = divmod(rest, _UNITS_OF_TIME[unit])
        if amount:
            parts.append(f"{amount}{unit}")
    return " ".join(parts[:2])


def parse_mebibytes(value: object) -> int:
    """Return mebibytes, as Slurm counts memory: "32G", "512M", "1.5TB". The unit is required."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        raise ValueError(f'a size with its unit, in quotes, e.g. "{value}G"')
    match = re.fullmatch(
        r"(\d+(?:\.\d+)?)([KMGT])(I?B)?", str(value).replace(" ", "").upper(), re.A
    )
    mebibytes = float(match[1]) * _MEBIBYTES[match[2]] if match else 0
    if not 1 <= mebibytes <= MAX_MEBIBYTES:
        raise ValueError(f"a size such as 512M, 32G or 1.5T, at most {MAX_MEBIBYTES // 1024**2}T")
    return round(mebibytes)


def slurm_size(mebibytes: int) -> str:
    """Return "32G" if that is exact, else "33000M"."""
    return f"{mebibytes // 1024}G" if mebibytes % 1024 == 0 else f"{mebibytes}M"
