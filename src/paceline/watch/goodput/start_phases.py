"""Where the time of a start went: from the start of the ranks to the end of their first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.watch.goodput.events import ENDS

# What the runtime writes, in its order, and what people read. "ranks" is the agent's event: it
# starts the ranks.
NAMES = {
    "device": "device",
    "rendezvous": "rendezvous",
    "context": "CUDA context",
    "process_group": "process group",
    "restore": "restore",
    "setup": "set-up",
    "first_batch": "first batch",
    "first_step": "first step",
}


def describe_start_phases(events: Sequence[Mapping[str, Any]]) -> str:
    """Return the phases of the newest start that reached its first step, such as "9.4 s: import
    1.2, set-up 3.1".
    """
    began, launched, text = None, None, ""
    for event in events:
        name, is_head = event["event"], event.get("index", 0) == 0 and 0 in event.get("ranks", [0])
        if name in ENDS:
            began = launched = None
        elif name in ("node", "started", "launch", "ranks") and is_head:
            # As goodput counts: since the head agent has arrived, or since a restart.
            began = event.get("time") if began is None or name == "node" else began
            launched = event.get("time") if name == "launch" or launched is None else launched
        seconds = event.get("seconds")
        if event["event"] != "first_step" or not isinstance(seconds, Mapping):
            continue
        phases = {
            name: float(seconds[key])
            for key, name in NAMES.items()
            if isinstance(seconds.get(key), (int, float))
        }
        if isinstance(began, (int, float)) and isinstance(launched, (int, float)):
            before = float(event["time"]) - launched - sum(phases.values())
            phases = {"agents": max(0.0, launched - began), "import": max(0.0, before), **phases}
        parts = [f"{name} {value:.1f}" for name, value in phases.items() if value >= 0.05]
        text = (
            f"{sum(phases.values()):.1f} s to the end of the first "
            f"step{': ' if parts else ''}{', '.join(parts)}"
        )
        began = launched = None
    return text
