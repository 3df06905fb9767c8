"""The command line: one module per command in `commands`, imported when the command is typed."""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from paceline.cli import console
from paceline.cli.command_table import COMMANDS, OTHER_NAMES, SERVERS
from paceline.contract.env import ON_CLUSTER
from paceline.contract.verdict import INTERRUPTED_EXIT, USAGE_EXIT
from paceline.errors import NoSlurm, PacelineError, UsageError

ABOUT = "Take a PyTorch script from your laptop to every GPU of a Slurm cluster,\nand keep it running until it is done."
EXAMPLES = """\
  paceline run train.py                     one rank per GPU, or two on the CPU
  paceline run --nproc 4 --cpu train.py --lr 0.1
  paceline submit --nodes 2 --gpus 8 train.py --lr 0.1
  paceline submit --on alps train.py        over SSH, after `paceline login`

Options of Paceline go before the script; everything after it is passed to the
script unchanged.
Run `paceline COMMAND --help` for the options of a command."""
HELP = ["-h", "--help"]
GPU_FLAGS = ("--gpus", "--gpus-per-node")
ARRAY_FLAGS = ("--array", "-a")
MAX_LISTED_GPUS = 16
TORCHRUN_ADDRESSES = ("--standalone", "--rdzv", "--master", "--node-rank", "--node_rank")


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
    except Exception as error:
        code = _code_of(error)
    # While Python shuts down, another Ctrl-C would end the process by the signal and change its exit code.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


def _code_of(error: Exception) -> int:
    """Return the exit code for an error that is not ours, and say what it means. A mistake of Paceline's is raised."""
    if _is_interrupt(error):
        return INTERRUPTED_EXIT
    if isinstance(error, BrokenPipeError):
        # The reader of our output is gone; without this the interpreter complains at exit.
        sys.stdout = None
        return 141
    if not isinstance(error, OSError):
        raise error
    where = f": {error.filename}" if error.filename else ""
    on = f" on {cluster}" if (cluster := os.environ.get(ON_CLUSTER)) else ""
    console.say_problem(f"{error.strerror or error}{on}{where}.")
    return 1


def _is_interrupt(error: BaseException) -> bool:
    """Return whether Ctrl-C has led to an error. pydantic, while it builds its tables, keeps only its name."""
    seen: list[BaseException] = []
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is None or each in seen:
            continue
        if isinstance(each, KeyboardInterrupt) or KeyboardInterrupt.__name__ in str(each):
            return True
        seen.append(each)
        left += [each.__cause__, each.__context__]
    return False


def dispatch(args: list[str]) -> int:
    """Import the module of a command and run it with the other arguments."""
    console.show_logged()
    if args[:1] == ["help"] and args[1:]:
        return dispatch([*args[1:], "--help"])
    if not args or args[0] in ("--help", "-h", "help"):
        print(overview())
        return 0 if args else USAGE_EXIT
    name, rest = args[0], args[1:]
    if name in ("--version", "version"):
        import paceline

        print(f"paceline {paceline.__version__}")
        return 0
    if name in SERVERS:
        return int(importlib.import_module(SERVERS[name]).serve(rest))
    if name not in COMMANDS:
        raise _misplaced_on(args) or _unknown_command(name, args[1:])
    return run_command(name, rest)


def overview() -> str:
    lines = [ABOUT, "", "Usage: paceline COMMAND [OPTIONS]", ""]
    lines += [f"  {name:<10} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join([*lines, "", EXAMPLES])


def run_command(name: str, args: list[str]) -> int:
    """Run a command's typer app; turn typer's usage errors into ours."""
    from paceline.cli.on_cluster.on_cluster import Forwarded, forward

    module = importlib.import_module(COMMANDS[name][0])
    app = getattr(module, "app", None) or single_command(module.command)
    try:
        result = app(
            args=args, prog_name=f"paceline {name}", standalone_mode=False, help_option_names=HELP
        )
    except Forwarded as asked:  # some commands have something to do here, too
        carry_out = getattr(module, "forwarded", forward)
        return int(carry_out(asked))
    except NoSlurm as problem:
        from paceline.cli.on_cluster.without_slurm import point_to_cluster

        raise point_to_cluster(problem, [name, *args], COMMANDS[name][0]) from None
    except Exception as error:
        # Some versions of typer bundle click, others use the installed one: recognize its errors by their methods.
        if type(error).__name__ == "Abort":
            return INTERRUPTED_EXIT
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error)
            return USAGE_EXIT
        if hasattr(error, "format_message"):
            raise _usage_error(error, name, args) from None
        raise
    return result if isinstance(result, int) else 0


