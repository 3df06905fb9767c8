"""`paceline completion`: a script for bash, zsh or fish that completes commands and options, without Python."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Annotated

import typer

from paceline.errors import UsageError

SHELLS = ("bash", "zsh", "fish")
_SCRIPT = """\
# Completes commands and options of paceline. Everything after the script is the script's own: file names.
_paceline() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} command=${{COMP_WORDS[1]}} each flags=
    COMPREPLY=()
    for each in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        [[ $each == *.py ]] && command=its-own
    done
    if ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W {commands} -- "$word"))
        return
    fi
    case "$command ${{COMP_WORDS[2]}}" in
{pairs}
        *) case "$command" in
{singles}
        esac ;;
    esac
    if [[ -n $flags && ($word == -* || ($COMP_CWORD == 2 && $flags != -*)) ]]; then
        COMPREPLY=($(compgen -W "$flags" -- "$word"))
    else
        local IFS=$'\\n' # names of files may have spaces
        COMPREPLY=($(compgen -f -- "$word"))
    fi
}}
complete -o filenames -o bashdefault -F _paceline paceline
"""


def command(
    shell: Annotated[str, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")],
) -> int:
    """Print a script that completes commands and options in your shell.

    \b
    Add one of these lines to ~/.bashrc, ~/.zshrc or ~/.config/fish/config.fish:
      eval "$(paceline completion bash)"
      eval "$(paceline completion zsh)"
      paceline completion fish | source
    """
    if shell not in SHELLS:
        raise UsageError(
            f"There is no completion for {shell!r}.", hint=f"Use one of {', '.join(SHELLS)}."
        )
    from paceline.cli.reference.commands import walk

    words = {name: _flags(each) for name, each in walk()}
    if shell == "fish":
        print(make_fish_script(words), end="")
        return 0
    before = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    print(before + make_script(words), end="")
    return 0


def make_script(words: Mapping[str, list[str]]) -> str:
    """Return the script, from the options of each command; those of groups have a space in their name."""
    subcommands: dict[str, list[str]] = {}
    for name in words:
        first, _, second = name.partition(" ")
        subcommands.setdefault(first, []).extend([second] if second else [])
    # After a command without options of its own come its subcommands.
    singles = {name: words.get(name) or below for name, below in subcommands.items()}
    pairs = {name: flags for name, flags in words.items() if " " in name}
    return _SCRIPT.format(
        commands=shlex.quote(" ".join(subcommands)),
        pairs="\n".join(_arm(shlex.quote(name), flags) for name, flags in pairs.items()),
        singles="\n".join("    " + _arm(name, flags) for name, flags in singles.items()),
    )


def make_fish_script(words: Mapping[str, list[str]]) -> str:
    """Return the script for fish: a line per command and option. After a script, only names of files are completed."""
    lines = [
        "# Completes commands and options of paceline. Everything after the script is the script's own: file names.",
        "function __paceline_is",
        "    set -l words (commandline -opc)",
        "    string match -q '*.py' -- $words; and return 1",
        "    set -q argv[1]; or return 0",
        "    set -l last (math (count $argv) + 1)",
        '    test (count $words) -ge $last; and test "$words[2..$last]" = "$argv"',
        "end",
        "function __paceline_first",
        "    test (count (commandline -opc)) -eq (math (count $argv) + 1); and __paceline_is $argv",
        "end",
    ]
    for name in dict.fromkeys(name.partition(" ")[0] for name in words):
        lines.append(f"complete -c paceline -f -n __paceline_first -a {name}")
    for name, flags in words.items():
        first, _, second = name.partition(" ")
        if second:
            lines.append(f"complete -c paceline -f -n '__paceline_first {first}' -a {second}")
        lines += [f"complete -c paceline -n '__paceline_is {name}' -l {flag[2:]}" for flag in flags]
    return "\n".join(lines) + "\n"


def _arm(pattern: str, words: list[str]) -> str:
    return f"        {pattern}) flags={shlex.quote(' '.join(words))} ;;"


def _flags(each: object) -> list[str]:
    found = [
        flag
        for param in getattr(each, "params", ())
        if param.param_type_name == "option" and not param.hidden
        for flag in (*param.opts, *param.secondary_opts)
        if flag.startswith("--")
    ]
    return sorted({*found, "--help"})
