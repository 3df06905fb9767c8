"""The commands on the pages: those that tests/docs/test_commands.py executes, and which tests execute the rest."""

from __future__ import annotations

import re
import shlex

from tests.docs.pages import Block

# Pages that tests of their own execute, block by block.
OWN_TESTS = {
    "README.md": "tests/docs/test_readme.py",
    "docs/tutorial.md": "tests/docs/test_tutorial.py",
    "docs/macos-windows.md": "tests/docs/test_macos_windows.py",
}
# What commands begin with that other tests execute: which, and words that these have.
ELSEWHERE = {
    "make check": ("Makefile", "check:"),
    "make test": ("Makefile", "test:"),
    "make docs": ("Makefile", "docs:"),
    "make soak": ("Makefile", "soak:"),
    "pip install": ("tests/docs/test_blocks.py", "test_extras_of_pip_exist"),
    "pytest": ("tests/cli", "pytest"),
    "cd digits": ("docs/new-project.md", "paceline new digits"),
    "paceline login": ("tests/remote", '"login"'),
    "paceline submit --on": ("tests/remote", "--on"),
    "paceline ps --on": ("tests/remote", "--on"),
    "paceline logs -f --on": ("tests/remote", "--on"),
    "paceline cancel --on": ("tests/remote", "--on"),
    "paceline init --on": ("tests/remote/test_submit.py", '"init", "--on"'),
    "paceline env build --on": ("tests/remote/test_submit.py", '"env", "build", "--on"'),
    "paceline show --on": ("tests/remote/test_watch.py", '"show", "--on"'),
    "paceline report --on": ("tests/remote/test_watch.py", '"report", "--on"'),
    "paceline fetch": ("tests/remote", '"fetch"'),
    "paceline data push": ("tests/remote", '"push"'),
    "paceline top": ("tests/ui/terminal", "top"),
    "paceline ui": ("tests/cli/commands/test_ui.py", '"ui"'),
    "paceline prove": ("tests/cli/commands/test_prove.py", '"prove"'),
    "paceline inspect data": ("tests/cli/commands/test_inspect.py", '"inspect"'),
    "srun --nodelist=n1 paceline clean": ("tests/slurm/test_staging.py", '"clean"'),
    "paceline sandbox": ("tests/docs/test_tutorial.py", "sandbox down"),
    "paceline --install-completion": ("tests/cli/test_typer_options.py", "--show-completion"),
    "paceline adopt": ("tests/tools/adopt", '"adopt"'),
    "paceline new": ("tests", '"new"'),
    "paceline sweep --wandb-sweep": ("tests/slurm/test_wandb_sweep.py", "--wandb-sweep"),
    "paceline wait RUN; curl": ("tests/cli/commands/test_wait.py", '"wait"'),
    "mpirun": ("tests/examples", "horovod"),
    "python make_shards.py": ("tests/examples", "make_shards"),
    "python train.py --weights": ("tests/examples", "--weights"),
}
# Commands that would train or submit show what they would do: the tutorial and the README do these things.
DRY = re.compile(r"^paceline (run|submit|sweep(?! show| cancel)|env build)\b(?!.*--dry-run)")
SKIPPED_PAGES = ("examples/", "CONTRIBUTING.md")  # commands of examples: tests/examples


def is_executed(block: Block, command: str) -> bool:
    """Return whether this block's own test or test_commands.py executes a command."""
    if block.page in OWN_TESTS or any(block.page.startswith(each) for each in SKIPPED_PAGES):
        return True
    return block.language == "sh" and not any(command.startswith(each) for each in ELSEWHERE)


def as_typed(command: str) -> str:
    """Return the command as test_commands.py executes it."""
    return DRY.sub(r"paceline \1 --dry-run", command)


def split(command: str) -> list[list[str]]:
    """Return the words of each command of a line, without its comment and its redirection."""
    words = shlex.split(command, comments=True)
    found: list[list[str]] = [[]]
    for word in words:
        if word == ">>":
            break
        if word in ("&&", "|", "||"):
            found.append([])
        elif word.endswith(";"):
            found[-1].append(word[:-1])
            found.append([])
        else:
            found[-1].append(word)
    return found