def single_command(function: Any) -> Any:
    """Return a typer app of one command. If it takes a script, options end at the script."""
    import typer

    from paceline.cli.help import GroupedCommand

    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    takes_a_script = getattr(function, "takes_a_script", False)
    app.command(
        cls=GroupedCommand, context_settings={"allow_interspersed_args": not takes_a_script}
    )(function)
    return app


def _misplaced_on(args: list[str], group: str = "") -> UsageError | None:
    """Return the error for `--on` before the command, or before the subcommand of a group."""
    from paceline.cli.on_cluster.misplaced_on import explain_misplaced, is_on

    modules = {name: module for name, (module, _) in COMMANDS.items()}
    return explain_misplaced(args, modules, group) if args and is_on(args[0]) else None


def _usage_error(error: Any, name: str, args: list[str]) -> UsageError:
    """Return a usage error of click's in our words."""
    from paceline.spec.option_table import options_of
    from paceline.spec.synonyms import find_option

    path = error.ctx.command_path if error.ctx else f"paceline {name}"
    hint = f"See `{path} --help`, or `paceline reference {path.removeprefix('paceline ')}`."
    option = getattr(error, "option_name", "")
    if type(error).__name__ != "NoSuchOption":
        message = _invalid_value(error, args) or error.format_message().replace(
            "No such command", "Unknown command"
        )
        return UsageError(message if message.endswith((".", "?")) else f"{message}.", hint=hint)
    if option == "--on":
        from paceline.cli.on_cluster.misplaced_on import does_not_apply

        is_group = error.ctx is not None and hasattr(error.ctx.command, "commands")
        return (_misplaced_on(args, name) if is_group else None) or does_not_apply(name, hint)
    owners = [
        each
        for each in ("run", "submit")
        if any(option in known.all_flags for _, known in options_of(each))
    ]
    if name == "run" and option in GPU_FLAGS:
        hint = _ranks_instead(option, args)
    if owners and name not in owners:
        commands = " and ".join(f"`paceline {each}`" for each in owners)
        return UsageError(f"{option} applies to {commands}, not to `paceline {name}`.", hint=hint)
    if option in ARRAY_FLAGS:
        array = "Use `paceline sweep`: it submits job arrays, with one trial for each point."
        return UsageError(f"Unknown option {option}.", hint=array)
    if option.startswith(TORCHRUN_ADDRESSES):
        return UsageError(
            f"Unknown option {option}.",
            hint="Omit it: Paceline finds the nodes and a free port itself.",
        )
    parameters = error.ctx.command.params if error.ctx else ()
    own = {flag for each in parameters for flag in (*each.opts, *each.secondary_opts)}
    if name == "run" and (meant := find_option(option, "submit")) and meant.name in GPU_FLAGS:
        hint = _ranks_instead(option, args)
    return _unknown_option(option, name, own, hint)


# What click and pydantic say about a value, and what to use instead.
_EXPECTED = (
    (r"valid integer", "a whole number"),
    (r"valid (?:number|float)", "a number"),
    (r"greater than or equal to (\S+)|in the range x>=(\S+?)\.?$", "at least {}"),
    (r"less than or equal to (\S+)|in the range x<=(\S+?)\.?$", "at most {}"),
    (r"in the range (\S+)<=x<=(\S+?)\.?$", "a number from {} to {}"),
)


