"""A run's time in the terminal: a time line of its attempts and job starts, and where the time went."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from rich.text import Text

from paceline.spec.quantities import show_seconds
from paceline.ui.terminal.plots import divide_width
from paceline.ui.terminal.text import printable
from paceline.watch.details import AttemptDetails, GoodputDetails, RunDetails
from paceline.watch.goodput import SHARES, UNMEASURED, Span

Line = tuple[str, Text]  # a label and what stands beside it

# How each category looks: colour, and a character that tells it apart without colours.
LOOKS = {
    "queued": ("grey50", "░", "."),
    "starting": ("yellow", "▒", "s"),
    "running": ("blue", "█", "r"),
    "training": ("green", "█", "#"),
    "saving": ("cyan", "▓", "w"),
    "lost": ("red", "x", "x"),
    "idle": ("grey37", "·", "-"),
}
UNKNOWN_LOOK = ("default", "?", "?")
PART_NAMES = {"first_batch": "first batch", "setup": "set-up", "data": "waiting for data"}
MIN_PART = 0.005  # of the wall time: a smaller part is not named
MAX_ATTEMPTS = 8


def goodput_lines(
    goodput: GoodputDetails, *, width: int, unicode: bool, with_bar: bool = True
) -> list[Line]:
    """Return a bar of all categories, their shares, and how often the run has failed."""
    if goodput.total <= 0:
        return []
    lines: list[Line] = []
    if with_bar:
        bar = Text()
        for name, columns in divide_width(
            {name: goodput.seconds[name] for name in SHARES}, width
        ).items():
            bar.append(glyph(name, unicode=unicode) * columns, LOOKS[name][0])
        lines.append(("goodput", bar))
    lines.append(("" if with_bar else "goodput", Text()))
    for entry in _legend(goodput, unicode=unicode):
        last = lines[-1][1]
        if last and len(last) + 2 + len(entry) > width:
            lines.append(("", entry))
        else:
            last.append("  " if last else "").append_text(entry)
    lines.append(("", Text(_sum(goodput), "dim")))
    return lines


def _legend(goodput: GoodputDetails, *, unicode: bool) -> Iterable[Text]:
    for name in SHARES:
        if goodput.seconds[name] <= 0:
            continue
        text = Text().append(glyph(name, unicode=unicode), LOOKS[name][0])
        text.append(f" {name} {_share(goodput.seconds[name], goodput.total)}")
        parts = {
            PART_NAMES.get(part, part): seconds
            for part, seconds in goodput.parts.get(name, {}).items()
            if seconds >= MIN_PART * goodput.total and seconds < goodput.seconds[name]
        }
        parts.pop("compute" if name == "training" else UNMEASURED, None)
        if parts:
            named = ", ".join(
                f"{part} {_share(seconds, goodput.total)}" for part, seconds in parts.items()
            )
            text.append(f" ({named})", "dim")
        yield text


def _share(seconds: float, total: float) -> str:
    return f"{seconds / total:.0%}" if seconds >= 0.01 * total else "<1%"


def _sum(goodput: GoodputDetails) -> str:
    text = f"of {show_seconds(goodput.total)}"
    if goodput.failures:
        text += f"; {goodput.failures} failure{'s' * (goodput.failures > 1)}"
    if goodput.failures > 1:  # one alone tells nothing about how often
        text += (
            f", one per {show_seconds(goodput.seconds_between_failures or 0.0)} of time on nodes"
        )
    return text


def timeline_lines(details: RunDetails, *, width: int, unicode: bool) -> list[Line]:
    """Return the run's time from left to right, one line for each attempt, and when its jobs started."""
    spans = details.timeline
    lines: list[Line] = []
    if spans:
        began, ended = spans[0].began, spans[-1].ended
        lines.append(("time line", draw_spans(spans, began, ended, width=width, unicode=unicode)))
        if marks := _marks(details, began, ended, width):
            lines.append(("job starts" if details.overview.job else "starts", Text(marks, "bold")))
        lines.append(("", _ends(began, ended, width)))
    attempts = details.attempts
    hidden = attempts[1 : 1 - MAX_ATTEMPTS] if len(attempts) > MAX_ATTEMPTS else []
    for attempt in attempts:
        if attempt not in hidden:
            lines.append((f"attempt {attempt.number}", Text(describe_attempt(attempt))))
        elif attempt is hidden[-1]:
            lines.append(("", Text(f"({len(hidden)} more attempts)", "dim")))
    return lines


def draw_spans(
    spans: Sequence[Span], began: float, ended: float, *, width: int, unicode: bool
) -> Text:
    """Return a line whose columns show what most of their time went into; blank where the run was over."""
    text = Text()
    column = (ended - began) / width
    position = 0
    for number in range(width):
        left, right = began + number * column, began + (number + 1) * column
        while position < len(spans) and spans[position].ended <= left:
            position += 1
        shares: dict[str, float] = {}
        for span in spans[position:]:
            if span.began >= right:
                break
            shares[span.kind] = (
                shares.get(span.kind, 0.0) + min(right, span.ended) - max(left, span.began)
            )
        kind = max(shares, key=lambda each: shares[each]) if shares else ""
        text.append(glyph(kind, unicode=unicode) if kind else " ", LOOKS[kind][0] if kind else "")
    return text


def _marks(details: RunDetails, began: float, ended: float, width: int) -> str:
    """Return marks where jobs started again; empty if the first start is the only one."""
    if len(details.job_starts) < 2 or ended <= began:
        return ""
    marks = [" "] * width
    for start in details.job_starts:
        place = int((start.began - began) / (ended - began) * width)
        marks[min(width - 1, max(0, place))] = "^"
    return "".join(marks).rstrip()


def _ends(began: float, ended: float, width: int) -> Text:
    first = time.strftime("%Y-%m-%d %H:%M", time.localtime(began))
    same_day = first[:10] == time.strftime("%Y-%m-%d", time.localtime(ended))
    last = time.strftime("%H:%M" if same_day else "%m-%d %H:%M", time.localtime(ended))
    between = width - len(first) - len(last)
    return Text(f"{first}{' ' * between}{last}" if between > 0 else first, "dim")


def describe_attempt(attempt: AttemptDetails) -> str:
    """Return how an attempt ended, and how long it took."""
    verdict = attempt.verdict or (
        "runs" if attempt.ended is None and attempt.began is not None else "no verdict"
    )
    took = ""
    if attempt.began is not None and attempt.ended is not None:
        took = f" after {show_seconds(attempt.ended - attempt.began)}"
    failure = attempt.failure
    if failure is None:
        return printable(f"{verdict}{took}{f': {attempt.reason}' if attempt.reason else ''}")
    host = failure.host or "?"
    who = f"rank {failure.rank} on {host}" if failure.rank is not None else host
    where = f"\nat {failure.where}" if failure.where else ""
    return printable(f"{verdict}{took}: {who}: {failure.text}{where}")


def glyph(kind: str, *, unicode: bool = True) -> str:
    """Return the character of a category; without colours, it tells them apart."""
    return LOOKS.get(kind, UNKNOWN_LOOK)[1 if unicode else 2]
