"""`paceline new`: create a project that runs right away."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.tools.new.project import TEMPLATES, create_project, find_template

# The examples of --help follow the mark that the layout of --help looks for.
HELP = "\n".join(
    [
        "Create a project that runs right away: training script, paceline.toml, requirements.txt, test and README.",
        "",
        "`paceline run` and `paceline submit` work in it without any option. Its data is small and needs no download.",
        "",
        "\b",
        "  paceline new digits --template mnist",
        *(f"  paceline new NAME -T {name:<12} {each.about}" for name, each in TEMPLATES.items()),
    ]
)


def command(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the project and of its folder.")
    ],
    *,
    template: Annotated[
        str,
        typer.Option(
            "-T",
            "--template",
            metavar="NAME",
            help=f"Template to start from: {', '.join(TEMPLATES)}.",
        ),
    ] = "blank",
) -> int:
    found = find_template(template)
    files = create_project(name, found, Path.cwd())
    print(f"created {name} with {len(files)} files from the template {template}; next:")
    print(f"  cd {name}")
    print("  pip install -r requirements.txt pytest")
    print(f"  paceline run              {found.reaches} on two CPU cores")
    print("  pytest                    trains for a moment on two ranks")
    print("  paceline submit --gpus 4  trains on Slurm; --dry-run prints the job script")
    print(
        "To use a cluster over SSH from your laptop, add its login node to paceline.toml, as shown at the end of that"
        " file."
    )
    return 0


command.__doc__ = HELP