def _invalid_value(error: Any, args: list[str]) -> str:
    """Return what is wrong with the value of an option, in the words of our other errors; empty if it is not known."""
    import re

    flags = list(getattr(getattr(error, "param", None), "opts", ()))
    for pattern, expected in _EXPECTED if type(error).__name__ == "BadParameter" else ():
        if flags and (match := re.search(pattern, str(error.message))):
            flag = next((each for each in flags if _typed_value(each, args)), flags[0])
            use = expected.format(*(each for each in match.groups() if each is not None))
            return f'Invalid {flag} "{_typed_value(flag, args)}": use {use}.'
    return ""


def _typed_value(flag: str, args: list[str]) -> str:
    """Return what was typed after an option."""
    typed = [each.partition("=")[2] for each in args if each.startswith(f"{flag}=")]
    typed += args[args.index(flag) + 1 :][:1] if flag in args else []
    if not flag.startswith("--"):
        typed += [each[2:] for each in args if each.startswith(flag) and len(each) > 2]
    return typed[0] if typed else ""


def _ranks_instead(option: str, args: list[str]) -> str:
    """Return how `paceline run` chooses GPUs, for the number that somebody typed after an option."""
    text = _typed_value(option, args)
    count = int(text) if text.isdecimal() and 1 <= int(text) <= MAX_LISTED_GPUS else 2
    ranks, gpus = ("1 rank", "the GPU") if count == 1 else (f"{count} ranks", "the GPUs")
    visible = ",".join(map(str, range(count)))
    return (
        f"`paceline run` starts one rank per GPU. For {ranks}, use --nproc {count}; to"
        f" choose {gpus}, set CUDA_VISIBLE_DEVICES={visible}."
    )


def _unknown_option(option: str, name: str, own: Collection[str], hint: str) -> UsageError:
    """Return the error for an option that a command does not have; `own` are those that it has."""
    import difflib

    from paceline.spec.synonyms import SHORT_OPTIONS, find_option, is_of_script

    spelled, meant = option.replace("_", "-"), find_option(option, name)
    plain = {flag.lstrip("-"): flag for flag in own if flag.startswith("--")}
    close = [plain[each] for each in difflib.get_close_matches(option.lstrip("-"), plain, n=1)]
    if spelled in own or (meant is not None and meant.name in own):
        close = [spelled if spelled in own or meant is None else meant.name]
        hint = (option in SHORT_OPTIONS and SHORT_OPTIONS[option][1]) or hint
    elif "--nproc" in own and (elsewhere := find_option(option, "submit")) is not None:
        text = f"Unknown option {option}. {elsewhere.name} applies to `paceline submit`, not to `paceline {name}`."
        return UsageError(text, hint=hint)
    elif is_of_script(option):
        close, hint = (
            [],
            f"Options of your script go after it: paceline {name} train.py {option} ...",
        )
    return UsageError(
        f"Unknown option {option}.{f' Did you mean {close[0]}?' if close else ''}", hint=hint
    )


def _unknown_command(name: str, rest: Sequence[str]) -> UsageError:
    import difflib

    command = next((each for each in rest if each in COMMANDS), None)
    if name.startswith("-") and command is not None:
        return UsageError(
            f"{name} must follow the command.", hint=f"Type: paceline {command} {name} ..."
        )
    close = difflib.get_close_matches(name, (*COMMANDS, *OTHER_NAMES), n=1)
    if name.endswith(".py"):
        suggestion = f" Did you mean `paceline run {name}`?"
    elif close and close[0] in OTHER_NAMES:
        suggestion = f" Did you mean `{OTHER_NAMES[close[0]]}`?"
    else:
        suggestion = f" Did you mean {close[0]!r}?" if close else ""
    return UsageError(
        f"Unknown {'option' if name.startswith('-') else 'command'} {name!r}.{suggestion}",
        hint="" if suggestion else f"The commands are {', '.join(COMMANDS)}.",
    )
