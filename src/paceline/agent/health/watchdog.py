"""Which ranks have stopped moving. Pure: it is given what the beat files of all nodes say.

Ages are told, not times: the clocks of nodes differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.contract.heartbeat_file import RUNNING

SUMMARY_EVERY = 1.0  # seconds between the summaries that a member sends the head
SUMMARY = "beats"  # their kind
_STUCK = {"T": "stopped by a signal", "t": "held by a debugger", "D": "waiting for a device or a file system"}
_SAME_MOMENT = 0.5  # beats that are this close (seconds) say nothing about who was late


@dataclass(frozen=True)
class Beat:
    """What one rank's slot says, in words that travel between nodes."""

    rank: int
    state: int  # of contract: READY, RUNNING ...
    step: int
    age: float  # seconds since the last beat
    host: str = ""
    pace: float = 0.0  # seconds per step
    process: str = ""  # the kernel's state letter for the rank's process, where it was looked up


@dataclass(frozen=True)
class Hang:
    """Ranks stand still. `laggards` are those to look at; the rest most likely wait for them."""

    laggards: list[Beat]
    seconds: float  # since anything moved
    step: int

    @property
    def hosts(self) -> list[str]:
        return sorted({beat.host for beat in self.laggards if beat.host})

    def __str__(self) -> str:
        return f"no rank has moved for {self.seconds:.0f} s; " + "; ".join(
            _told(beat) for beat in self.laggards[:8]
        )


def _told(beat: Beat) -> str:
    where = f" on {beat.host}" if beat.host else ""
    why = f" ({_STUCK[beat.process]})" if beat.process in _STUCK else ""
    return f"rank {beat.rank}{where} lags at step {beat.step}{why}"


class Watchdog:
    """Ranks that are training must beat within `timeout` seconds; 0 means never mind.

    Only those in state RUNNING count: before the first step boundary a script may compile or load for as long
    as it likes, and a rank that has saved or finished owes nothing.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout

    def check(self, beats: Iterable[Beat]) -> Hang | None:
        running = [beat for beat in beats if beat.state == RUNNING]
        if self.timeout <= 0 or not running:
            return None
        oldest = max(beat.age for beat in running)
        if oldest <= self.timeout:
            return None
        return Hang(laggards(running), oldest, min(beat.step for beat in running))


def laggards(running: list[Beat]) -> list[Beat]:
    """The ranks that the others wait for: those that the kernel holds; else the lowest step; else the oldest beat."""
    held = [beat for beat in running if beat.process in _STUCK]
    if held and len(held) < len(running):
        return held
    lowest = min(beat.step for beat in running)
    behind = [beat for beat in running if beat.step == lowest]
    oldest = max(beat.age for beat in behind)
    return sorted(
        (beat for beat in behind if oldest - beat.age <= _SAME_MOMENT),
        key=lambda beat: (-beat.age, beat.rank),
    )


class Panorama:
    """The head's view of all ranks: its own beats, and the summaries that members send about once a second."""

    def __init__(self) -> None:
        self._told: dict[int, list[Beat]] = {}

    def hear(self, message: Mapping[str, Any]) -> None:
        """Take in a member's summary (`summary`), as it arrived."""
        self._told[int(message["from"])] = [Beat(*fields) for fields in message["beats"]]

    def forget(self) -> None:
        """A new attempt begins."""
        self._told.clear()

    def all(self, own: Iterable[Beat]) -> list[Beat]:
        """All ranks. A summary that is late makes no rank older: a busy network is not a hang."""
        return [*own, *(beat for beats in self._told.values() for beat in beats)]


def summary(beats: Iterable[Beat]) -> dict[str, Any]:
    """What a member tells the head (`say(summary(...), to=0)`)."""
    rows = [[b.rank, b.state, b.step, round(b.age, 3), b.host, round(b.pace, 6), b.process] for b in beats]
    return {"kind": SUMMARY, "beats": rows}


def process_state(pid: int) -> str:
    """The kernel's letter for a process (R, S, D, T, Z ...); empty when there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
