"""The text of the lines of `metrics.jsonl`. What the console shows is in `progress_bar`."""

from __future__ import annotations

import functools
import json

from paceline.contract.run_folder import ALONE
from paceline.runtime.metrics.reduction import Batch, Row
from paceline.runtime.metrics.throughput import Rates

MARK = f', "{ALONE}": "rank 0"'


class LineFormatter:
    """Writes rows as lines of JSON. The lines of a batch have the same rates: those of the steps
    since the last one.
    """

    def __init__(self, throughput: Rates) -> None:
        self.rates: dict[str, float] = {}  # of the newest lines that have any
        self._throughput = throughput

    def lines(
        self, batch: Batch, means: dict[int, dict[str, float]], *, is_alone: bool = False
    ) -> str:
        """Return the lines of a batch. With `is_alone`, they are rank 0's share, say so, and have
        no rates.
        """
        if is_alone:
            return "".join(
                [_line(step, row, means[step], {ALONE: MARK}) for step, row in batch.rows.items()]
            )
        rates = self._throughput.of(batch.amounts, batch.ranks) if batch.amounts is not None else {}
        if rates:
            self.rates = rates = rates | self._throughput.memory()
        texts = {
            name: f', "{name}": {value:.6g}' for name, value in rates.items() if value - value == 0
        }
        return "".join([_line(step, row, means[step], texts) for step, row in batch.rows.items()])


def _line(step: int, row: Row, means: dict[str, float], rates: dict[str, str]) -> str:
    """Format one line by hand: at thousands of steps a second, `json.dumps` would be noticeable."""
    line = f'{{"step": {step}, "epoch": {row.epoch}, "time": {row.time:.6f}'
    # A number that the script itself logs under one of these names comes first.
    line += "".join([text for name, text in rates.items() if name not in means])
    for name, value in means.items():
        # NaN and infinities are not JSON, and every line must be valid.
        line += (
            f", {_quoted(name)}: {value}" if value - value == 0 else f', {_quoted(name)}: "{value}"'
        )
    for name, text in (row.texts or {}).items():
        line += f", {_quoted(name)}: {json.dumps(text)}"
    return line + "}\n"


@functools.lru_cache(maxsize=1024)
def _quoted(name: str) -> str:
    return json.dumps(name)
