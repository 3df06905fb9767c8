"""A container's image: its definition file, readable and free of secrets, and the lines that build it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from paceline.contract.quote import quote
from paceline.contract.redaction import has_password
from paceline.errors import SpecError
from paceline.launch.environment.build_script import IMAGE, BuildFolder
from paceline.launch.environment.container import engines

_INSIDE = "/opt/paceline"  # holds the input of the installation while it runs
_SOURCES = (
    "docker",
    "library",
    "oras",
    "shub",
    "docker-daemon",
    "docker-archive",
    "oci",
    "oci-archive",
)


def is_remote(image: str) -> bool:
    return "://" in image


def definition(
    *,
    base: str,
    origin: str,
    folder: BuildFolder,
    lines: Sequence[str],
    constraints: Sequence[str] = (),
) -> str:
    """Return the definition file. `origin` names the files that the requirements come from."""
    _check_lines([*lines, *constraints])
    held = f" --constraint {_INSIDE}/constraints.txt" if constraints else ""
    files = [folder.requirements, *([folder.constraints] if constraints else [])]
    text = [
        f"# Written by Paceline: {_one_line(base)} with the packages of {_one_line(origin)}.",
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
            f"base is {base!r}, but {kind}:// is not a source of images.",
            hint=f"Use {_SOURCES[0]}://name:tag.",
        )
    return [f"Bootstrap: {kind}", f"From: {_one_line(name)}"]


def _one_line(text: str) -> str:
    assert "\n" not in text, "values in [environment] have one line"
    return text


def _file(path: Path) -> str:
    """Return a path for %files, which splits its lines at spaces."""
    if re.search(r"\s", str(path)):
        raise SpecError(
            f"The image is built in {path.parent}, but definition files cannot hold a path with a space.",
            hint="Choose another scratch folder with [project] scratch or PACELINE_SCRATCH.",
        )
    return str(path)


def _check_lines(lines: Sequence[str]) -> None:
    """Reject what must not be in an image, and what is not there inside one."""
    for line in lines:
        if has_password(line):
            address = re.sub(r"://[^@]*@", "://***@", line)
            raise SpecError(
                f"The requirement {address!r} would put a password into the image.",
                hint="Remove the address, and add it to pip's own settings inside the base image.",
            )
        if re.match(r"(-e|--editable)\b|\.{0,2}/|file:|[\w.\[\],-]+\s*@\s*file:", line):
            raise SpecError(
                f"The requirement {line!r} is a path outside of the image.",
                hint="Remove it: the project's own code travels with each run.",
            )


def image_steps(*, engine: str, base: str, installs: bool) -> list[str]:
    """Return the lines that build from the definition, or fetch the base as it is if there is nothing to install."""
    failed = '|| paceline_fail "$engine could not build the image."'
    if installs:
        make = f'"$engine" build ${{fakeroot:+"$fakeroot"}} "$target/{IMAGE}" "$build/image.def" {failed}'
    elif is_remote(base):
        make = f'"$engine" pull "$target/{IMAGE}" {quote(base)} || paceline_fail {quote(f"Cannot fetch {base}.")}'
    else:
        make = f'"$engine" build "$target/{IMAGE}" {quote(base)} {failed}'
    lines = f"""\
engine=''
for name in {" ".join(engines(engine))}; do
    if [ -z "$engine" ] && command -v "$name" >/dev/null; then engine=$name; fi
done
[ -n "$engine" ] || paceline_fail "There is neither apptainer nor singularity on $HOSTNAME."
# Keep layers and temporary files on scratch: a home folder is small, and a node's /tmp may be memory.
cache="${{target%/*}}/cache/$engine"
mkdir -p "$target" "$cache" "$build/tmp" || paceline_fail "Cannot write to ${{target%/*}}."
export APPTAINER_CACHEDIR="$cache" SINGULARITY_CACHEDIR="$cache"
export APPTAINER_TMPDIR="$build/tmp" SINGULARITY_TMPDIR="$build/tmp"
""".splitlines()
    if installs:
        lines += [
            "# Apptainer detects what it may do; Singularity needs an option if you are not root.",
            "fakeroot=''",
            '[ "$engine" = singularity ] && [ "$(id -u)" != 0 ] && fakeroot=--fakeroot',
        ]
    return [*lines, 'say "building the image with $engine on $HOSTNAME"', make]
