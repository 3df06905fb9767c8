"""The nodes of a run with their CPUs and GPUs, and its ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from paceline.ui.terminal.plots import bar, short_number
from paceline.ui.terminal.top.text.labels import LABEL, label
from paceline.ui.terminal.top.text.words import duration, gigabytes, level, plain
from paceline.watch import origin
from paceline.watch.details import NodeDetails, RankDetails

MAX_NODES = 16  # shown unless the user wants all
MAX_NAMED = 4  # ranks that are named because something is wrong with them
SILENT = 60.0  # seconds without a heartbeat
# A mark and a colour for each state of a rank: nothing depends on the colour alone.
SLOW, QUIET = ("▲", "bold red"), ("!", "bold yellow")
MARKS = {
    "running": ("■", "green"),
    "starting": ("·", "yellow"),
    "finished": ("□", "blue"),
    "stopped": ("□", "yellow"),
    "ended": ("□", "dim"),
}
OLD = 2.0  # seconds after which a sample says when it was taken


def nodes(found: Sequence[NodeDetails], width: int, *, whole: bool) -> Text:
    shown = found if whole else found[:MAX_NODES]
    lines = [line for node in shown for line in _node(node, width)]
    if len(found) > len(shown):
        lines.append(
            label("", f"and {len(found) - len(shown)} more nodes: press enter to see them")
        )
    return Text("\n").join(lines)


def _node(node: NodeDetails, width: int) -> list[Text]:
    samples = [sample for sample in node.samples if "error" not in sample]
    sample = samples[-1] if samples else {}
    size = max(5, min(20, (width - LABEL - 24) // 2))
    line = label(node.host.partition(".")[0], "")
    if (cpu := _number(sample.get("cpu"))) is not None:
        line.append("cpu ").append(bar(cpu / 100, size), "cyan").append(f" {cpu:3.0f}%")
    memory = _number(sample.get("memory"))
    if memory is not None and node.memory:
        line.append(f"  mem {gigabytes(memory)}/{gigabytes(node.memory)} GB")
    gpus = sample.get("gpus")
    listed = [gpu for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []
    return [line, *_gpus(listed, node.gpus, size)]


def _gpus(
    gpus: Sequence[Mapping[str, Any]], known: Sequence[Mapping[str, Any]], size: int
) -> list[Text]:
    if len(gpus) > 2:
        busy = [_number(gpu.get("busy")) or 0.0 for gpu in gpus]
        line = label("", "gpu ")
        for each in busy:
            line.append(level(each / 100), _load(each))
        mean = sum(busy) / len(busy)
        return [line.append(f" {mean:3.0f}% of {len(busy)}").append(_gpu_memory(gpus, known))]
    lines = []
    for number, gpu in enumerate(gpus):
        each = _number(gpu.get("busy")) or 0.0
        line = label("", "gpu ").append(bar(each / 100, size), _load(each)).append(f" {each:3.0f}%")
        lines.append(line.append(_gpu_memory([gpu], known[number : number + 1])))
    return lines


def _gpu_memory(gpus: Sequence[Mapping[str, Any]], known: Sequence[Mapping[str, Any]]) -> str:
    used = [value for gpu in gpus if (value := _number(gpu.get("memory"))) is not None]
    totals = [value for gpu in known if (value := _number(gpu.get("memory"))) is not None]
    if not used or not totals:
        return ""
    name = plain(known[0].get("name", "")).removeprefix("NVIDIA ")
    return f"  mem {gigabytes(max(used))}/{gigabytes(totals[0])} GB  {name}".rstrip()


def ranks(found: Sequence[RankDetails], width: int, *, whole: bool) -> Text:
    """Return a map with a mark for each rank, and the names of those that need looking at."""
    if not found:
        return Text()
    room = max(8, (width - LABEL) // 8 * 8)
    lines = []
    for start in range(0, len(found), room):
        line = label("ranks" if start == 0 else "", "")
        for rank in found[start : start + room]:
            line.append(*_mark(rank))
        lines.append(line)
    counts = Counter(rank.state for rank in found)
    text = ", ".join(f"{count} {plain(state)}" for state, count in counts.items())
    pace = max(rank.seconds_per_step for rank in found)
    lines.append(label("", text + (f" · {_seconds(pace)} per step" if pace > 0 else "")))
    named = [rank for rank in found if _mark(rank) in (SLOW, QUIET)]
    lines += [_problem(rank) for rank in (named if whole else named[:MAX_NAMED])]
    if whole:
        lines += [_rank(rank) for rank in found]
    return Text("\n").join(lines)


def _mark(rank: RankDetails) -> tuple[str, str]:
    if rank.is_slow:
        return SLOW
    if rank.state == "running" and rank.age is not None and rank.age > SILENT:
        return QUIET
    return MARKS.get(rank.state, ("?", ""))


def _problem(rank: RankDetails) -> Text:
    where = f" rank {rank.rank} on {plain(rank.host).partition('.')[0]}"
    if rank.is_slow:
        return label("", "").append(*SLOW).append(f"{where} is slow: all others wait for it")
    return label("", "").append(*QUIET).append(f"{where} has been silent for {duration(rank.age)}")


def _rank(rank: RankDetails) -> Text:
    waited = f"  waited {duration(rank.waited)} for data" if rank.waited >= 1 else ""
    host = plain(rank.host).partition(".")[0]
    age = origin.now() - rank.seen if rank.seen is not None and rank.state == "running" else 0.0
    seen = f" {duration(age)} ago" if age > OLD else ""  # agents look at intervals
    return (
        label("", "")
        .append(*_mark(rank))
        .append(f" {rank.rank:>4} {host}  step {rank.step:,}{seen}{waited}")
    )


def _number(value: object) -> float | None:
    # not NaN either
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e18 else None


def _load(percent: float) -> str:
    return (
        "green"
        if percent >= 70
        else "yellow"
        if percent >= 30
        else "red"
        if percent >= 5
        else "dim"
    )


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{short_number(round(value * 1000, 1))} ms"
