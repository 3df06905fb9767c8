"""The manual page, in roff: the commands and options of the reference."""

from __future__ import annotations

import re
from collections.abc import Iterator

import paceline
from paceline.cli import ABOUT
from paceline.cli.command_table import COMMANDS
from paceline.cli.reference.entries import Page, Section
from paceline.contract import env

_FILES = (
    ("paceline.toml", "Settings of a project: the nearest one, up to the root of the repository."),
    (
        "~/.config/paceline/secrets.env",
        "Keys and passwords for all projects, readable by you alone.",
    ),
    ("/etc/paceline/site.toml", "Defaults and limits of your site."),
)
_VARIABLES = (
    (env.SCRATCH, "The scratch folder, which holds all run folders."),
    (env.PROFILE, "The profile of paceline.toml to use."),
    (env.POLL_INTERVAL, "How long Paceline reuses an answer from Slurm, in seconds."),
    (env.SANDBOX, "The folder of the sandbox."),
)


def to_roff(page: Page) -> str:
    """Return the manual page, from the page about commands and options."""
    lines = [
        f'.TH PACELINE 1 "" "paceline {escape(paceline.__version__)}" "User Commands"',
        ".nh",
        ".ad l",
        ".SH NAME",
        "paceline \\- run PyTorch scripts on this machine or on Slurm",
        ".SH SYNOPSIS",
        ".B paceline",
        ".I COMMAND",
        "[OPTIONS] [SCRIPT [ARGS]...]",
        ".SH DESCRIPTION",
        *_text(f"{ABOUT.replace(chr(10), ' ')}\n\n{page.intro}"),
    ]
    commands = [section for section in page.sections if section.title.startswith("paceline ")]
    lines += [
        ".SH COMMANDS",
        *_list((name, text[0].upper() + text[1:] + ".") for name, (_, text) in COMMANDS.items()),
    ]
    for section in commands:
        lines += _section(section)
    lines.append(".SH OPTIONS")
    for section in page.sections:
        if section not in commands:
            lines += _section(section)
    lines += [".SH ENVIRONMENT", *_list(_VARIABLES), ".SH FILES", *_list(_FILES)]
    lines += [".SH SEE ALSO", ".BR sbatch (1),", ".BR srun (1),", ".BR torchrun (1)"]
    return "\n".join(lines) + "\n"


def _section(section: Section) -> Iterator[str]:
    yield f".SS {escape(section.title)}"
    intro = re.sub(
        r"It also takes the options in these groups that name it: .*",
        "See also OPTIONS.",
        section.intro,
    )
    yield from _text(intro)
    if section.example:
        yield from (
            ".PP",
            ".nf",
            *(escape(line) or "\\&" for line in section.example.splitlines()),
            ".fi",
        )
    yield from _list((entry.names[0], entry.text) for entry in section.entries)


def _list(entries: Iterator[tuple[str, str]] | tuple[tuple[str, str], ...]) -> Iterator[str]:
    for name, text in entries:
        yield from (".TP", f"\\fB{escape(name)}\\fR", escape(_plain(text)) or "\\&")


def _text(text: str) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        if paragraph.strip():
            yield from (
                ".PP",
                *(escape(_plain(line).strip()) for line in paragraph.splitlines() if line.strip()),
            )


def _plain(text: str) -> str:
    text = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text)
    return re.sub(r"[\x00-\x1f\x7f]+", " ", text.replace("`", ""))


def escape(text: str) -> str:
    """Return a line of text that roff takes as text."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("…", "...").replace("→", "->")
    return f"\\&{text}" if text.startswith((".", "'")) else text
