"""Write docs/pictures/ps.svg: the rows of `paceline ps`.  python docs/pictures/ps.py [FILE]"""

from __future__ import annotations

import functools
import io
import os
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text
from rich.theme import Theme
from sample_runs import SampleRuns
from top import make_runs, without_remote_fonts

from paceline.cli import console
from paceline.cli.commands import ps
from paceline.cli.commands import ps as newest_rows
from paceline.watch.overview import read_rows

HERE = Path(__file__).parent
WIDTH = 112


def draw(scratch: Path) -> str:
    samples = SampleRuns(scratch)
    make_runs(samples)
    printed = io.StringIO()
    out = Console(
        theme=Theme(console.THEME),
        width=WIDTH,
        file=printed,
        force_terminal=True,
        color_system="truecolor",
        highlight=False,
    )
    os.environ["PACELINE_SCRATCH"] = str(scratch)
    console.console = lambda **_: out  # type: ignore[assignment]
    newest_rows.read_rows = functools.partial(read_rows, query=samples.query)
    ps.command(every=True)
    picture = Console(width=WIDTH, file=io.StringIO(), record=True, highlight=False)
    picture.print(Text.from_ansi(printed.getvalue().rstrip()), soft_wrap=True)
    return without_remote_fonts(picture.export_svg(title="paceline ps"))


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "ps.svg"
    with tempfile.TemporaryDirectory() as folder:
        out.write_text(draw(Path(folder)), encoding="utf-8")


if __name__ == "__main__":
    main()
