"""What `ssh` runs. Every value that reaches another machine's shell goes through here."""

from __future__ import annotations

import base64
import os
import re
import shlex
from collections.abc import Iterable

from paceline.contract.verdict import INTERRUPTED_EXIT
from paceline.errors import EnvironmentProblem, UsageError

MAX_BYTES = 120_000  # of a command: Linux passes at most 128 KiB to the login shell

# Ctrl-C in a terminal reaches the shell there, too. Without this, ssh reports its end like a broken connection.
ON_INTERRUPT = f'trap "trap - EXIT; exit {INTERRUPTED_EXIT}" INT'
SETUP_FAILED = 96  # exit code on the login node if commands of the user's `setup` have failed
SETUP_END = "paceline-setup-end"  # on stderr: what came before it was printed by `setup`


def word(text: str) -> str:
    """Return a word that a POSIX shell reads back byte for byte."""
    if "\0" in text:
        raise UsageError(
            f"There is a NUL character in {text!r}.", hint="Remove it: a shell cannot pass it on."
        )
    return shlex.quote(text)


def words(texts: Iterable[str]) -> str:
    return " ".join(word(text) for text in texts)


def shell_command(script: str) -> str:
    """Return a script for `sh` as a command line that bash, zsh, tcsh and fish understand alike.

    The login shell on the other side may be any of these, and they differ in quotes, `!` and newlines. None of them
    changes the characters of base64.
    """
    encoded = base64.b64encode(os.fsencode(script)).decode()
    if len(encoded) > MAX_BYTES:
        raise UsageError(
            f"This command has {len(script):,} characters, too many for one command on another machine.",
            hint="Put long arguments into a file of your project.",
        )
    decode = 'script=$(echo "$1" | base64 -d) || exit'
    return f"""exec sh -c '{ON_INTERRUPT}; {decode}; shift; eval "$script"' sh {encoded}"""


# -- what comes first --------------------------------------------------------------------------------------------

# ssh starts no login shell, and many sites set the PATH in /etc/profile. What it prints is no part of any answer.
_PROFILE = (
    "{ [ -r /etc/profile ] && . /etc/profile; PATH=$PATH:$before; } </dev/null >/dev/null 2>&1"
)
_MODULES = """\
command -v module >/dev/null 2>&1 || for init in "${LMOD_PKG:-}/init/sh" "${MODULESHOME:-}/init/sh" \
    /etc/profile.d/lmod.sh /etc/profile.d/z00_lmod.sh /etc/profile.d/modules.sh /usr/share/lmod/lmod/init/sh \
    /usr/share/modules/init/sh /usr/share/Modules/init/sh; do
    if [ -r "$init" ]; then . "$init" </dev/null >/dev/null 2>&1; break; fi
done
"""


def setup_text(setup: str | None, *, quiet: bool = False, undo: str = "") -> str:
    """Return shell text that makes Slurm and modules known, as a login shell would, and runs the user's commands.

    If they fail, the shell runs `undo` and ends with `SETUP_FAILED`, and its last message is how they ended. What they
    print goes to stderr, or nowhere with `quiet`.
    """
    if not setup:
        return f"before=$PATH; command -v sbatch >/dev/null 2>&1 || {_PROFILE}\n"
    uses_modules = re.search(r"\b(?:module|ml)\b", setup) is not None
    missing = "command -v sbatch && command -v module" if uses_modules else "command -v sbatch"
    failed = f'echo "exit code $?" >&2; {undo}exit {SETUP_FAILED}'
    return (
        f"before=$PATH; {{ {missing}; }} >/dev/null 2>&1 || {_PROFILE}\n{_MODULES if uses_modules else ''}"
        f"trap {word(failed)} EXIT\n"
        f"eval {word(setup)} </dev/null {'>/dev/null 2>&1' if quiet else '>&2'} || exit\ntrap - EXIT\n"
    )


def read_setup_output(errors: str) -> str:
    """Return what `setup` has printed, from all that came on stderr."""
    said, ended, _ = errors.partition(f"{SETUP_END}\n")
    return said.strip("\n") if ended else ""


def describe_setup(said: str, *, name: str) -> str:
    return f"`setup` of {name} printed:" + "".join(f"\n  {line}" for line in said.splitlines())


def explain_setup(errors: str, *, name: str) -> EnvironmentProblem:
    """Return the error for commands of `setup` that have failed, with what they wrote."""
    *said, code = [line for line in errors.splitlines() if line.strip()] or [""]
    return EnvironmentProblem(
        f"`setup` of {name} failed with {code or 'an error'}{':' if said else '.'}"
        + "".join(f"\n  {each}" for each in said),
        hint=f"Fix `setup` in [profiles.{name}], or in clusters.toml.",
    )
