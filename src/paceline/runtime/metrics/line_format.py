"""The lines of `metrics.jsonl`."""

from __future__ import annotations

import functools
import json

from paceline.runtime.metrics.reduction import Row
from paceline.runtime.metrics.throughput import Rates


class LineFormatter:
    """Writes rows as lines of JSON. Remembers the previous row, for the time per step."""

    def __init__(self, throughput: Rates) -> None:
        self.rates: dict[str, float] = {}  # of the newest line that has any
        self._throughput = throughput
        self._previous: tuple[int, float] | None = None

    def lines(self, rows: dict[int, Row], means: dict[int, dict[str, float]]) -> str:
        last = next(reversed(rows), None)
        return "".join([self._line(step, row, means[step], is_last=step == last) for step, row in rows.items()])

    def _line(self, step: int, row: Row, means: dict[str, float], *, is_last: bool) -> str:
        """Format one line by hand: at thousands of steps a second, `json.dumps` would be noticeable."""
        line = f'{{"step": {step}, "epoch": {row.epoch}, "time": {row.time:.6f}'
        previous = self._previous
        if previous is None or step > previous[0]:
            self._previous = (step, row.time)
            if previous is not None:
                seconds = (row.time - previous[1]) / (step - previous[0])
                line += f', "seconds": {seconds:.6f}'
                if row.samples and seconds > 0 and not row.amounts.samples:
                    line += f', "samples_per_second": {row.samples / seconds:.1f}'
            line += self._rates(row, means, is_last=is_last)
        for name, value in means.items():
            # NaN and infinities are not JSON, and every line must be valid.
            line += f", {_quoted(name)}: {value}" if value - value == 0 else f', {_quoted(name)}: "{value}"'
        for name, text in (row.texts or {}).items():
            line += f", {_quoted(name)}: {json.dumps(text)}"
        return line + "}\n"

    def _rates(self, row: Row, means: dict[str, float], *, is_last: bool) -> str:
        rates = self._throughput.of(row.amounts)
        if not rates:
            return ""
        if is_last:
            rates |= self._throughput.memory()
        self.rates = rates
        # A number that the script itself logs under one of these names comes first.
        return "".join([f', "{name}": {value:.6g}' for name, value in rates.items() if name not in means])


@functools.lru_cache(maxsize=1024)
def _quoted(name: str) -> str:
    return json.dumps(name)
