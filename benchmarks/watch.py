"""How quickly Paceline shows runs, when there are 10,000 of them.

    python benchmarks/watch.py [--runs 10000] [--active 10] [--repeats 5] [--lines 1000000]
        [--parts list curves browser top]

`list`: `paceline ps --all` and `ps --live`, beside a script that does nothing but find
and parse every run.json. Targets for 10,000 runs: below 3 s.

`curves`: the first curve of a metrics file with a million lines, and what following it costs, beside a script that
parses every line. Targets: below 1 s, and the same cost however long the file is.

`browser`: the runs page of `paceline ui` in Chromium, until its first row is visible. Target: below 2 s.

`top`: the CPU time of `paceline top` in a minute in which active runs log every second. Target: below 5 % of a core.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from machine import describe


def list_runs(options: argparse.Namespace, folder: Path) -> None:
    from watch_parts.run_list import measure

    measure(folder, options.runs, options.active, options.repeats)


def draw_curves(options: argparse.Namespace, folder: Path) -> None:
    from watch_parts.metrics import measure

    measure(folder, options.lines, options.repeats)


def paint_runs(options: argparse.Namespace, folder: Path) -> None:
    from watch_parts.first_paint import measure

    measure(folder, options.runs, options.active, options.repeats)


def watch_runs(options: argparse.Namespace, folder: Path) -> None:
    from watch_parts.top import measure

    measure(folder, options.runs, options.active)


PARTS: dict[str, Callable[[argparse.Namespace, Path], None]] = {
    "list": list_runs,
    "curves": draw_curves,
    "browser": paint_runs,
    "top": watch_runs,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--active", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--lines", type=int, default=1_000_000, help="of the metrics file")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    describe("watch")
    for name in options.parts:
        with tempfile.TemporaryDirectory(prefix="paceline-watch-") as folder:
            PARTS[name](options, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
