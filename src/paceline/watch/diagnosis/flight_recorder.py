"""NCCL's flight recorder: which rank did not take part in a collective, from the dumps in the
attempt's folder.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

from paceline.contract.files.foreign_records import read_bounded
from paceline.contract.findings import PROBLEM, Finding
from paceline.contract.run_folder import FLIGHT_RECORDER
from paceline.watch.diagnosis.evidence import Evidence

DOCS = "docs/troubleshooting.md#nccls-flight-recorder"
MAX_DUMP = 64 << 20  # bytes


class _Plain(pickle.Unpickler):
    """Reads numbers, texts, lists and dictionaries, and refuses everything that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a dump")


def read_dump(path: Path) -> list[dict[str, Any]]:
    """Return the collectives in a dump, oldest first; empty if it cannot be read."""
    try:
        dump = _Plain(io.BytesIO(read_bounded(path, MAX_DUMP))).load()
        return [entry for entry in dump["entries"] if isinstance(entry, dict)]
    except (OSError, ValueError, KeyError, TypeError, EOFError, IndexError, pickle.UnpicklingError):
        return []


def check_flight_recorder(evidence: Evidence) -> list[Finding]:
    """Compare the last collective of each rank."""
    if evidence.attempt is None:
        return []
    dumps = {}
    for path in evidence.attempt.path.glob(f"{FLIGHT_RECORDER}*"):
        rank = path.name.removeprefix(FLIGHT_RECORDER)
        entries = read_dump(path) if rank.isdigit() else []
        if entries:
            dumps[int(rank)] = entries
    last = {rank: _last_collective(entries) for rank, entries in sorted(dumps.items())}
    known = {rank: entry for rank, entry in last.items() if entry is not None}
    if len(known) < 2:
        return []
    newest = max(entry["collective_seq_id"] for entry in known.values())
    behind = {rank: entry for rank, entry in known.items() if entry["collective_seq_id"] < newest}
    names = {str(entry.get("profiling_name")) for entry in known.values()}
    ahead = next(entry for entry in known.values() if entry["collective_seq_id"] == newest)
    facts = [_describe(rank, entry, evidence) for rank, entry in list(known.items())[:8]]
    if behind:
        ranks = ", ".join(f"{rank} on {evidence.host_of_rank(rank)}" for rank in list(behind)[:8])
        text = (
            f"Rank {ranks} did not take part in collective {newest} "
            f"({ahead.get('profiling_name')})."
        )
    elif len(names) > 1:
        text = (
            f"The ranks called different collectives at number {newest}: "
            f"{', '.join(sorted(names))}."
        )
    else:
        return []
    return [
        Finding(
            "NCCL",
            PROBLEM,
            text,
            "Every rank must call the same collectives, in the same order: look at these lines.",
            evidence=tuple(facts),
            docs=DOCS,
        )
    ]


def _last_collective(entries: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the newest collective of the default process group."""
    known = [
        entry
        for entry in entries
        if isinstance(entry.get("collective_seq_id"), int) and not entry.get("is_p2p")
    ]
    groups = [str(entry.get("pg_id", 0)) for entry in known]
    first = [entry for entry, group in zip(known, groups, strict=True) if group == min(groups)]
    return max(first, key=lambda entry: entry["collective_seq_id"], default=None)


def _describe(rank: int, entry: dict[str, Any], evidence: Evidence) -> str:
    frames = entry.get("frames")
    where = ""
    for frame in frames if isinstance(frames, list) else []:
        if isinstance(frame, dict) and "site-packages" not in (
            name := str(frame.get("filename", ""))
        ):
            where = f", at {name.rpartition('/')[2]}:{frame.get('line')}"
            break
    text = f"{entry['collective_seq_id']} ({entry.get('profiling_name')}, {entry.get('state')})"
    return f"rank {rank} on {evidence.host_of_rank(rank)}: its last collective is {text}{where}"
