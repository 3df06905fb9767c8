"""A container's image: the definition that it is built from, readable and free of secrets, and how it is built."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from paceline.errors import SpecError
from paceline.plan.environment.build import IMAGE, BuildFolder
from paceline.plan.quote import quote
from paceline.plan.redaction import has_password

_INSIDE = "/opt/paceline"  # what the installation needs, while it goes on
_SOURCES = ("docker", "library", "oras", "shub", "docker-daemon", "docker-archive", "oci", "oci-archive")


def is_remote(image: str) -> bool:
    return "://" in image


def definition(
    *, base: str, origin: str, folder: BuildFolder, lines: Sequence[str], constraints: Sequence[str] = ()
) -> str:
    """The definition file. `origin` says what the requirements were read from."""
    _check_lines([*lines, *constraints])
    held = f" --constraint {_INSIDE}/constraints.txt" if constraints else ""
    files = [folder.requirements, *([folder.constraints] if constraints else [])]
    text = [
        f"# Written by Paceline: {_one_line(base)}, and what {_one_line(origin)} asks for.",
        "# By hand: apptainer build image.sif image.def",
        *_header(base),
        "",
        "%files",
        *(f"    {_file(path)} {_INSIDE}/{path.name}" for path in files),
        "",
        "%post",
        "    set -e",
        "    export PIP_BREAK_SYSTEM_PACKAGES=1 # a container is an environment of its own",
        "    python3 -m pip install --no-input --no-cache-dir --disable-pip-version-check --progress-bar=off \\",
        f"        --requirement {_INSIDE}/requirements.txt{held}",
        f"    rm -r {_INSIDE}",
        "",
        "%labels",
        f"    paceline.base {_one_line(base)}",
        f"    paceline.requirements {_one_line(origin)}",
    ]
    return "\n".join(text) + "\n"


def _header(base: str) -> list[str]:
    kind, _, name = base.rpartition("://")
    if not kind:
        return ["Bootstrap: localimage", f"From: {_one_line(base)}"]
    if kind not in _SOURCES:
        raise SpecError(
            f"base is {base!r}, and no image comes from {kind}://", hint=f"use {_SOURCES[0]}://name:tag"
        )
    return [f"Bootstrap: {kind}", f"From: {_one_line(name)}"]


def _one_line(text: str) -> str:
    assert "\n" not in text, "keys of [environment] are texts of one line"
    return text


def _file(path: Path) -> str:
    """%files splits its lines at blanks."""
    if re.search(r"\s", str(path)):
        raise SpecError(
            f"the image is built in {path.parent}, and definition files cannot name a path with a blank in it",
            hint="choose another scratch folder: [project] scratch, or PACELINE_SCRATCH",
        )
    return str(path)


def _check_lines(lines: Sequence[str]) -> None:
    """What must not stand in an image, and what could not be found inside one."""
    for line in lines:
        if has_password(line):
            address = re.sub(r"://[^@]*@", "://***@", line)
            raise SpecError(
                f"the requirements say {address!r}: a password would stand in the image",
                hint="leave the address out, and put it into pip's own settings inside the base image",
            )
        if re.match(r"(-e|--editable)\b|\.{0,2}/|file:|[\w.\[\],-]+\s*@\s*file:", line):
            raise SpecError(
                f"the requirements say {line!r}, which lies outside of the image",
                hint="leave it out: the project's own code travels with each run",
            )


def image_steps(*, engine: str, base: str, installs: bool) -> list[str]:
    """Build from the definition, or fetch the base as it is where nothing is installed into it."""
    engines = dict.fromkeys([engine, "apptainer", "singularity"])
    failed = '|| fail "$engine could not build the image"'
    if installs:
        make = f'"$engine" build ${{fakeroot:+"$fakeroot"}} "$target/{IMAGE}" "$build/image.def" {failed}'
    elif is_remote(base):
        make = (
            f'"$engine" pull "$target/{IMAGE}" {quote(base)} || fail {quote(f"{base} could not be fetched")}'
        )
    else:
        make = f'"$engine" build "$target/{IMAGE}" {quote(base)} {failed}'
    lines = f"""\
engine=''
for each in {" ".join(engines)}; do
    if [ -z "$engine" ] && command -v "$each" >/dev/null; then engine=$each; fi
done
[ -n "$engine" ] || fail "there is neither apptainer nor singularity on $HOSTNAME"
# Layers and temporary files lie on scratch: a home folder is small, and /tmp of a node may be memory.
cache="${{target%/*}}/cache/$engine"
mkdir -p "$target" "$cache" "$build/tmp" || fail "cannot write to ${{target%/*}}"
export APPTAINER_CACHEDIR="$cache" SINGULARITY_CACHEDIR="$cache"
export APPTAINER_TMPDIR="$build/tmp" SINGULARITY_TMPDIR="$build/tmp"
""".splitlines()
    if installs:
        lines += [
            "# Apptainer finds out by itself what it may do; Singularity has to be told that nobody is root here.",
            "fakeroot=''",
            '[ "$engine" = singularity ] && [ "$(id -u)" != 0 ] && fakeroot=--fakeroot',
        ]
    return [*lines, 'say "making the image with $engine on $HOSTNAME"', make]
