"""The command line: one file per verb, each imported when it is typed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from paceline.cli import console
from paceline.contract.verdict import INTERRUPTED_EXIT, USAGE_EXIT
from paceline.errors import PacelineError, UsageError

# Each verb, the module that does it (its `command`, or its `app` where it has verbs of its own), and what it does.
VERBS = {
    "run": ("paceline.cli.run", "start a script here: N processes on this machine's GPUs or CPU cores"),
    "submit": ("paceline.cli.submit", "the same on Slurm; --dry-run prints the exact script"),
    "sweep": ("paceline.cli.sweep", "many runs: grid, random, TPE, seeds; as job arrays, or here"),
    "ps": ("paceline.cli.ps", "the runs, and how each is doing"),
    "show": ("paceline.cli.show", "one run: its attempts, and where its time went"),
    "logs": ("paceline.cli.logs", "what a run prints; -f follows it"),
    "cancel": ("paceline.cli.cancel", "end a run, and keep it ended"),
    "export": ("paceline.cli.export", "a run's newest weights, as one plain file"),
    "sync": ("paceline.cli.sync", "what a run kept for W&B, sent from where there is a network"),
    "doctor": ("paceline.cli.doctor", "what is wrong here, before the queue finds it"),
    "shell": ("paceline.cli.shell", "a shell inside an allocation, with a job's environment"),
    "env": ("paceline.cli.env", "build: the venv or container that runs use, on a node like theirs"),
    "data": ("paceline.cli.data", "stage: look at what runs copy to the nodes, and pack it"),
    "clean": ("paceline.cli.clean", "what runs have left on nodes: show it, remove it"),
    "init": ("paceline.cli.init", "write a commented paceline.toml from what the cluster answers"),
    "sandbox": ("paceline.cli.sandbox", "a real multi-node Slurm on this machine, to rehearse on"),
}

ABOUT = (
    "Take a PyTorch script that works on your laptop to every GPU of a Slurm cluster, and keep it running."
)
EXAMPLES = """\
  paceline run train.py                        every GPU here, or two processes on the CPU
  paceline run --nproc 4 --cpu train.py --lr 0.1
  paceline submit --nodes 2 --gpus 8 train.py --lr 0.1

Everything before the script is Paceline's; everything after it is the script's, untouched.
`paceline VERB --help` tells more about each."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Do what was typed, and exit with its code. No error of ours or of the user's shows a traceback."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = dispatch(words)
    except PacelineError as error:
        console.say_error(error)
        code = error.exit_code
    except KeyboardInterrupt:
        code = INTERRUPTED_EXIT
    except BrokenPipeError:
        # Whoever read our output has had enough; keep the interpreter from saying so at its exit.
        sys.stdout = None
        code = 141
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        console.say_problem(f"{error.strerror or error}{where}")
        code = 1
    sys.exit(code)


def dispatch(words: list[str]) -> int:
    """Find the verb, import it, and give it the rest."""
    if not words or words[0] in ("--help", "-h", "help"):
        print(overview())
        return 0 if words else USAGE_EXIT
    verb, rest = words[0], words[1:]
    if verb in ("--version", "version"):
        import paceline

        print(f"paceline {paceline.__version__}")
        return 0
    if verb not in VERBS:
        raise _unknown_verb(verb)
    return perform(verb, rest)


def overview() -> str:
    lines = [ABOUT, "", "paceline VERB [options]", ""]
    lines += [f"  {name:<9} {text}" for name, (_, text) in VERBS.items()]
    return "\n".join([*lines, "", EXAMPLES])


def perform(verb: str, words: list[str]) -> int:
    """Run a verb's typer command; what typer finds wrong with the words is said as our own errors are."""
    module = importlib.import_module(VERBS[verb][0])
    app = getattr(module, "app", None) or single_command(module.command)
    try:
        result = app(args=words, prog_name=f"paceline {verb}", standalone_mode=False)
    except Exception as error:
        # typer carries its own click in some versions and uses the installed one in others: known by its shape.
        if type(error).__name__ == "Abort":
            return INTERRUPTED_EXIT
        if hasattr(error, "format_message"):
            raise UsageError(
                error.format_message().rstrip("."), hint=f"see `paceline {verb} --help`"
            ) from None
        raise
    return result if isinstance(result, int) else 0


def single_command(function: Any) -> Any:
    """A typer app of one command. Words after the first that is no option belong to the user's script."""
    import typer

    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(context_settings={"allow_interspersed_args": not _takes_a_script(function)})(function)
    return app


def _takes_a_script(function: Any) -> bool:
    return bool(getattr(function, "takes_a_script", False))


def _unknown_verb(verb: str) -> UsageError:
    import difflib

    if verb.endswith(".py"):
        return UsageError(f"{verb!r} is no verb", hint=f"did you mean `paceline run {verb}`?")
    close = difflib.get_close_matches(verb, VERBS, n=1)
    return UsageError(
        f"{verb!r} is no verb",
        hint=f"did you mean {close[0]!r}?" if close else f"the verbs are: {', '.join(VERBS)}",
    )
