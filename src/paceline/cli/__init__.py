"""The command line: one module per command in `commands`, imported when the command is typed."""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from paceline.cli import console
from paceline.cli.command_table import ABOUT, COMMANDS, EXAMPLES, FORWARDERS, SERVERS
from paceline.contract.run_folder import INTERRUPTED_EXIT, USAGE_EXIT
from paceline.errors import NoSlurm, PacelineError

HELP = ("-h", "--help")
COMPLETION = ("--install-completion", "--show-completion")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit with its code. Expected errors print no traceback."""
    args = list(sys.argv[1:] if argv is None else argv)
    # a log may hold characters that this locale cannot show
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = dispatch(args)
    except PacelineError as error:
        console.say_error(error)
        code = error.exit_code
    except KeyboardInterrupt:
        code = INTERRUPTED_EXIT
    except BrokenPipeError:
        # The reader of our output is gone; without this the interpreter complains at exit.
        sys.stdout = None
        code = 141
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        console.say_problem(f"{error.strerror or error}{where}.")
        code = 1
    # While Python shuts down, another Ctrl-C would end the process by the signal and change its exit code.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


def dispatch(args: list[str]) -> int:
    """Carry out a command line. What needs no typer comes first: importing it takes a moment."""
    console.show_logged()
    if args[:1] == ["help"] and args[1:]:
        args = [*args[1:], "--help"]
    if "_PACELINE_COMPLETE" in os.environ or (args and args[0].startswith(COMPLETION)):
        return run_command(args)
    if not args or args[0] in (*HELP, "help"):
        commands = [f"  {name:<10} {text}" for name, (_, text) in COMMANDS.items()]
        print(
            "\n".join([ABOUT, "", "Usage: paceline COMMAND [OPTIONS]", "", *commands, "", EXAMPLES])
        )
        return 0 if args else USAGE_EXIT
    if args[0] in ("--version", "version"):
        import paceline

        print(f"paceline {paceline.__version__}")
        return 0
    if args[0] in SERVERS:
        return int(importlib.import_module(SERVERS[args[0]]).serve(args[1:]))
    return run_command(args)


def run_command(args: list[str]) -> int:
    """Let typer parse the command line and run the command; turn its usage errors into ours."""
    from paceline.cli import forwarding, parser

    settings = {"prog_name": "paceline", "help_option_names": HELP, "standalone_mode": False}
    try:
        result = parser.make_app()(args, **settings)
    except forwarding.Forwarded as asked:
        from paceline.cli import on_cluster, submit_first

        if asked.key != "submit":
            submit_first.remind()
        if asked.key in FORWARDERS:
            return int(importlib.import_module(FORWARDERS[asked.key]).forwarded(asked))
        return on_cluster.forward(asked)
    except NoSlurm as problem:
        from paceline.cli import on_cluster

        raise on_cluster.point_to_cluster(problem, args[0]) from None
    except Exception as error:
        # Some versions of typer bundle click, others use the installed one: recognize its errors by their methods.
        if type(error).__name__ == "Abort":
            return INTERRUPTED_EXIT
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error)
            return USAGE_EXIT
        if hasattr(error, "format_message"):
            raise parser.usage_error(error) from None
        raise
    return result if isinstance(result, int) else 0
