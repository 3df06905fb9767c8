"""`paceline report`: a run or a sweep as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import console, runs, typer_options
from paceline.contract.files import is_standard_output, show_size, write_output
from paceline.contract.sweep_folder import SweepFolder


def command(
    name: Annotated[
        str,
        typer.Argument(
            metavar="RUN|SWEEP", help="Run (as for `show`), or a sweep's name or folder."
        ),
    ] = "last",
    *,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="Where to write it.")
    ] = Path("report.html"),
    light: Annotated[
        bool,
        typer.Option(
            "--light", help="Use static pictures instead of Plotly: small enough for an email."
        ),
    ] = False,
) -> int:
    """Write a run or a sweep as one HTML file that opens without a network.

    \b
      paceline report                        the newest run, as report.html
      paceline report 1a2b -o run.html       one run
      paceline report digits -o digits.html  a sweep, with the pages of its best trials
      paceline report 1a2b --light           less than 500 kB, with static pictures

    The file has the pages of `paceline ui`: curves, log, nodes, where the time went, settings and code.
    """
    from paceline.ui.report import render, run_answers, sweep_answers

    typer_options.require_folder(output)
    folder = runs.run_or_sweep(name)
    answers, title = (
        sweep_answers(folder) if isinstance(folder, SweepFolder) else run_answers(folder)
    )
    page = render(answers, title=title, light=light)
    write_output(output.absolute(), page)
    hint = " (--light writes a small one, without Plotly)" if not light else ""
    say = console.say_note if is_standard_output(output) else print
    say(f"wrote the report to {output}, {show_size(len(page.encode()))}{hint}")
    return 0
