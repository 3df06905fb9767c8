"""Amounts as people write them: times ("90m", "1-00:00:00") and sizes ("32G")."""

from __future__ import annotations

import re

_UNITS_OF_TIME = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_MEBIBYTES = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0 * 1024}

A_TIME = 'a time such as "90m", "2h30m", "12:00:00" or "1-00:00:00"'
A_SIZE = 'a size such as "512M", "32G" or "1.5T"'


def parse_seconds(value: object) -> int:
    """Seconds: a whole number as it is, "90m", "1d12h", or Slurm's own "[days-]hours:minutes:seconds"."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if not isinstance(value, str):
        raise ValueError(A_TIME)
    text = value.strip().lower()
    if re.fullmatch(r"(\d+(\.\d+)?[smhdw]\s*)+", text):
        parts = re.findall(r"(\d+(?:\.\d+)?)([smhdw])", text)
        return round(sum(float(amount) * _UNITS_OF_TIME[unit] for amount, unit in parts))
    clock = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d)(?::(\d\d))?", text)
    if clock is None:
        # A bare number in quotes means minutes to Slurm and seconds to most people: neither is guessed.
        raise ValueError(A_TIME)
    days, first, second, third = clock.groups()
    if days is not None or third is not None:  # hours:minutes[:seconds]
        seconds = int(first) * 3600 + int(second) * 60 + int(third or 0)
    else:  # Slurm reads "a:b" as minutes:seconds
        seconds = int(first) * 60 + int(second)
    return int(days or 0) * 86400 + seconds


def slurm_time(seconds: int) -> str:
    """Slurm's "days-hours:minutes:seconds", with the days left out when there are none."""
    days, rest = divmod(int(seconds), 86400)
    clock = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock


def show_seconds(seconds: float) -> str:
    """A time as people say it: "1d 2h", "90 s", "3m 20s"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    rest, words = round(seconds), []
    for unit in ("d", "h", "m", "s"):
        amount, rest = divmod(rest, _UNITS_OF_TIME[unit])
        if amount:
            words.append(f"{amount}{unit}")
    return " ".join(words[:2])


def parse_mebibytes(value: object) -> int:
    """Mebibytes, as Slurm counts memory: "32G", "512M", "1.5TB"; a size needs its unit."""
    if isinstance(value, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])(?:i?B)?", value.strip(), re.IGNORECASE)
        if match:
            mebibytes = float(match[1]) * _MEBIBYTES[match[2].upper()]
            if mebibytes >= 1:
                return round(mebibytes)
    raise ValueError(A_SIZE)


def slurm_size(mebibytes: int) -> str:
    """ "32G" where that is exact, else "33000M"."""
    return f"{mebibytes // 1024}G" if mebibytes % 1024 == 0 else f"{mebibytes}M"
